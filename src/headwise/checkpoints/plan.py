"""Plan of the conversion of a checkpoint, made before anything is written, and its report."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from headwise.checkpoints.config import Config, layout_name
from headwise.checkpoints.description import (
    Description,
    describe_target,
    layout_with_described_function,
    read_config_file_or_description,
    read_description,
)
from headwise.checkpoints.foreign import (
    divides_embedding_columns,
    make_meta_params,
    require_megatron_layout,
)
from headwise.checkpoints.options import find_missing_layers
from headwise.checkpoints.output import OutputPlan, plan_output, plan_share_files
from headwise.checkpoints.safetensors import KEY
from headwise.checkpoints.source import SAFETENSORS, CheckpointSource
from headwise.checkpoints.staging import require_unused_name
from headwise.errors import CheckpointError, OptionError
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NameForm, find_modules, locate_weight_outside_attention
from headwise.layouts.plan import find_spec_conflicts, plan_conversion
from headwise.layouts.registry import layout
from headwise.layouts.shards import derive_shard_map_from_whole
from headwise.layouts.steps import ConversionStep

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
    unchanged_names: tuple[str, ...]
    accepted: Mapping[str, tuple[str, str]]
    not_copied: tuple[str, ...]


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
    target, accept = _require_usable_target(source, target, files), tuple(accept)
    stored = read_description(source)
    config = read_config_file_or_description(source, stored)
    before = layout_with_described_function(source_layout, stored)
    _require_all_layers(source, before, config)
    after, form = layout(target_layout), NameForm(root=root)
    steps = plan_conversion(source.headers, before, after, accept=accept, form=form, **known)
    description = describe_target(source.headers, before, after, known, config)
    output = _plan_files(source, steps, description, files, shards)
    options = (before, after, accept, root, files, shards, sorted(known.items()))
    return ConversionPlan(
        source=source,
        target=target,
        steps=tuple(steps),
        output=output,
        layout=after,
        accepted=find_spec_conflicts(source.headers, before, after, known),
        identity=_hash_run_identity(source, output, options),
    )


@dataclass(frozen=True, eq=False)
class ConversionPlan:
    """The steps and files of a conversion whose arguments have been checked.

    Attributes:
        source: the checkpoint.
        target: the path of the target.
        steps: all steps, also those that only check.
        output: the files of the target.
        layout: the layout of the target.
        accepted: see `ConversionReport`.
        identity: the hash that equal conversions share, by which a run resumes another.
    """

    source: CheckpointSource
    target: Path
    steps: tuple[ConversionStep, ...]
    output: OutputPlan
    layout: Layout
    accepted: Mapping[str, tuple[str, str]]
    identity: str


def report_conversion(plan: ConversionPlan, earlier_run: str) -> ConversionReport:
    """Return the report of a finished conversion."""
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
        unchanged_names=tuple(
            n for n in unchanged if locate_weight_outside_attention(plan.layout, n, roots) is None
        ),
        accepted=plan.accepted,
        not_copied=tuple(name for name in others if not (target / name).exists()),
    )


def _require_all_layers(source: CheckpointSource, before: Layout, config: Config) -> None:
    modules = find_modules(before, source.headers)
    if missing := find_missing_layers(config, modules, source.headers):
        raise CheckpointError(
            saw=f"{source.path}, where {missing[0]}",
            needed="the tensors of every layer",
            do="name the folder if this is one of several files, download the files again, or "
            "correct the number of layers in config.json",
        )


def _plan_files(
    source: CheckpointSource,
    steps: Sequence[ConversionStep],
    description: Description,
    files: str,
    shards: int,
) -> OutputPlan:
    metadata = {KEY: description.encode()}
    if files == "safetensors":
        output = plan_output(source, steps, metadata)
        is_its_own = layout_name(description.config) == description.layout.name
        loads = source.is_folder and is_its_own and output.is_found_by_transformers
        return replace(output, config=description.config_json() if loads else None)
    shapes = {name: tuple(shape) for step in steps for name, shape in step.outputs.items()}
    if files == "megatron":
        require_megatron_layout(description.layout)
        division = derive_shard_map_from_whole(
            description.layout, shapes, shards, description.counts
        )
        return plan_share_files(source, steps, metadata, division)
    params = make_meta_params(description, shapes)
    by_columns = divides_embedding_columns(params, shapes)
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


def _require_usable_target(source: CheckpointSource, target: Path, files: str) -> Path:
    """Return the target's path without links and ``..``; raise CheckpointError if unusable."""
    target, is_folder = target.absolute(), source.is_folder or files != "safetensors"
    if target.name == "..":
        raise CheckpointError(
            saw=f"the target {target} ends in no name",
            needed="the name of a folder" if is_folder else "the name of a file",
            do="write its name at the end",
        )
    target = Path(os.path.realpath(target.parent)) / target.name
    require_unused_name(target)
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


def _hash_run_identity(source: CheckpointSource, output: OutputPlan, options: object) -> str:
    """Return the hash that equal conversions share: of version, source, options and headers."""
    digest = hashlib.sha256(source.source_digest().encode("ascii"))
    digest.update(repr((metadata.version("headwise"), options)).encode("utf-8", "surrogateescape"))
    for file in output.files:
        digest.update(repr((file.name, file.head)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
