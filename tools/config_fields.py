"""Changes of a config that `load_attention` does not see: python -m tools.config_fields [TYPES].

For each model type that loads, a small model is built from a config.json, stored and run. Then each
field that is no size is changed or left out, and the model is built, stored and run again. Each
layer that `load_attention` reads from the folder has to give what the class's attention gives, or
to be refused. The class is built from the config in the folder, as from_pretrained does.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headwise.checkpoints import load_attention
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.places import Place, find_model_places
from headwise.checkpoints.source import open_source
from headwise.errors import HeadwiseError
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts.modules import find_modules
from headwise.masks.mask import Mask
from tools.huggingface_classes import classes, shrink, trial
from tools.huggingface_classes.inputs import ERRORS

Config = dict[str, Any]
CLOSE = 1e-4  # share of the largest output: float32 in another order gives 1e-6
MODULES = 3  # of each role
PARTS = ("attn_config",)
ROTARY = "rope_parameters"
WINDOW = 5  # shorter than the text, as twice as much is
WINDOWS = ("sliding_window", "window_size")
# Fields outside of attention, and those that every config has.
SKIPPED = re.compile(
    r".*(dropout|drop_path|drop_rate|layerdrop|token_id|token_index|_init|initializer|_std|loss"
    r"|router|expert|moe_|topk|mask_(time|feature)|conv_|feat_|_act|activation|cost|coefficient"
    r"|tie_|num_labels|embedding_multiplier|logit_scale|final_logit|class_|codevector|ctc_"
    r"|adapter|tdnn|xvector|image_token|eos_coef|pretraining_tp|gradient_checkpointing).*"
    r"|_.*|model_type|layer_norm_position|patch_size|image_size|num_channels|max_.*position.*"
)
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": (
        "absolute",
        "relative_key",
        "relative_key_query",
        "rotary",
        "alibi",
    ),
    "position_embeddings_type": ("relative", "relative_key", "rotary", None),
    "attention_type": ("original_full", "block_sparse"),
    "clip_qkv": (0.3,),
    "alibi_bias_max": (4,),
    "pos_att_type": (["c2p", "p2c"],),
    "sliding_window": (WINDOW,),
    "window_size": (WINDOW,),
    "local_attention": (2 * WINDOW - 2,),
    "attn_logit_softcapping": (2.0, None),
    "rotary_dim": (8,),
    "partial_rotary_factor": (0.5,),
    "rotary_pct": (0.5,),
    "relative_attention_num_buckets": (8, 48),
    "relative_attention_max_distance": (9,),
    "max_relative_positions": (4,),
}
# Phrases of a caption see one another only: no mask that is tried here.
OTHER_MASKS = ("grounding-dino", "mm-grounding-dino")
KINDS = ("full_attention", "sliding_attention")
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: tuple[Config, ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {**_YARN, "rope_type": "llama3", **_LLAMA3},
    _YARN,
    {"rope_type": "proportional"},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_theta": 300.0},
    {"partial_rotary_factor": 0.5},
)


@dataclass
class Row:
    """What the table says of a model type: the changes that were equal, refused or lost."""

    model_type: str
    equal: list[str] = field(default_factory=list)
    not_run: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)  # refused, and moves nothing
    lost: list[str] = field(default_factory=list)
    reason: str = ""  # why the type was not tried

    def __str__(self) -> str:
        counts = f"{len(self.equal):4} {len(self.refused):4} {len(self.lost):4} {self.not_run:4}"
        return f"{self.model_type:30} {counts}  {self.reason}".rstrip()


@dataclass
class Call:
    """What the attention of a module was given, and what it gave."""

    x: Tensor
    source: Tensor
    output: Tensor


def loading_types() -> list[str]:
    """The model types whose layout `load_attention` takes from the config."""
    return [kind for kind in classes.model_types() if _layout_of(kind)]


def _layout_of(model_type: str) -> str | None:
    with suppress(*ERRORS):
        return layout_name(json.loads(classes.config_class(model_type)().to_json_string()))
    return None


def tried(model_type: str, *fields: str) -> Row:
    """The row of a model type, of all fields or of those that begin so."""
    row = Row(model_type)
    try:
        _try_fields(row, fields or ("",))
    except (*ERRORS, HeadwiseError) as error:
        row.reason = f"{type(error).__name__}: {error}".partition("\n")[0][:150]
    return row


def _try_fields(row: Row, fields: tuple[str, ...]) -> None:
    kind = classes.model_class(row.model_type)
    found = None if kind is None else trial.model_and_inputs(kind, trial.Row(row.model_type, None))
    if kind is None or found is None or row.model_type in OTHER_MASKS:
        row.reason = "other masks" if row.model_type in OTHER_MASKS else "no class runs"
        return
    model, given = found
    given = {name: value for name, value in given.items() if "attention_mask" not in name}
    values = json.loads(model.config.to_json_string())
    values |= {name: 2 * (WINDOW - 1) for name in WINDOWS if values.get(name)}
    with TemporaryDirectory() as name:
        usual = _Folder(Path(name), kind, given)
        loaded = usual.layers(values)
        if not loaded:
            row.reason = "no attention was recorded"
            return
        errors = [layer for layer, _ in loaded.values() if isinstance(layer, HeadwiseError)]
        row.reason = f"refused: {errors[0].saw}"[:150] if errors else ""
        wrong = [prefix for prefix, (layer, call) in loaded.items() if not _gives(layer, call)]
        if wrong:
            rotary = getattr(loaded[wrong[0]][0], "rotary", None)
            if rotary is not None and rotary.axis_count > 1:  # the input has an image
                row.reason = "its positions have several axes"
            else:
                row.lost.append(f"as it is: {wrong[0]} of {len(loaded)}")
            return
        row.equal += [] if errors else ["as it is"]
        for label, changed in changes(values):
            if not label.startswith(fields):
                continue
            _try_change(row, usual, loaded, label, changed)


def _try_change(
    row: Row,
    folder: _Folder,
    usual: dict[str, tuple[Attention | HeadwiseError, Call]],
    label: str,
    changed: Config,
) -> None:
    try:
        loaded = folder.layers(changed)
    except ERRORS:
        row.not_run += 1
        return
    refused = {p: layer for p, (layer, _) in loaded.items() if isinstance(layer, HeadwiseError)}
    if any(not _gives(layer, call) for layer, call in loaded.values()):
        row.lost.append(label)
    elif refused:
        prefix, error = next(iter(refused.items()))
        row.refused[label] = error.saw
        before = usual.get(prefix)
        if before and not isinstance(before[0], HeadwiseError):
            row.idle += [label] * _gives(before[0], loaded[prefix][1])
    else:
        row.equal.append(label)


class _Folder:
    """A folder of weights, written anew where names or shapes change."""

    def __init__(self, path: Path, kind: type[PreTrainedModel], given: dict[str, Any]) -> None:
        self.path, self.kind, self.given = path, kind, given
        self._shapes: dict[str, Any] = {}

    def layers(self, values: Config) -> dict[str, tuple[Attention | HeadwiseError, Call]]:
        """Store a model with this config; return its attentions, as loaded and as they ran."""
        config = classes.config_class(values["model_type"]).from_dict(copy.deepcopy(values))
        # Falcon's eager path adds its distance bias twice.
        path = "sdpa" if config.model_type == "falcon" else "eager"
        model = self.kind._from_config(config, attn_implementation=path).float().eval()
        _fill(model)
        if (shapes := {n: x.shape for n, x in model.state_dict().items()}) != self._shapes:
            for old in self.path.glob("model*"):
                old.unlink()
            model.save_pretrained(self.path)
            self._shapes = shapes
        (self.path / "config.json").write_text(json.dumps(values))
        stored = self._stored_names(model, values)
        return {
            name: (self._load(stored.get(name, name)), call)
            for name, call in _recorded(model, self.given).items()
        }

    def _stored_names(self, model: PreTrainedModel, values: Config) -> dict[str, str]:
        """The prefixes in the file of modules that transformers renames, by those in memory."""
        layout = registry.layout(layout_name(values) or "")
        modules = [m for m in find_modules(layout, open_source(self.path).headers) if m.tensors]
        places = find_model_places(model)
        if len(modules) != len(places):
            return {}
        return {p.name: m.prefix for p, m in zip(places, modules, strict=True)}

    def _load(self, prefix: str) -> Attention | HeadwiseError:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return load_attention(self.path, prefix=prefix, proof=False).eval()
        except HeadwiseError as error:
            return error


def _fill(model: nn.Module) -> None:
    """Give each parameter numbers that follow from its name."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(weight.shape, generator=generator)
                if weight.dim() < 2:
                    weight.copy_(0.5 + 0.3 * noise)
                else:
                    weight.copy_(noise / math.sqrt(weight[0].numel()))


def _places(model: PreTrainedModel) -> list[Place]:
    """The first attentions of each role, by the names that they have in the model."""
    by_role: dict[str, list[Place]] = {}
    for place in find_model_places(model):
        if place.layout.required <= {*place.module.tensors.values()}:
            by_role.setdefault(place.module.place.role, []).append(place)
    return [place for places in by_role.values() for place in places[:MODULES]]


def _recorded(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Call]:
    """The first call of each module that ran: inputs of its projections, and its output."""
    seen: dict[tuple[str, str], Tensor] = {}
    handles = []

    def note(key: tuple[str, str], owner: nn.Module) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            value = out if key[1] == "output" else next(iter((*args, *kwargs.values())), None)
            if isinstance(value, Tensor):
                seen.setdefault(key, value.detach())

        handles.append(owner.register_forward_hook(hook, with_kwargs=True))

    keys, names = ("x", "source", "output"), []
    for place in _places(model):
        homes = {
            tensor: name.rpartition(".")[0]
            for name, local in place.module.tensors.items()
            for tensor in place.layout.patterns[local].tensors
        }
        owners = [homes[matrix] for matrix in ("wq", "wk", "wo")]
        if len({place.name.rstrip("."), *owners}) > 2:  # else its matrices are no modules
            names.append(place.name)
            for key, owner in zip(keys, owners, strict=True):
                note((place.name, key), model.get_submodule(owner))
    with torch.no_grad():
        model(**copy.deepcopy(given))
    for handle in handles:
        handle.remove()
    return {
        prefix: Call(*(seen[prefix, key] for key in keys))
        for prefix in names
        if all((prefix, key) in seen and seen[prefix, key].dim() == 3 for key in keys)
    }


def _gives(layer: Attention | HeadwiseError, call: Call) -> bool:
    """True if a layer is refused, or gives the output with a causal mask or without one."""
    if isinstance(layer, HeadwiseError):
        return True
    for mask in (None, Mask.causal()):
        with torch.no_grad():
            is_self = torch.equal(call.x, call.source)
            inputs = (call.x,) if is_self else (call.x, call.source)
            try:
                output = layer(*inputs, mask=mask)
            except HeadwiseError:
                continue
        if output.shape == call.output.shape:
            apart = (output - call.output).abs().max()
            if apart <= CLOSE * call.output.abs().max():
                return True
    return False


# ---- changes -----------------------------------------------------------------------------------


def changes(values: Config) -> Iterator[tuple[str, Config]]:
    """Configs in which one field differs, each with the name of the field and its value."""
    common = vars(PreTrainedConfig()).keys()
    for place in (None, *PARTS):
        part = values if place is None else values.get(place)
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            if name in common or SKIPPED.fullmatch(name) or name.endswith("_config"):
                continue
            label = f"{place}.{name}" if place else name
            for other in _others(name, value):
                yield f"{label}={_short(other)}", _with(values, place, {name: other})
            if not (isinstance(value, int) and _is_size(name)):
                yield f"{label} left out", _with(values, place, {}, without=(name,))
        if isinstance(part.get(ROTARY), dict):
            yield from _older_rotary(values, place, part[ROTARY])


def _others(name: str, value: Any) -> Iterator[Any]:
    if name in ALTERNATIVES:
        yield from (other for other in ALTERNATIVES[name] if other != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        if not _is_size(name):
            yield 2 * value or 0.5
    elif value is None:
        yield from (0.5, 2, True)
    elif name == ROTARY or name == "rope_scaling":
        yield from _rotations(value)
    elif isinstance(value, list) and value and value[0] in KINDS:
        yield from ([kind] * len(value) for kind in KINDS if {kind} != {*value})
    elif isinstance(value, list) and {*map(type, value)} <= {int, bool} and {*value} <= {0, 1}:
        yield [type(each)(not each) for each in value]


def _is_size(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in shrink.LEVELS[0])


def _rotations(rotary: Config) -> Iterator[Config]:
    if any(isinstance(section, dict) for section in rotary.values()):
        for kind, section in rotary.items():
            yield from ({**rotary, kind: other} for other in _rotations(section))
        return
    yield from ({**rotary, **scaling} for scaling in SCALINGS)


def _older_rotary(
    values: Config, place: str | None, rotary: Config
) -> Iterator[tuple[str, Config]]:
    """Rotations as transformers 4 wrote them: theta beside the scaling."""
    is_nested = any(isinstance(section, dict) for section in rotary.values())
    more: Config = {"rope_theta": 300.0, "rope_scaling": None}
    if is_nested:
        more |= {"rope_local_base_freq": 40.0, "local_rope_theta": 40.0, "global_rope_theta": 300.0}
    yield "rope_theta of v4", _with(values, place, more, without=(ROTARY,))
    more |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    yield "rope_scaling of v4", _with(values, place, more, without=(ROTARY,))


def _with(
    values: Config, place: str | None, fields: Config, *, without: Iterable[str] = ()
) -> Config:
    changed = copy.deepcopy(values)
    part = changed if place is None else changed[place]
    part.update(fields)
    for name in without:
        del part[name]
    return changed


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 90 else f"{text[:87]}..."


def main(types: list[str]) -> int:
    """Print the table, and the changes that are lost; return 1 if there are any."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"{'model type':30} same refused lost not run")
    lost = 0
    for model_type in types or loading_types():
        row = tried(model_type)
        lost += len(row.lost)
        print(row, *(f"    lost: {each}" for each in row.lost), sep="\n")
        print(
            *(f"    refused, moves nothing: {each}: {row.refused[each]}" for each in row.idle),
            sep="\n",
            end="\n" if row.idle else "",
            flush=True,
        )
    print(f"{lost} changes are lost without a word")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
