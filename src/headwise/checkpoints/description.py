"""Description of a checkpoint in its own files: layout, counts, function and config.

A converted file has one in its safetensors metadata, as JSON under the key "headwise". Of several
files each has the same one, so that a file that is copied alone, or without its index, keeps it:

    {"version": 1,
     "layout": "llama-meta",
     "modules": 32,
     "counts": {"heads": 32, "kv_heads": 8, "head_dim": 128},
     "function": {"scale": "1/sqrt(head_dim)", "rotary": "interleaved", ...},
     "config": {"rms_norm_eps": 1e-05, "rope_theta": 500000.0, ...}}

``modules`` counts the attention modules. ``function`` has every field of
`AttentionSpec`, as the weights need it: null leaves a field to ``config``,
which is the config.json of the model that was converted first, without its private names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headwise.checkpoints.config import Config, ConfigFields, counts_of, known_counts, read_config
from headwise.checkpoints.model_args import model_args_of
from headwise.checkpoints.safetensors_file import once
from headwise.checkpoints.source import CheckpointSource, open_source
from headwise.errors import CheckpointError, DTypeError, OptionError, ShapeError
from headwise.layouts.attention_spec import FIELDS, AttentionSpec
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.conversion_plan import plan
from headwise.layouts.conversion_steps import TensorHeader
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import AS_STORED, NamedModule, modules_of
from headwise.layouts.registry import layout, layouts

KEY, VERSION = "headwise", 1
COUNTS = ("heads", "kv_heads", "head_dim", "rotary_width")
_UNFIT = (OptionError, ShapeError, DTypeError)


@dataclass(frozen=True)
class Description:
    """Layout, counts, function and config of a checkpoint, as its own files state them.

    Attributes:
        layout: with the function that the weights have.
        modules: how many modules of attention there are.
        counts: heads, kv_heads and so on, as far as all modules share them.
        config: as in config.json.
        place: where it was read, for messages.
        removal: how to get rid of it, for messages.
    """

    layout: Layout
    modules: int
    counts: Mapping[str, int]
    config: ConfigFields
    place: str = ""
    removal: str = ""

    def encode(self) -> str:
        """Return the JSON that a file carries."""
        function = asdict(self.layout.function)
        about = {"version": VERSION, "layout": self.layout.name, "modules": self.modules}
        parts = {"counts": dict(self.counts), "function": function, "config": _public(self.config)}
        return json.dumps(about | parts)

    def with_counts(self, known: Mapping[str, int | None]) -> dict[str, int]:
        """Return the counts that are known elsewhere, and those of the description.

        A count that is None is not known.

        Raises:
            OptionError: they contradict each other.
        """
        stated = {name: count for name, count in known.items() if count is not None}
        for name, count in stated.items():
            if self.counts.get(name, count) != count:
                raise OptionError(
                    saw=f"{name} {count}, where {self.place} says {self.counts[name]}",
                    needed="one count: with another one, rows are moved to wrong places",
                    do=f"leave out {{{name}}}, or mend the config.json beside the weights",
                    parameter=name,
                )
        return {**self.counts, **stated}

    def require_agreement(self, headers: Mapping[str, TensorHeader]) -> None:
        """Raise CheckpointError unless tensors of these names and shapes are those described."""
        described = f"{self.place} describes {self.modules} modules of {self.layout.name}"
        try:
            plan(headers, self.layout, self.layout, accept=(), form=AS_STORED, **self.counts)
        except _UNFIT as error:
            raise self._disagreement(f"{described}, but: {error.saw}", error.needed) from error
        count = len(modules_of(self.layout, headers))
        if count != self.modules:
            raise self._disagreement(
                f"{described}, but the tensors are of {count}",
                "all files of the checkpoint, as they were written",
            )

    def _disagreement(self, saw: str, needed: str) -> CheckpointError:
        return CheckpointError(
            saw=saw,
            needed=needed,
            do="name the folder if this is one of several files, or copy the file again; if the "
            f"tensors were changed on purpose, {self.removal}",
        )


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors of a path, with what their files and a caller state of them.

    Attributes:
        source: the tensors.
        description: as in the files; None where they carry none.
        config: of the caller, or beside the files, or in the description: the first that is there.
        known: the counts of all of them.
    """

    source: CheckpointSource
    description: Description | None
    config: ConfigFields
    known: dict[str, int]


def open_checkpoint(
    path: Path, counts: Mapping[str, int | None], *, config: Config | None = None
) -> Checkpoint:
    """Read the heads of a checkpoint's files, and what is stated of them; no tensor is read.

    Args:
        path: a file, an index or a folder.
        counts: of ``COUNTS``, as a caller knows them; None where he does not.
        config: as in config.json; that of the files if None.

    Raises:
        CheckpointError: no weights, or a description that does not fit them.
        OptionError: counts that contradict each other.
    """
    source = open_source(path)
    description = description_of(source)
    stated = config_of(source, description) if config is None else ConfigFields.of(config)
    if description is not None:
        description.require_agreement(source.headers)
        description.with_counts(counts)  # those of the caller are refused before the config's
    known = known_counts(stated, counts, place=source.folder)
    if description is not None:
        known = description.with_counts(known)
    return Checkpoint(source, description, stated, known)


def describe(
    headers: Mapping[str, TensorHeader],
    source: Layout,
    target: Layout,
    known: Mapping[str, int],
    config: Config,
) -> Description:
    """Return the description of tensors that are moved from one layout into another.

    Args:
        headers: name -> shape and dtype of the tensors in the layout of the source.
        source: that layout, with the function that the weights have.
        target: the layout that they are moved into.
        known: heads and what else no shape tells.
        config: of the model.
    """
    modules = modules_of(source, headers)
    sizes = [_canonical_sizes(module, headers, source, target, known) for module in modules]
    shared = {
        name: sizes[0][name]
        for name in COUNTS
        if name in sizes[0] and all(each.get(name) == sizes[0][name] for each in sizes)
    }
    moved = replace(target, function=source.function.moved(target.function))
    return Description(moved, len(modules), shared, ConfigFields.of(config))


def _canonical_sizes(
    module: NamedModule,
    headers: Mapping[str, TensorHeader],
    source: Layout,
    target: Layout,
    known: Mapping[str, int],
) -> Sizes:
    stored = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
    sizes = source.sizes(stored, known)
    width = {name: size for name, size in sizes.items() if name == "rotary_width"}
    return target.canonical_sizes(source.canonical_shapes(stored, sizes), width)


def description_of(source: CheckpointSource) -> Description | None:
    """Return the description that the files of a checkpoint carry; None where they carry none.

    The arguments of a model that Meta's code or nanoGPT stores beside the tensors are one, too.

    Raises:
        CheckpointError: it is damaged, of a newer headwise, or not the same in all files.
    """
    texts = {shard.metadata.get(KEY): shard.path for shard in source.shards}
    if len(texts) > 1:
        first, second = sorted(path.name for path in texts.values())[:2]
        raise CheckpointError(
            saw=f"{source.path}, whose files {first} and {second} describe different checkpoints",
            needed=f"the same text under {KEY!r} in the metadata of every file",
            do="copy the folder again; its files were written by several conversions",
        )
    (text,) = texts
    if text is not None:
        return _decoded(text, source.shards[0].path)
    args = model_args_of(source)
    if args is None:
        return None
    counts, config = counts_of(args.config), args.config
    return Description(layout(args.layout), args.layers, counts, config, config.place, args.removal)


def config_of(source: CheckpointSource, description: Description | None) -> ConfigFields:
    """Return the config.json beside a checkpoint; where there is none, that of its description."""
    beside = read_config(source.folder)
    return description.config if description is not None and not beside else beside


def as_described(name: str | Layout, description: Description | None) -> Layout:
    """Return the layout of a name, with the function that the description states for it."""
    named = layout(name)
    is_described = description is not None and description.layout.name == named.name
    return description.layout if description is not None and is_described else named


def _decoded(text: str, path: Path) -> Description:
    try:
        stored = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _unread(path, f"which is no JSON: {error}") from error
    if not isinstance(stored, dict) or not _is_count(stored.get("version")):
        raise _unread(path, "which has no version")
    if stored["version"] > VERSION:
        raise _unread(path, f"of version {stored['version']}; this headwise reads {VERSION}")
    name, modules, counts, function, config = (
        stored.get(field) for field in ("layout", "modules", "counts", "function", "config")
    )
    if not isinstance(name, str) or name not in layouts():
        raise _unread(path, f"which names the layout {name!r:.60}: none that is known here")
    if not isinstance(modules, int) or not _is_count(modules):
        raise _unread(path, f"whose number of modules is {modules!r:.60}")
    if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
        raise _unread(path, f"whose counts are {counts!r:.60}")
    if not isinstance(config, dict):
        raise _unread(path, f"whose config is a {type(config).__name__}")
    if not isinstance(function, dict) or function.keys() != {*FIELDS}:
        raise _unread(path, f"whose function has not the fields {', '.join(FIELDS)}")
    if not all(value is None or isinstance(value, str) for value in function.values()):
        raise _unread(path, "whose function holds more than texts")
    try:
        described = replace(layout(name), function=AttentionSpec(**function))
    except OptionError as error:
        raise _unread(path, f"whose function says {error.saw}") from error
    place = f"the metadata of {path}"
    return Description(
        described, modules, counts, ConfigFields(config, place=place), place, _anew(path)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without private names, such as _name_or_path, which is a path of its writer."""
    return {
        name: _public(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_")
    }


def _anew(path: Path) -> str:
    return (
        "write them into a file without this metadata: safetensors.torch.save_file(safetensors."
        f"torch.load_file({path.name!r}), NEW, metadata={{'format': 'pt'}})"
    )


def _unread(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}, with metadata under {KEY!r} {why[:300]}",
        needed=f"metadata of version {VERSION}, as headwise convert writes it, or none",
        do=f"upgrade headwise if a newer one wrote the file; else {_anew(path)}",
    )
