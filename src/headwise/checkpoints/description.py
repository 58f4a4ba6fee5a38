"""Description of a checkpoint in its own files: layout, counts, function and config.

A converted file has a description in its safetensors metadata: JSON under the key "headwise". All
files of a checkpoint carry the same text, so a file that is copied without the others keeps it:

    {"version": 1,
     "layout": "llama-meta",
     "modules": 32,
     "counts": {"heads": 32, "kv_heads": 8, "head_dim": 128},
     "function": {"scale": "1/sqrt(head_dim)", "rotary": "interleaved", ...},
     "config": {"rms_norm_eps": 1e-05, "rope_theta": 500000.0, ...}}

``modules`` counts the attention modules. ``function`` has `Layout.settings`; null
leaves a field to ``config``, the config.json of the original model without its private names.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from headwise.checkpoints import config as config_json
from headwise.checkpoints.fields import Config, ConfigFields
from headwise.checkpoints.safetensors import KEY
from headwise.checkpoints.shares import join_shares, open_shares, require_all_shares
from headwise.checkpoints.source import CheckpointSource, open_source
from headwise.errors import CheckpointError, DTypeError, OptionError, ShapeError
from headwise.function.spec import LATER, SETTINGS
from headwise.layouts._layout import CALLING, Layout
from headwise.layouts.modules import AS_STORED, NamedModule, find_modules
from headwise.layouts.plan import TensorHeader, plan_conversion
from headwise.layouts.registry import layout, layouts_by_name
from headwise.support.files import parse_json_object

VERSION = 1
FIELDS = (*SETTINGS, *CALLING)  # of a function
COUNTS = ("heads", "kv_heads", "head_dim", "rotary_width")


@dataclass(frozen=True)
class Description:
    """Layout, counts, function and config of a checkpoint, as its own files state them."""

    layout: Layout  # the layout, with the function of the weights
    modules: int  # the number of attention modules
    counts: Mapping[str, int]  # heads, kv_heads and so on, as far as all modules share them
    config: ConfigFields  # the fields of config.json
    origin: str = ""  # the file and key of the description, for messages
    removal: str = ""  # the way to remove the description, for messages

    def encode(self) -> str:
        config = _without_private_names(self.config)
        function = {
            name: word
            for name, word in self.layout.settings().items()
            if name not in LATER or word not in (None, "none")
        }
        fields = {"version": VERSION, "layout": self.layout.name, "modules": self.modules}
        sections = {"counts": dict(self.counts), "function": function, "config": config}
        return json.dumps(fields | sections)

    def config_json(self) -> str:
        return json.dumps(_without_private_names(self.config), indent=2) + "\n"

    def require_fit_to_headers(self, headers: Mapping[str, TensorHeader]) -> None:
        described = f"{self.origin} describes {self.modules} modules of {self.layout.name}"
        do = (
            "name the folder if this is one of several files, or copy the file again; if you "
            f"changed the tensors on purpose, {self.removal}"
        )
        try:
            plan_conversion(
                headers, self.layout, self.layout, accept=(), form=AS_STORED, **self.counts
            )
        except (OptionError, ShapeError, DTypeError) as error:
            saw = f"{described}, but: {error.saw}"
            raise CheckpointError(saw=saw, needed=error.needed, do=do) from error
        count = len(find_modules(self.layout, headers))
        if count != self.modules:
            raise CheckpointError(
                saw=f"{described}, but the tensors are of {count}",
                needed="all files of the checkpoint, unchanged",
                do=do,
            )


def describe_target(
    headers: Mapping[str, TensorHeader],
    source: Layout,
    target: Layout,
    known: Mapping[str, int],
    config: Config,
) -> Description:
    """Return the description of tensors that are converted from one layout to another.

    The source has the function of the weights; ``headers`` are those of its tensors.
    """
    modules, sizes = find_modules(source, headers), []
    for module in modules:
        stored = {local: tuple(headers[name].shape) for name, local in module.tensors.items()}
        solved = source.sizes(stored, known)
        width = {name: size for name, size in solved.items() if name == "rotary_width"}
        sizes.append(target.canonical_sizes(source.canonical_shapes(stored, solved), width))
    is_even = len({each["heads"] for each in sizes}) == 1
    shared = {
        name: sizes[0][name]
        for name in (COUNTS if is_even else (*COUNTS, "group"))  # of kv heads in each layer
        if name in sizes[0] and all(each.get(name) == sizes[0][name] for each in sizes)
    }
    return Description(
        target.of_weights_from(source), len(modules), shared, ConfigFields.wrap(config)
    )


def read_description(source: CheckpointSource) -> Description | None:
    """Return the description that the files of a checkpoint carry; None where they carry none.

    Model arguments that Meta's code, llama2.c or nanoGPT stores with the tensors serve as one:
    params.json beside consolidated.00.pth, or model_args within ckpt.pt.

    Raises:
        CheckpointError: the description is damaged, of a newer headwise, or differs between files.
        OptionError: a model argument has the wrong type.
    """
    texts = {shard.metadata.get(KEY): shard.path for shard in source.shards}
    if len(texts) > 1:
        first, second = sorted(path.name for path in texts.values())[:2]
        raise CheckpointError(
            saw=f"{first} and {second} in {source.path} describe different checkpoints",
            needed=f"the same text under {KEY!r} in the metadata of every file",
            do="copy the folder again: several conversions wrote its files",
        )
    (text,) = texts
    return _read_model_args(source) if text is None else _decode(text, source.shards[0].path)


def read_config_file_or_description(
    source: CheckpointSource, description: Description | None
) -> ConfigFields:
    config = config_json.read_config(source.folder)
    return description.config if description is not None and not config else config


def layout_with_described_function(name: str | Layout, description: Description | None) -> Layout:
    named = layout(name)
    is_described = description is not None and description.layout.name == named.name
    return description.layout if description is not None and is_described else named


def _decode(text: str, path: Path) -> Description:
    try:
        stored = parse_json_object(text)
    except ValueError as error:
        raise _metadata_error(path, str(error)) from error
    version, name, modules, counts, function, config = (
        stored.get(name)
        for name in ("version", "layout", "modules", "counts", "function", "config")
    )
    if not _is_count(version):
        raise _metadata_error(path, "has no version")
    if version > VERSION:
        raise _metadata_error(path, f"has version {version}; this headwise reads {VERSION}")
    if not isinstance(name, str) or name not in layouts_by_name():
        raise _metadata_error(path, f"names the unknown layout {name!r:.60}")
    if not _is_count(modules):
        raise _metadata_error(path, f"has {modules!r:.60} modules, not a count")
    if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
        raise _metadata_error(path, f"has the counts {counts!r:.60}")
    if not isinstance(config, dict):
        raise _metadata_error(path, f"has a config that is a {type(config).__name__}")
    if not isinstance(function, dict) or function.keys() | LATER != {*FIELDS}:
        raise _metadata_error(path, f"has no function with the fields {', '.join(FIELDS)}")
    if not all(value is None or isinstance(value, str) for value in function.values()):
        raise _metadata_error(path, "has a function with a value that is no text")
    try:
        described = layout(name).with_settings(function)
    except OptionError as error:
        raise _metadata_error(path, f"has a function with {error.saw}") from error
    fields = ConfigFields(config, origin=f"the metadata of {path}")
    return Description(described, modules, counts, fields, fields.origin, _removal_advice(path))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _without_private_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without private names, such as _name_or_path, a path on some machine."""
    return {
        name: _without_private_names(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not name.startswith("_")
    }


def _removal_advice(path: Path) -> str:
    return (
        "save the tensors without this metadata: safetensors.torch.save_file(safetensors."
        f"torch.load_file({path.name!r}), NEW, metadata={{'format': 'pt'}})"
    )


def _metadata_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"the metadata under {KEY!r} in {path} {why[:300]}",
        needed=f"metadata of version {VERSION} from headwise convert, or none",
        do=f"upgrade headwise if a newer release wrote the file; else {_removal_advice(path)}",
    )


PARAMS = "params.json"
# The constants of Meta's apply_scaling: meta-llama/llama-models, models/llama3/model.py.
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _read_model_args(source: CheckpointSource) -> Description | None:
    first, params = source.shards[0], source.folder / PARAMS
    if first.model_args:
        code = f"torch.save(torch.load({first.path.name!r}, weights_only=True)['model'], NEW)"
        fields = ConfigFields(first.model_args, origin=f"model_args in {first.path}")
        removal = f"save them alone: {code}"
    elif first.path.name.startswith("consolidated") and params.is_file():
        try:
            fields = ConfigFields(
                parse_json_object(params.read_bytes(), unique=False), origin=str(params)
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                saw=f"{params} {error}",
                needed="the arguments of the model, in Meta's format",
                do="copy the file again; or remove it, and name the layout and the counts",
            ) from error
        removal = f"remove {params}"
    else:
        return None
    layers, heads = (fields.count(name) for name in ("n_layers", "n_heads"))
    if layers is not None and heads is not None:
        stored, config = layout("llama-meta"), _meta_config(fields, layers, heads)
    else:
        layers, heads, width = (fields.count(name) for name in ("n_layer", "n_head", "n_embd"))
        if layers is None or heads is None or width is None:
            return None
        stored = layout("nanogpt")
        config = {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width}
        config |= {"n_positions": fields.count("block_size")}
        config |= {"vocab_size": fields.count("vocab_size"), "activation_function": "gelu"}
    config = ConfigFields(config, origin=fields.origin)
    counts = config_json.read_stated_counts(config)
    return Description(stored, layers, counts, config, fields.origin, removal)


def _meta_config(fields: ConfigFields, layers: int, heads: int) -> dict[str, Any]:
    width = fields.count("dim")
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("n_kv_heads") or heads,
        "rms_norm_eps": fields.number("norm_eps") or 1e-5,
        "rope_theta": fields.number("rope_theta") or 10_000.0,
    }
    if width is not None:
        config["hidden_size"] = width
        config["head_dim"] = fields.count("head_dim") or width // heads
        inner = mlp_width(
            width, fields.count("multiple_of") or 256, fields.number("ffn_dim_multiplier")
        )
        config["intermediate_size"] = fields.count("hidden_dim") or inner
    if (fields.number("vocab_size") or 0) > 0:  # -1 in Llama 2: the tokenizer sets it
        config["vocab_size"] = fields.count("vocab_size")
    if window := fields.count("sliding_window"):  # Mistral's own files
        config |= {"model_type": "mistral", "sliding_window": window}
    if fields.flag("use_scaled_rope"):
        factor = fields.number("rope_scaling_factor") or SCALING["factor"]
        config["rope_scaling"] = {**SCALING, "factor": factor}
    return config


def mlp_width(width: int, multiple_of: int, factor: float | None) -> int:
    """Return the MLP width of Meta's code for an embed_dim: llama/model.py, FeedForward."""
    inner = int(2 * (4 * width) / 3)
    if factor is not None:
        inner = int(factor * inner)
    return multiple_of * -(-inner // multiple_of)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors of a path, with their description, config and counts."""

    source: CheckpointSource  # the tensors
    description: Description | None  # the description in the files; None where they carry none
    # the caller's, else the one beside the files, else the one in the description
    config: ConfigFields
    known: dict[str, int]  # the counts of the caller, the config and the description
    trusts_code: bool = False  # True if code beside the files may run
    inputs: Mapping[str, Any] = field(default_factory=dict)  # the caller's, for the model's class


def open_checkpoint(
    path: Path,
    counts: Mapping[str, int | None],
    *,
    config: Config | None = None,
    stored: str | Layout | None = None,
    trusts_code: bool = False,
) -> Checkpoint:
    """Open a checkpoint, or shares of tensor-parallel processes; no tensor is read.

    ``counts`` are named as in ``COUNTS``, None where unknown; ``stored`` is the layout of shares.

    Raises:
        CheckpointError: no weights, or a description that does not fit them.
        OptionError: counts that contradict each other.
    """
    shares = open_shares(path)
    source = open_source(path) if shares is None else shares
    description = read_description(source)
    if config is None:
        config = read_config_file_or_description(source, description)
    stated = ConfigFields.wrap(config)
    described = {} if description is None else description.counts
    if shares is not None:
        given = {name: count for name, count in counts.items() if count is not None}
        known = {**config_json.read_stated_counts(stated), **described, **given}
        name = description.layout if stored is None and description is not None else stored
        source = join_shares(shares, None if name is None else layout(name), known)
    if description is not None:
        if shares is None:
            require_all_shares(source, description.layout, described)
        description.require_fit_to_headers(source.headers)
        # wrong counts of the caller before the config's
        config_json.merge_stated_counts(described, counts, origin=description.origin)
    known = config_json.merge_counts(stated, counts, origin=source.folder)
    if description is not None:
        known = config_json.merge_stated_counts(described, known, origin=description.origin)
    return Checkpoint(source, description, stated, known, trusts_code)


# ---- layers that a config counts ----------------------------------------------------------------

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYERS_OF_SIDES = {
    side: (f"{side}_layers", f"num_{side}_layers") for side in ("encoder", "decoder")
}
_TOWERS = ("text_config", "vision_config", "audio_config")


def read_layer_counts(config: Config, role: str) -> set[int]:
    """Return the numbers of layers that the config states, with those of its towers.

    ``role`` is "encoder" or "decoder" where the layers are those of that side.
    """
    parts = [config, *(part for part in map(config.get, _TOWERS) if isinstance(part, dict))]
    for names in (_LAYERS_OF_SIDES.get(role, ()), _LAYERS):
        values = [part.get(name) for part in parts for name in names]
        if counts := {n for n in values if isinstance(n, int) and n > 0}:
            return counts
    return set()


def find_missing_layers(
    config: Config, modules: Iterable[NamedModule], names: Iterable[str]
) -> list[str]:
    """Return sentences on layers that the config counts and of which there is no tensor.

    A layer that holds other tensors may have no attention, as in hybrid models. Of the stacks of
    one role, such as those of an image and a text tower, only the longest is compared; modules at
    other places than the layout's may be of a part with layers of its own number. A model_type that
    the catalogue does not know may count others.
    """
    if config.get("model_type") and config_json.layout_name(config) is None:
        return []
    stacks: dict[str, dict[str, set[int]]] = {}
    for module in modules:
        if module.stack is not None and module.place.role != "cross":
            by_stack = stacks.setdefault(module.place.role, {})
            by_stack.setdefault(module.stack, set()).add(module.layer)
    sentences, names = [], list(names)
    for role, by_stack in stacks.items():
        stack, present = max(by_stack.items(), key=lambda pair: len(pair[1]))
        # A config of several models has several counts: the next one up is that of this stack.
        count = min((n for n in read_layer_counts(config, role) if n >= len(present)), default=0)
        counted = (
            n for n in sorted({*range(count)} - present) if config_json.layer_attends(config, n)
        )
        absent = (f"{stack}{number}" for number in counted)
        missing = [p for p in absent if not any(n.startswith((f"{p}.", f"{p}/")) for n in names)]
        if missing:
            more = f" and {len(missing) - 1} more layers are" if len(missing) > 1 else " is"
            sentences.append(f"`{missing[0]}`{more} missing: the config says {count} layers")
    return sentences
