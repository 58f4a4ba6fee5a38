"""Cuts of stored models of transformers: one folder from another.

A folder is written in one of four forms. "plain": plain transformers loads the smaller model.
"code": transformers loads it with a file of code in the folder, since no config states its sizes.
"full": plain transformers loads the model at its size, with zeros for what is gone. "headwise":
`load` opens it. Each has the cut beside its weights, in cut.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.checkpoints.config import CUT, read_config
from headwise.checkpoints.conversion import (
    OutputPlan,
    WritePlan,
    plan_output,
    require_usable_target,
    write_target,
)
from headwise.checkpoints.fields import ConfigFields
from headwise.checkpoints.places import Place, find_places
from headwise.checkpoints.source import (
    FOREIGN,
    INDEX,
    SAFETENSORS,
    TORCH,
    CheckpointSource,
    open_source,
    require_inside,
)
from headwise.checkpoints.transformers import (
    ADAPTER,
    CONFIG,
    auto_class_name,
    find_trusted_code,
    make_empty_model,
    measure_model_bytes,
    read_model,
)
from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.function.rounding import input_share
from headwise.function.weights import State
from headwise.layouts import registry
from headwise.layouts.plan import ConversionStep, make_copy_step
from headwise.scanning import labels
from headwise.scanning.labels import FORM, RECORD
from headwise.support.arguments import require_choice
from headwise.support.progress import Progress, no_progress
from headwise.support.text import human_bytes, list_some
from headwise.surgery.code import FILE, dump_config, make_code_config, pack_code, state_pruned_heads
from headwise.surgery.cut import Cut, LayerCut, full_size
from headwise.surgery.memory import cut_model
from headwise.surgery.models import HeadPlaces, ModelHeads, pack, resize
from headwise.surgery.plain import PlainConfig, add_biases, find_plain_config
from headwise.surgery.steps import Merge

Form = Literal["plain", "code", "full", "headwise"]
Wanted = Literal["auto", Form]  # "auto": plain where a config states the cut, else code
LOADS: Mapping[Form, str] = {
    "plain": "plain transformers",
    "code": "transformers with trust_remote_code=True",
    "full": "plain transformers",
    "headwise": "headwise.surgery.load",
}
WEIGHTS = (SAFETENSORS, *TORCH, *FOREIGN, INDEX)
SAME = "a folder that gives the outputs of the cut model"
AGAIN = "remove the folder, and write it again"
SIDES, DRAWS = 2, 3  # both runs round; some draws stand for all
ORIGINAL = "the folder of the model as save_pretrained wrote it"


class StoredHeads:
    """The attention modules of a model in a folder, by their names in the loaded model.

    Raises:
        CheckpointError: the folder holds no complete model, or is cut in a form of headwise.
        OptionError: no layout for this model; code that may not run; or quantised, adapted or
            shared weights.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        measure_model_bytes(folder)
        self.folder, self.source = folder, open_source(folder)
        self.config = read_config(folder)
        _require_plain_folder(folder, self.source, self.config)
        if self.config.section("pruned_heads"):
            self.config = ConfigFields(state_pruned_heads(self.config), origin=str(folder))
        code = find_trusted_code(folder, self.config, trusted=trust_remote_code)
        self.heads = HeadPlaces(make_empty_model(self.config, code))
        files = find_places(self.source.headers, self.config)
        self.places = _pair_places(folder, self.heads, files)

    def cut(self, name: str, layer: LayerCut) -> State:
        """Return the canonical tensors of an attention after its cut."""
        return layer.apply(self.places[name].read(self.source), self.heads.specs[name])

    def fit(self, cut: Cut) -> Cut:
        """Return the cut by the names of the loaded model, as its modules can hold it.

        Layers may also have the names of the file, or of the model without its head.
        """
        base = getattr(self.heads.model, "base_model_prefix", "") + "."
        names = {name.removeprefix(base): name for name in self.places}
        names |= {place.name: name for name, place in self.places.items()}
        names |= {name: name for name in self.places}
        return self.heads.fit(Cut({names.get(name, name): layer for name, layer in cut}))


@dataclass(frozen=True)
class CutStep(ConversionStep):
    """One tensor of an attention that is cut, out of all that ``make`` returns."""

    make: Callable[[], State] = dict

    @property
    def is_copy(self) -> bool:
        """False: the tensor is computed."""
        return False

    def convert(self, stored: Mapping[str, Tensor]) -> State:  # noqa: ARG002 - of all tensors
        """Return the tensor."""
        made = self.make()
        return {name: made[name] for name in self.outputs}


@dataclass(frozen=True, eq=False)
class FolderPlan:
    """Files of a cut model, before anything is written; ``str()`` says what they will be.

    Attributes:
        stored: the model before the cut.
        cut: as it is applied.
        form: "plain", "code", "full" or "headwise".
        config: the fields of config.json that change, and biases of zeros.
        output: the files with tensors.
    """

    stored: StoredHeads
    cut: Cut
    form: Form
    config: PlainConfig
    output: OutputPlan

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the cut model."""
        return self.output.nbytes

    @property
    def nbytes_before(self) -> int:
        """Bytes of all tensors of the model before the cut."""
        return sum(header.nbytes for header in self.stored.source.headers.values())

    def __str__(self) -> str:
        """Return the sizes, the changes of the config, and what loads the folder."""
        loads = LOADS[self.form]
        before, after = human_bytes(self.nbytes_before), human_bytes(self.nbytes)
        changes = [f"{name} {new}" for name, (_, new) in self.config.changes.items()]
        stated = f"; config.json: {', '.join(changes)}" if changes else ""
        size = f"tensors of {after}, {before} before"
        merged = any(step.kind == Merge.kind for _, cut in self.cut for step in cut.steps)
        if merged and self.form != "full" and self.nbytes >= self.nbytes_before:
            kind = type(self.stored.heads.model).__name__
            size += f", no smaller: {kind} has a key and a value for each head"
        return f"{size}{stated}; {loads} loads the folder"

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of an attention, by their names in the file."""
        stored = self.stored
        layer = self.cut.layers.get(name) or stored.heads.whole().layers[name]
        state = add_biases(stored.cut(name, layer), self.config.biases.get(name, ()))
        place, headers = stored.places[name], stored.source.headers
        if self.form == "code":
            return pack_code(place, state, headers, is_off=name in self.config.without)
        return pack(place, state, place.sizes(headers))


def plan_folder(
    cut: Cut, source: str | Path, *, form: Wanted = "auto", trust_remote_code: bool = False
) -> FolderPlan:
    """Return the files of a cut model; nothing is written.

    Args:
        cut: layers have the names of the loaded model.
        source: a folder from save_pretrained.
        form: see `write`.
        trust_remote_code: True to run code in the folder.

    Raises:
        CheckpointError, OptionError, ShapeError: see `write`.
    """
    require_choice("form", form, get_args(Wanted), "auto")
    stored = StoredHeads(Path(source), trust_remote_code=trust_remote_code)
    fitted = stored.fit(full_size(cut) if form == "full" else cut)
    states = {
        name: {n: x.to("meta") for n, x in stored.cut(name, layer).items()}
        for name, layer in fitted
    }
    config = PlainConfig(stored.config)
    if form in ("auto", "plain", "full"):
        config = find_plain_config(stored.heads, states.items(), stored.config)
        if CUT in stored.config:
            config = PlainConfig(stored.config, obstacle=f"{source}, whose layers differ already")
        if config.obstacle and form != "auto":
            raise _no_plain_form(config.obstacle, cut, form)
    if form == "auto":
        form = "code" if config.obstacle else "plain"
    if form == "code":
        parts = stored.heads, fitted, states.items(), stored.config, stored.places
        config = make_code_config(*parts)
    bare = FolderPlan(stored, fitted, form, config, OutputPlan((), None))
    output = plan_output(stored.source, _plan_steps(bare), {FORM: form})
    return replace(bare, output=replace(output, beside=_plan_beside(bare)))


def _no_plain_form(obstacle: str, cut: Cut, form: Form) -> OptionError:
    ways = '"code", which transformers loads with trust_remote_code, or "headwise"'
    if form == "plain":
        try:
            full_size(cut)
            ways = f'"full", the same outputs at full size, or {ways}'
        except HeadwiseError:
            pass
    return OptionError(
        saw=obstacle,
        needed="sizes that the class of plain transformers builds from a config.json; nothing was "
        "written",
        do=f"choose another {{form}}: {ways}",
        parameter="form",
    )


def _plan_steps(plan: FolderPlan) -> Iterator[ConversionStep]:
    stored, headers = plan.stored, plan.stored.source.headers
    changed = {*plan.cut.layers, *plan.config.biases}
    inside = {name for each in changed for name in stored.places[each].module.tensors}
    for name in headers:
        if name not in inside:
            yield make_copy_step(name, name, headers[name])
    tensors = lru_cache(maxsize=1)(plan.tensors)  # one attention at a time
    for attention in changed:
        first = min(stored.places[attention].module.tensors)
        for name, tensor in tensors(attention).items():
            inputs = (name if name in headers else first,)
            shapes = {name: tuple(tensor.shape)}
            yield CutStep(inputs, shapes, make=partial(tensors, attention))


def _plan_beside(plan: FolderPlan) -> dict[str, Path | str]:
    """Return the files that hold no weights, such as those of the tokenizer, and the cut."""
    folder, states = plan.stored.folder, plan.stored.source.states
    beside: dict[str, Path | str] = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in inner.parts)
        has_weights = path in states or path.name.endswith(WEIGHTS)
        if path.is_file() and not (is_hidden or has_weights):
            require_inside(path, folder)
            beside[str(inner)] = path
    if plan.config.changes:
        beside[CONFIG] = json.dumps(plan.config.values, indent=2) + "\n"
    if plan.form == "code":
        beside |= {CONFIG: dump_config(plan.config.values), FILE.name: FILE}
    earlier = folder / RECORD
    cut = Cut.load(earlier).then(plan.cut) if earlier.is_file() else plan.cut
    return beside | {RECORD: cut.to_json()}


@dataclass(frozen=True)
class Written:
    """Folder of a cut model.

    Attributes:
        folder: its path.
        form: "plain", "code", "full" or "headwise".
        changes: field of config.json -> its value before and after.
        nbytes, nbytes_before: bytes of all tensors after the cut, and before.
    """

    folder: Path
    form: Form
    changes: Mapping[str, tuple[Any, Any]]
    nbytes: int
    nbytes_before: int


def write(
    cut: Cut,
    source: str | Path,
    target: str | Path,
    *,
    form: Wanted = "auto",
    trust_remote_code: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    progress: Progress = no_progress,
) -> Written:
    """Write a cut of a stored model into a new folder; the source stays as it is.

    The target appears whole or not at all, with the tokenizer and the other small files of the
    source, and the cut in cut.json. One attention at a time is in memory.

    Args:
        cut: layers have the names of the loaded model: ``ModelHeads(model).whole()``.
        source: a folder from save_pretrained, with weights in safetensors or of torch.
        target: a new folder.
        form: "plain" for a smaller model that plain transformers loads; "code" for one that
            transformers loads with a file of code in the folder, where layers may differ; "auto"
            for the first of these that can be; "full" for the model at its size, with zeros for
            what is gone; "headwise" for a folder that `load` opens.
        trust_remote_code: True to run code in the folder of the source.
        inputs: arguments of the model, by name, to check the folder as `headwise prune` does: a new
            process loads it, and `check_cut` compares it with the original. None for no check.
        progress: called with a file's name, the bytes done, and the bytes in all.

    Raises:
        OptionError: the config of plain transformers cannot state the sizes of this cut; or the
            model or the cut cannot be cut, see `ModelHeads` and `LayerCut.apply`.
        CheckpointError: no complete model, a target that exists or is inside the source, too little
            disk space, or a source that changes meanwhile.
    """
    plan = plan_folder(cut, source, form=form, trust_remote_code=trust_remote_code)
    stored, output = plan.stored.source, plan.output
    target = require_usable_target(stored, Path(target), "safetensors")
    options = plan.form, plan.config.values, output.beside
    write_target(WritePlan(stored, target, output, options), progress)
    if inputs is not None:
        original, _ = read_model(Path(source), trust_remote_code=trust_remote_code)
        check_cut(target, plan.cut, original.eval(), inputs, trust_remote_code=trust_remote_code)
    return Written(target, plan.form, plan.config.changes, plan.nbytes, plan.nbytes_before)


def load(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load a model from a folder that `write` has made, of any form.

    The model has the class that config.json names, in eval mode and in the dtype of the file. In a
    folder of the form "headwise" its attention modules have the sizes of the cut. Code in the
    folder runs only with ``trust_remote_code=True``.

    Raises:
        CheckpointError: another folder, a cut of an unknown version, or tensors that are missing,
            unexpected or of other sizes.
        OptionError: quantised, adapted or shared weights, or a model that cannot be read.
        MissingExtraError: transformers is not installed.
    """
    folder = Path(folder)
    measure_model_bytes(folder)
    source = open_source(folder)
    form = read_form(folder)
    cut, config = Cut.load(folder / RECORD), read_config(folder)
    _require_plain_weights(folder, source, config)
    model, info = read_model(folder, trust_remote_code=trust_remote_code)
    if form != "headwise":
        _require_all(folder, info, frozenset())
        labels.label_model(model, folder)
        return model.eval()
    heads = ModelHeads(model)
    places = _pair_places(folder, heads, find_places(source.headers, config))
    fitted = heads.fit(cut)
    changed: dict[str, Tensor] = {}
    for name, layer in fitted:
        changed |= _read_cut_place(folder, source, heads, places[name], name, layer)
    stored = {n for name in fitted.layers for n in places[name].module.tensors}
    _require_all(folder, info, frozenset(stored | changed.keys()))
    resize(model, heads, fitted, changed)
    vars(model)["save_pretrained"] = partial(_save_of_headwise, model)
    return model.eval()


def _save_of_headwise(model: Any, *given: Any, **options: Any) -> None:
    """Save a model of the form "headwise" as its class does, and warn."""
    warnings.warn(
        "nothing loads this folder: its config.json does not state the sizes of the heads. Write "
        'the cut in the form "code" before tuning: headwise.surgery.write(..., form="code")',
        stacklevel=2,
    )
    type(model).save_pretrained(model, *given, **options)


def _read_cut_place(
    folder: Path,
    source: CheckpointSource,
    heads: HeadPlaces,
    place: Place,
    name: str,
    layer: LayerCut,
) -> dict[str, Tensor]:
    left, target = layer.origins, heads.places[name]
    sizes = target.sizes(heads.state)
    counts = {"heads": len(left.query), "kv_heads": len(left.kv), "head_dim": sizes["head_dim"]}
    stored = {local: source[full].clone() for full, local in place.module.tensors.items()}
    shapes = {local: tuple(x.shape) for local, x in stored.items()}
    try:
        state = place.layout.read(stored, sizes=place.layout.sizes(shapes, counts))
        packed = pack(target, state, sizes)
    except HeadwiseError as error:
        raise CheckpointError(
            saw=f"{folder}: the tensors of {place.name} do not fit {RECORD}: {error}",
            needed=f"{len(left.query)} heads and {len(left.kv)} kv heads",
            do="copy the folder again, or write it again with headwise.surgery.write",
        ) from error
    if missing := sorted(target.module.tensors.keys() - packed.keys()):
        raise _bad_folder(folder, f"it lacks {list_some(missing)}")
    dtypes = {local: heads.state[local].dtype for local in target.module.tensors}
    usual = next(iter(dtypes.values()))
    return {full: tensor.to(dtypes.get(full, usual)) for full, tensor in packed.items()}


def _require_all(folder: Path, info: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise for tensors that transformers did not find, place or fit, beside known ones."""
    problems = {
        "it lacks": sorted({*info["missing_keys"]} - known),
        "the model has no place for": sorted({*info["unexpected_keys"]} - known),
        "other sizes than config.json states, of": sorted(
            {name for name, *_ in info["mismatched_keys"]} - known
        ),
    }
    for problem, names in problems.items():
        if names:
            raise _bad_folder(folder, f"{problem} {list_some(names)}")


def _bad_folder(folder: Path, saw: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{folder}: {saw}",
        needed="the tensors of the cut model, all of them and no others",
        do="copy the folder again, or write it again with headwise.surgery.write",
    )


def read_form(folder: Path) -> str:
    """Return the form of a folder that `write` has made: "plain", "code", "full" or "headwise".

    Raises:
        CheckpointError: another folder, or a form of another version.
    """
    source = open_source(folder)
    form = labels.read_form(source)
    known = next((each for each in get_args(Form) if each == form), None)
    if known is None or not (folder / RECORD).is_file():
        lacks = f"the {FORM} of its weights" if form is None else RECORD
        raise CheckpointError(
            saw=f"{folder} without {lacks}"
            if form is None or known
            else f"{folder} of the form {form!r:.40}",
            needed="a folder that headwise.surgery.write has made, and the version that wrote it",
            do="load other folders with transformers: AutoModel.from_pretrained(folder)",
        )
    return str(known)


# ---- check: a new process loads the folder -------------------------------------------------------

# No name of headwise: what loads a folder of the forms "plain" and "full" is transformers alone.
PLAIN = """
def load(folder, kind, dtype):
    import transformers
    options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    options["trust_remote_code"] = TRUSTED
    model, info = getattr(transformers, kind).from_pretrained(folder, **options)
    wrong = {name: sorted(map(str, names)) for name, names in info.items() if names}
    assert not wrong, f"transformers reports {wrong}"
    return model
"""
HEADWISE = """
def load(folder, kind, dtype):
    import headwise.surgery
    return headwise.surgery.load(folder, trust_remote_code=TRUSTED).to(dtype)
"""
RUN = """
import sys, torch
from safetensors.torch import load_file, save_file
folder, kind, dtype, given, made = sys.argv[1:]
model = load(folder, kind, getattr(torch, dtype)).eval()
with torch.no_grad():
    output = model(**load_file(given))[0]
save_file({"output": output.contiguous()}, made)
"""


def check_cut(
    folder: Path,
    cut: Cut,
    original: Any,
    inputs: Mapping[str, Tensor],
    *,
    trust_remote_code: bool = False,
) -> float:
    """Compare a written folder with the original; see `check_folder`.

    Output projections of the original are set to zero where heads are gone. A cut that no change of
    the original's size equals is compared with the same cut in memory.
    """
    with suppress(OptionError):
        cut = full_size(cut, in_place=True)
    model = cut_model(cut, original, share=True)
    return check_folder(folder, model, inputs, trust_remote_code=trust_remote_code)


def check_folder(
    folder: str | Path,
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    trust_remote_code: bool = False,
) -> float:
    """Compare a written folder with the cut model in memory, and return the largest difference.

    A new process loads the folder, by plain transformers unless its form is "headwise".

    Args:
        folder: of `headwise.surgery.write`.
        model: the same cut in memory: `headwise.surgery.cut_model`.
        inputs: arguments of the model, by name.
        trust_remote_code: True to run code in the folder.

    Raises:
        OptionError: code in the folder that may not run.
        CheckpointError: the process fails, or its outputs differ by more than rounding.
    """
    folder = Path(folder)
    find_trusted_code(folder, read_config(folder), trusted=trust_remote_code)
    form, kind = read_form(folder), find_loader(folder, model)
    script = f"TRUSTED = {trust_remote_code or form == 'code'}\n"
    script += (HEADWISE if form == "headwise" else PLAIN) + RUN
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as made:
        given, output = Path(made, "inputs.safetensors"), Path(made, "output.safetensors")
        save_file({name: x.detach().cpu().contiguous() for name, x in inputs.items()}, given)
        arguments = [str(folder), kind, dtype, str(given), str(output)]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            saw = f"{folder} cannot be loaded: {done.stderr.strip()[-300:]}"
            raise CheckpointError(saw=saw, needed=SAME, do=AGAIN)
        stored = load_file(output)["output"]
    return _require_same(folder, stored, *allow_runs(model, inputs))


def _require_same(folder: Path, stored: Tensor, expected: Tensor, allowed: float) -> float:
    """Return how far two outputs are apart; raise where that is more than allowed."""
    if not bool(expected.isfinite().all()):
        raise OptionError(
            saw="outputs of the model in memory that are not finite",
            needed="finite weights and inputs, without which no check could fail",
            do="load the model again; NaN in one weight reaches every later layer",
        )
    saw, apart = f"an output {tuple(stored.shape)}, not {tuple(expected.shape)}", torch.nan
    if stored.shape == expected.shape:
        apart = float((stored.double() - expected.double()).abs().max())
        saw = f"apart by {apart:.3g}, where rounding explains {allowed:.3g}"
    if not apart <= allowed:
        raise CheckpointError(
            saw=f"{folder} gives other outputs than the model in memory: {saw}",
            needed=SAME,
            do=AGAIN,
        )
    return apart


def find_loader(folder: Path, model: Any) -> str:
    """Return the name in transformers of the class that loads the folder of a model."""
    kind, auto_map = auto_class_name(model), dict(read_config(folder).get("auto_map") or {})
    return next((n for n, code in auto_map.items() if code == f"{FILE.stem}.{kind}"), kind)


def allow_runs(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """Return a model's output, and how far rounding may move two runs of it apart.

    What each module makes is moved as rounding of its sums may move it, at random. No weights are
    copied, and none in float64, as an error budget takes.
    """
    modules = [m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor)]

    def run(draw: int) -> Tensor:
        generator = torch.Generator().manual_seed(draw)

        def move(module: Any, _: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):  # of a router
                return output
            terms = max(module.weight.shape[-1], module.weight[0].numel())
            share = input_share(terms, output.dtype)
            moves = 2 * torch.rand(output.shape, generator=generator) - 1
            return output * (1 + share * moves.to(output))

        hooks = [each.register_forward_hook(move) for each in modules] if draw else []
        try:
            result: Tensor = model(**inputs)[0]
        finally:
            for hook in hooks:
                hook.remove()
        return result

    with torch.no_grad():
        output, *moved = [run(draw) for draw in range(1 + DRAWS)]
        return output, SIDES * max(float((x - output).abs().max()) for x in moved)


# ---- what can be cut -----------------------------------------------------------------------------


def _require_plain_folder(
    folder: Path, source: CheckpointSource, config: Mapping[str, Any]
) -> None:
    if (folder / ADAPTER).is_file():
        raise OptionError(
            saw=f"{folder} holds an adapter, {ADAPTER}",
            needed=ORIGINAL,
            do="merge the adapter: model.merge_and_unload().save_pretrained(NEW_DIR)",
        )
    _require_plain_weights(folder, source, config)
    if labels.read_form(source) == "headwise":
        raise OptionError(
            saw=f"{folder}, which is cut in the form of headwise",
            needed=ORIGINAL,
            do=f"cut the original by both: Cut.load({RECORD!r}).then(cut)",
        )


def _require_plain_weights(
    folder: Path, source: CheckpointSource, config: Mapping[str, Any]
) -> None:
    quantised = registry.find_quantisation(source.headers)
    if quantised is None and config.get("quantization_config") is None:
        return
    raise OptionError(
        saw=f"{folder} holds quantised weights"
        + (f": {quantised.reason}" if quantised else f": quantization_config in {CONFIG}"),
        needed="weights in floating point",
        do="cut the model before quantisation, and quantise it then",
    )


def _pair_places(folder: Path, heads: HeadPlaces, files: list[Place]) -> dict[str, Place]:
    """Return each attention's place in the file, where names differ, by its name in the model."""
    by_name = {place.name: place for place in files}
    by_number = {_number(place): place for place in files}
    paired = {
        name: replace(match, head_dim=match.head_dim or place.head_dim)
        for name, place in heads.places.items()
        if (match := by_name.get(name) or by_number.get(_number(place))) is not None
    }
    taken = {place.name for place in paired.values()}
    missing = [name for name in heads.places if name not in paired]
    if missing or len(taken) < len(paired):
        raise CheckpointError(
            saw=f"{folder} has no weights for {list_some(missing or [*paired])}",
            needed="weights of its own for every attention of the model",
            do="copy the folder again; layers that share weights cannot be cut one by one",
        )
    return paired


def _number(place: Place) -> tuple[str, int]:
    return place.module.place.role or "self", place.module.layer
