"""`convert_checkpoint`: atomic conversion of a checkpoint to another layout, file by file.

All is planned before anything is written.
"""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from headwise.checkpoints import description as descriptions
from headwise.checkpoints import foreign, safetensors, staging
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.description import Description, describe_target, read_description
from headwise.checkpoints.source import (
    INDEX,
    SAFETENSORS,
    CheckpointSource,
    encode_index,
    explained_os_errors,
)
from headwise.checkpoints.staging import PartialFile, StagingDir, write_synced
from headwise.errors import CheckpointError, OptionError
from headwise.function.weights import State
from headwise.layouts import plan as layout_plan
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NameForm, find_modules, locate_weight_outside_attention
from headwise.layouts.plan import (
    ConversionStep,
    RoundTripError,
    plan_conversion,
    run_round_trip_checked_step,
)
from headwise.layouts.registry import layout
from headwise.layouts.shards import ShardMap, derive_shard_map_from_whole
from headwise.support.progress import Progress, no_progress
from headwise.support.tensors import same_bytes

NEEDED = "readable files, and a writable disk with enough free space"
FREE_SPACE = "free disk space or choose another target; the target was not created"
# names that transformers looks for
MODEL_FILE, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True, eq=False)
class OutputFile:
    """Safetensors file that a conversion writes from its first byte to its last."""

    name: str
    head: bytes  # the header
    size: int  # bytes of the whole file
    steps: Sequence[ConversionStep]  # those that make its tensors, in the order of their bytes
    tensors: Sequence[str]  # in the order of their bytes

    @property
    def nbytes(self) -> int:
        return self.size - len(self.head)


@dataclass(frozen=True, eq=False)
class OutputPlan:
    """All files of the target."""

    files: tuple[OutputFile, ...]  # the files with tensors
    index: tuple[str, bytes] | None  # name and content of the index file; None without an index
    # the division of the tensors over the files of tensor-parallel processes; None if each tensor
    # is whole in its file
    division: ShardMap | None = None
    # the content of params.json, if the target is for Meta's code
    params: Mapping[str, Any] | None = None
    # what lies beside the weights: a name within the folder -> a file to copy, or a text
    beside: Mapping[str, Path | str] = field(default_factory=dict)

    @property
    def shards(self) -> list[tuple[OutputFile, ...]]:
        """The files, by those that are written together: shares hold parts of the same tensors."""
        return [(file,) for file in self.files] if self.division is None else [self.files]

    @property
    def peak_size(self) -> int:
        """Bytes on disk during the work: the files of processes are copies of safetensors files."""
        size = sum(file.size for file in self.files) + len(self.index[1] if self.index else b"")
        size = size if self.division is None else 2 * size
        copied = (file for file in self.beside.values() if isinstance(file, Path))
        return size + sum(file.stat().st_size for file in copied)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self.files)

    def divide(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the part of a tensor for each file of its shard, joined again and compared.

        Raises:
            RoundTripError: the parts do not make up the tensor.
        """
        if self.division is None:
            return [tensor]
        shares = self.division.split(name, tensor)
        if not same_bytes(self.division.join(name, shares), tensor):
            raise RoundTripError(
                saw=f"{name}, which does not come back from {len(shares)} shares",
                needed="the same bytes",
                do="nothing was written; the layout's patterns contradict each other",
            )
        return shares


def plan_output(
    source: CheckpointSource, steps: Iterable[ConversionStep], metadata: Mapping[str, str]
) -> OutputPlan:
    """Return the plan: one file for each source file, with the tensors that the steps make.

    A tensor goes into the file of its first source tensor, in that tensor's order. Wider dtypes
    come first, so every tensor starts at a multiple of its item size. Every file carries
    ``metadata`` beside that of its source.

    Raises:
        CheckpointError: two files of the source would have the same target name.
    """
    order = {name: number for number, name in enumerate(source.headers)}
    steps_by_file: dict[Path, list[tuple[int, int, int, ConversionStep]]] = {}
    for number, step in enumerate(steps):
        first = min(step.inputs, key=order.__getitem__)
        stored = source.headers[first]  # all inputs of a step have the same dtype
        if step.outputs:
            place = (-stored.dtype.itemsize, order[first], number, step)
            steps_by_file.setdefault(stored.file, []).append(place)
    files = []
    for shard in source.shards:
        if shard.path in steps_by_file:
            ordered = [step for *_, step in sorted(steps_by_file[shard.path])]
            tensors = {
                name: (shape, source.headers[step.inputs[0]].dtype)
                for step in ordered
                for name, shape in sorted(step.outputs.items())
            }
            head, size = safetensors.encode_header(
                tensors, {"format": "pt", **shard.metadata, **metadata}
            )
            name = source.target_file_name(shard.path)
            files.append(OutputFile(name, head, size, ordered, [*tensors]))
    if len({file.name for file in files}) < len(files):
        raise CheckpointError(
            saw="the files " + ", ".join(shard.path.name for shard in source.shards),
            needed=f"names that differ before their suffix, which becomes {SAFETENSORS}",
            do="rename one of the files",
        )
    return OutputPlan(tuple(files), _plan_shard_index(source, files))


def plan_share_files(
    source: CheckpointSource,
    steps: Iterable[ConversionStep],
    metadata: Mapping[str, str],
    division: ShardMap,
) -> OutputPlan:
    made = [(source.headers[step.inputs[0]].dtype, step) for step in steps if step.outputs]
    made.sort(key=lambda pair: -pair[0].itemsize)
    tensors: dict[str, tuple[safetensors.Shape, torch.dtype]] = {
        name: (division.share_shape(name, tuple(shape)), dtype)
        for dtype, step in made
        for name, shape in step.outputs.items()
    }
    head, size = safetensors.encode_header(tensors, {"format": "pt", **metadata})
    names = [f"share-{number:05}{SAFETENSORS}" for number in range(division.count)]
    ordered = [step for _, step in made]
    files = [OutputFile(name, head, size, ordered, [*tensors]) for name in names]
    return OutputPlan(tuple(files), None, division)


def _plan_shard_index(
    source: CheckpointSource, files: Sequence[OutputFile]
) -> tuple[str, bytes] | None:
    if source.index is None and len(files) < 2:
        return None
    name, metadata = MODEL_FILE, dict[str, Any]()
    if source.index:
        metadata |= source.index.metadata
        name = source.target_file_name(Path(source.index.path.name.removesuffix(INDEX)))
    metadata["total_size"] = sum(file.nbytes for file in files)
    metadata.pop("total_parameters", None)  # conversion may add or remove biases
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    return name + INDEX, encode_index(weight_map, metadata)


Files = Literal["safetensors", "meta", "megatron"]


@dataclass(frozen=True)
class ConversionReport:
    """Result of a conversion.

    Attributes:
        target: the path of the target.
        tensors: the number of tensors in the target.
        rewritten: how many of them were converted, converted back and compared with the source.
        nbytes: bytes of the target's files.
        earlier_run: files of an earlier run: "nothing", "its beginning", or "other work", removed.
        roots: prefixes before the module names of the layout.
        example: the name of one tensor of attention in the target; empty if there is none.
        unchanged_names: names as in the source, because the target layout has no other names.
        accepted: settings of `AttentionSpec` that differ and were accepted -> (source, target).
        not_copied: files beside the weights that were not copied: they describe the source.
    """

    target: Path
    tensors: int
    rewritten: int
    nbytes: int
    earlier_run: str
    roots: tuple[str, ...]
    example: str
    unchanged_names: tuple[str, ...]
    accepted: Mapping[str, tuple[str, str]]
    not_copied: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Files that will be written, whose target has been checked."""

    source: CheckpointSource
    target: Path
    output: OutputPlan
    options: object  # from which its tensors follow, with the source

    @property
    def identity(self) -> str:
        """Hash of version, source, options and headers: a run resumes another one with the same."""
        identity = hashlib.sha256(self.source.source_digest().encode("ascii"))
        heads = ((file.name, file.head) for file in self.output.files)
        for part in ((metadata.version("headwise"), self.options), *heads):
            identity.update(repr(part).encode("utf-8", "surrogateescape"))
        return identity.hexdigest()


@dataclass(frozen=True, eq=False)
class ConversionPlan(WritePlan):
    """The steps and files of a conversion whose arguments have been checked."""

    steps: tuple[ConversionStep, ...]  # also those that only check
    layout: Layout  # of the target
    accepted: Mapping[str, tuple[str, str]]  # see `ConversionReport`


def plan_checkpoint_conversion(
    source: CheckpointSource,
    target: Path,
    source_layout: str | Layout,
    target_layout: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    files: Files = "safetensors",
    shards: int = 1,
    **known: int,
) -> ConversionPlan:
    """Check the arguments of `convert_checkpoint`, and return its steps and files."""
    _require_file_options(files, shards)
    target, accept = require_usable_target(source, target, files), tuple(accept)
    stored = read_description(source)
    config = descriptions.read_config_file_or_description(source, stored)
    before = descriptions.layout_with_described_function(source_layout, stored)
    modules = find_modules(before, source.headers)
    if missing := descriptions.find_missing_layers(config, modules, source.headers):
        raise CheckpointError(
            saw=f"{source.path}, where {missing[0]}",
            needed="the tensors of every layer",
            do="name the folder if this is one of several files, download the files again, or "
            "correct the number of layers in config.json",
        )
    after, form = layout(target_layout), NameForm(root=root)
    steps = plan_conversion(source.headers, before, after, accept=accept, form=form, **known)
    description = describe_target(source.headers, before, after, known, config)
    output = _plan_files(source, steps, description, files, shards)
    options = (before, after, accept, root, files, shards, sorted(known.items()))
    accepted = layout_plan.find_spec_conflicts(source.headers, before, after, known)
    return ConversionPlan(source, target, output, options, tuple(steps), after, accepted)


def report_conversion(plan: ConversionPlan, earlier_run: str) -> ConversionReport:
    source, target = plan.source, plan.target
    written = filter(Path.is_file, target.rglob("*")) if target.is_dir() else [target]
    beside = sorted(source.folder.iterdir()) if source.is_folder else []
    others = (file.name for file in beside if file.is_file() and file not in source.states)
    names = list(dict.fromkeys(name for file in plan.output.files for name in file.tensors))
    modules = find_modules(plan.layout, names)
    attention = {name for module in modules for name in module.tensors}
    roots = {module.place.root for module in modules}
    unchanged = (name for name in names if name in source.headers and name not in attention)
    shown = {module.place.root for module in modules if module.place.role and module.place.root}
    return ConversionReport(
        target=target,
        tensors=len(names),
        rewritten=sum(len(step.outputs) for step in plan.steps if not step.is_copy),
        nbytes=sum(file.stat().st_size for file in written),
        earlier_run=earlier_run,
        roots=tuple(sorted(shown)),
        example=next((name for name in names if name in attention), ""),
        unchanged_names=tuple(
            n for n in unchanged if locate_weight_outside_attention(plan.layout, n, roots) is None
        ),
        accepted=plan.accepted,
        not_copied=tuple(name for name in others if not (target / name).exists()),
    )


def _plan_files(
    source: CheckpointSource,
    steps: Sequence[ConversionStep],
    description: Description,
    files: str,
    shards: int,
) -> OutputPlan:
    metadata = {safetensors.KEY: description.encode()}
    if files == "safetensors":
        output = plan_output(source, steps, metadata)
        name = output.index[0].removesuffix(INDEX) if output.index else output.files[0].name
        is_its_own = layout_name(description.config) == description.layout.name
        loads = source.is_folder and is_its_own and name == MODEL_FILE  # by transformers
        return replace(output, beside={CONFIG: description.config_json()} if loads else {})
    shapes = {name: tuple(shape) for step in steps for name, shape in step.outputs.items()}
    params, by_columns = None, False
    if files == "megatron":
        foreign.require_megatron_layout(description.layout)
    else:
        params = foreign.make_meta_params(description, shapes)
        # Llama 1 and 2, whose theta is 10,000, divide columns of the embedding, Llama 3 its rows.
        by_columns = params["rope_theta"] == 10_000.0 and foreign.OUTPUT in shapes
    division = derive_shard_map_from_whole(
        description.layout, shapes, shards, description.counts, also=by_columns
    )
    return replace(plan_share_files(source, steps, metadata, division), params=params)


def _require_file_options(files: str, shards: int) -> None:
    if files not in get_args(Files):
        raise OptionError(
            saw=f"files={files!r:.60}",
            needed=" or ".join(map(repr, get_args(Files))),
            do='leave it out, or pass files="meta" for Meta\'s code',
        )
    if shards < 1 or (shards > 1 and files == "safetensors"):
        raise OptionError(
            saw=f"{{shards}} of {shards}, of {files} files",
            needed="1 for safetensors, and 1 or more for files of tensor-parallel processes",
            do="leave out {shards}, or choose the files of Meta's code or of Megatron-LM",
            parameter={"shards": ()},
        )


def require_usable_target(source: CheckpointSource, target: Path, files: str) -> Path:
    """Return the target's path without links and ``..``; raise CheckpointError if unusable."""
    target, is_folder = target.absolute(), source.is_folder or files != "safetensors"
    if target.name == "..":
        raise CheckpointError(
            saw=f"the target {target} ends in no name",
            needed="the name of a folder" if is_folder else "the name of a file",
            do="write its name at the end",
        )
    target = Path(os.path.realpath(target.parent)) / target.name
    staging.require_unused_name(target)
    if source.is_folder and target.is_relative_to(source.folder.resolve()):
        raise CheckpointError(
            saw=f"the target {target} is within the source {source.folder}",
            needed="a target outside of the source",
            do="name a folder beside the source",
        )
    if is_folder == (target.suffix == SAFETENSORS):
        form = "a folder" if is_folder else f"a file, ending in {SAFETENSORS}"
        owner = "Megatron" if files == "megatron" else "Meta"
        reason = (
            "the source is one" if is_folder == source.is_folder else f"{owner}'s files need one"
        )
        name = target.stem if is_folder else target.name + SAFETENSORS
        raise CheckpointError(
            saw=f"the target {target.name}",
            needed=f"the name of {form}, because {reason}",
            do=str(target.with_name(name)),
        )
    return target


# ---- the conversion ------------------------------------------------------------------------------


def convert_checkpoint(
    source: CheckpointSource,
    target: Path,
    source_layout: str | Layout,
    target_layout: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    files: Files = "safetensors",
    shards: int = 1,
    verify: bool = False,
    progress: Progress = no_progress,
    **known: int,
) -> ConversionReport:
    """Write a checkpoint in another layout, as safetensors in as many files as the source.

    Rewritten tensors are converted back and compared byte for byte. The target appears under its
    name only when it is complete, with a `Description` in its metadata. A run that was killed
    resumes with the first unfinished file when you start it again; a run that fails leaves nothing.

    Args:
        source: the checkpoint, see `headwise.checkpoints.source.open_source`.
        target: a new path: a file if the source is one and ``files`` "safetensors", else a folder.
        source_layout: the layout of the source, or its name.
        target_layout: the layout of the target, or its name.
        accept: settings of `AttentionSpec` that may differ between the layouts.
        root: the prefix of all names in the target; as its layout or the source has it if None.
        files: "safetensors", or files of tensor-parallel processes: "meta" or "megatron".
        shards: the number of these processes.
        verify: True to read each file again, also of an earlier run, and compare its CRC-32.
        progress: called with a file's name, the bytes done, and the bytes in all.
        known: heads, kv_heads, rotary_width, and other counts that no shape gives.

    Raises:
        CheckpointError: the target exists already or cannot be written, or the source changes.
        RoundTripError: a tensor does not convert back to the same bytes.
        HeadwiseError: see `plan_conversion`, and `make_meta_params` for Meta's files.
    """
    options: dict[str, Any] = {"accept": accept, "root": root, "files": files, "shards": shards}
    options |= known
    plan = plan_checkpoint_conversion(source, target, source_layout, target_layout, **options)
    with explained_os_errors(plan.target.parent, problem="", needed=NEEDED, do=FREE_SPACE):
        for step in (step for step in plan.steps if not step.outputs):  # biases left out, if +0
            _convert(source, step)
    return report_conversion(plan, write_target(plan, progress, verify=verify))


def write_target(plan: WritePlan, progress: Progress, *, verify: bool = False) -> str:
    """Write the files of a plan, all or none; return what `StagingDir.earlier_run` was."""
    with (
        explained_os_errors(plan.target.parent, problem="", needed=NEEDED, do=FREE_SPACE),
        StagingDir(plan.target, plan.output.peak_size) as staging,
    ):
        staging.begin(plan.identity)
        _write_files(plan, staging, progress, verify=verify)
        plan.source.require_unchanged()
        staging.finish(_complete_files(plan, staging))
    return staging.earlier_run


def _write_files(plan: WritePlan, staging: StagingDir, progress: Progress, *, verify: bool) -> None:
    """Write the files that an earlier run has not finished.

    Another thread reads what is written for its checksum, and forces finished files to the disk.
    """
    done, total = 0, plan.output.nbytes
    with ExitStack() as stack, _background_thread() as run_later:
        for files in plan.output.shards:
            name = files[0].name
            if all(staging.is_finished(file.name, verify=verify) for file in files):
                done += sum(file.nbytes for file in files)
                progress(name, done, total)
                continue
            parts = [PartialFile(staging.path / f"{file.name}.part") for file in files]
            for part in parts:
                stack.callback(part.close)
            for size in _write_steps(plan, files, parts):
                for part in parts:
                    run_later(part.checksum, part.size)
                done += size
                progress(name, done, total)
            for part in parts:
                run_later(partial(staging.finish_file, part, verify=verify))
        progress("waiting for the disk", total, total)


@contextmanager
def _background_thread() -> Iterator[Callable[..., None]]:
    """Yield a function that runs others in a thread, in order; at the end, wait for all of them.

    On an error, those that have not begun are cancelled.
    """
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as pool:

        def run_later(function: Callable[..., None], *arguments: object) -> None:
            while pending and pending[0].done():
                pending.popleft().result()
            pending.append(pool.submit(function, *arguments))

        try:
            yield run_later
            for running in pending:
                running.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _write_steps(
    plan: WritePlan, files: Sequence[OutputFile], parts: Sequence[PartialFile]
) -> Iterator[int]:
    for file, part in zip(files, parts, strict=True):
        part.write(file.head)
    headers, names, steps = plan.source.headers, iter(files[0].tensors), files[0].steps
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if following is not None:
            _prefetch(headers[name] for name in following.inputs)
        before, first = sum(part.size for part in parts), headers[step.inputs[0]]
        if step.is_copy and first.offset is not None and plan.output.division is None:
            next(names)
            parts[0].append_range(first.file, first.offset, first.nbytes)
        else:
            tensors = _convert(plan.source, step)
            for name in islice(names, len(step.outputs)):
                assert tensors[name].dtype == first.dtype
                assert tuple(tensors[name].shape) == tuple(step.outputs[name])
                for part, share in zip(parts, plan.output.divide(name, tensors[name]), strict=True):
                    part.write(safetensors.tensor_bytes(share))
        yield sum(part.size for part in parts) - before


def _convert(source: CheckpointSource, step: ConversionStep) -> State:
    return run_round_trip_checked_step(step, {name: source[name] for name in step.inputs})


def _prefetch(tensors: Iterable[safetensors.StoredTensor]) -> None:
    for stored in tensors:
        if stored.offset is not None and stored.nbytes and hasattr(os, "posix_fadvise"):
            with stored.file.open("rb") as file:
                place = stored.offset, stored.nbytes
                os.posix_fadvise(file.fileno(), *place, os.POSIX_FADV_WILLNEED)


def _complete_files(plan: WritePlan, staging: StagingDir) -> Path:
    output, folder = plan.output, staging.files_path
    if output.division is not None:
        shares = [safetensors.read_safetensors_header(folder / file.name) for file in output.files]
        target = staging.path / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        if output.params is None:
            foreign.write_megatron_files(target, shares)
        else:
            foreign.write_meta_files(target, shares, output.params)
        return target
    if output.index is not None:
        write_synced(folder / output.index[0], output.index[1])
    for name, content in output.beside.items():
        made = folder / name
        made.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, made)
        else:
            write_synced(made, content)
    return folder if plan.source.is_folder else folder / output.files[0].name
