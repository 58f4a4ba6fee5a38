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

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.checkpoints import config as config_json
from headwise.checkpoints.config import Config, ConfigFields
from headwise.checkpoints.safetensors import KEY, unique_keys
from headwise.checkpoints.shares import JoinedSource, join_shares, open_shares, require_all_shares
from headwise.checkpoints.source import CheckpointSource, open_source
from headwise.errors import CheckpointError, DTypeError, OptionError, ShapeError
from headwise.function.spec import SETTINGS
from headwise.layouts._layout import CALLING, Layout
from headwise.layouts.modules import AS_STORED, NamedModule, find_modules
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import TensorHeader, plan_conversion
from headwise.layouts.registry import layout, layouts_by_name

VERSION = 1
FIELDS = (*SETTINGS, *CALLING)  # of a function
COUNTS = ("heads", "kv_heads", "head_dim", "rotary_width")
_PLAN_ERRORS = (OptionError, ShapeError, DTypeError)


@dataclass(frozen=True)
class Description:
    """Layout, counts, function and config of a checkpoint, as its own files state them.

    Attributes:
        layout: the layout, with the function of the weights.
        modules: the number of attention modules.
        counts: heads, kv_heads and so on, as far as all modules share them.
        config: the fields of config.json.
        origin: the file and key of the description, for messages.
        removal: the way to remove the description, for messages.
    """

    layout: Layout
    modules: int
    counts: Mapping[str, int]
    config: ConfigFields
    origin: str = ""
    removal: str = ""

    def encode(self) -> str:
        """Return the JSON text that a file carries."""
        function, config = self.layout.settings(), _without_private_names(self.config)
        fields = {"version": VERSION, "layout": self.layout.name, "modules": self.modules}
        sections = {"counts": dict(self.counts), "function": function, "config": config}
        return json.dumps(fields | sections)

    def config_json(self) -> str:
        """Return the text of a config.json, for transformers."""
        return json.dumps(_without_private_names(self.config), indent=2) + "\n"

    def merge_known_counts(self, known: Mapping[str, int | None]) -> dict[str, int]:
        """Return the known counts, where None means unknown, together with the description's.

        Raises:
            OptionError: a known count contradicts the description.
        """
        stated = {name: count for name, count in known.items() if count is not None}
        for name, count in stated.items():
            if self.counts.get(name, count) != count:
                raise OptionError(
                    saw=f"{name} {count}, where {self.origin} says {self.counts[name]}",
                    needed="the count of the model: another one moves rows to wrong places",
                    do=f"leave out {{{name}}}, or correct the config.json beside the weights",
                    parameter=name,
                )
        return {**self.counts, **stated}

    def require_fit_to_headers(self, headers: Mapping[str, TensorHeader]) -> None:
        """Raise CheckpointError unless the description fits these tensor names and shapes."""
        described = f"{self.origin} describes {self.modules} modules of {self.layout.name}"
        try:
            plan_conversion(
                headers, self.layout, self.layout, accept=(), form=AS_STORED, **self.counts
            )
        except _PLAN_ERRORS as error:
            raise self._disagreement_error(
                f"{described}, but: {error.saw}", error.needed
            ) from error
        count = len(find_modules(self.layout, headers))
        if count != self.modules:
            raise self._disagreement_error(
                f"{described}, but the tensors are of {count}",
                "all files of the checkpoint, unchanged",
            )

    def _disagreement_error(self, saw: str, needed: str) -> CheckpointError:
        return CheckpointError(
            saw=saw,
            needed=needed,
            do="name the folder if this is one of several files, or copy the file again; if you "
            f"changed the tensors on purpose, {self.removal}",
        )


def describe_target(
    headers: Mapping[str, TensorHeader],
    source: Layout,
    target: Layout,
    known: Mapping[str, int],
    config: Config,
) -> Description:
    """Return the description of tensors that are converted from one layout to another.

    Args:
        headers: name -> shape and dtype of the tensors in the source layout.
        source: the source layout, with the function of the weights.
        target: the layout of the converted tensors.
        known: heads and other counts that no shape gives.
        config: the fields of the model's config.json.
    """
    modules = find_modules(source, headers)
    sizes = [_sizes_in_target_layout(module, headers, source, target, known) for module in modules]
    shared = {
        name: sizes[0][name]
        for name in COUNTS
        if name in sizes[0] and all(each.get(name) == sizes[0][name] for each in sizes)
    }
    return Description(
        target.of_weights_from(source), len(modules), shared, ConfigFields.wrap(config)
    )


def _sizes_in_target_layout(
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


def read_description(source: CheckpointSource) -> Description | None:
    """Return the description that the files of a checkpoint carry; None where they carry none.

    Model arguments that Meta's code or nanoGPT stores beside the tensors serve as a description.

    Raises:
        CheckpointError: the description is damaged, of a newer headwise, or differs between files.
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
    if text is not None:
        return _decode_description(text, source.shards[0].path)
    args = read_model_args(source)
    if args is None:
        return None
    counts, origin = config_json.read_stated_counts(args.config), args.config.origin
    return Description(layout(args.layout), args.layers, counts, args.config, origin, args.removal)


def read_config_file_or_description(
    source: CheckpointSource, description: Description | None
) -> ConfigFields:
    """Return the config.json beside a checkpoint, else the config in its description."""
    config = config_json.read_config(source.folder)
    return description.config if description is not None and not config else config


def layout_with_described_function(name: str | Layout, description: Description | None) -> Layout:
    """Return the layout of this name, with the function of the description if it has the name."""
    named = layout(name)
    is_described = description is not None and description.layout.name == named.name
    return description.layout if description is not None and is_described else named


def _decode_description(text: str, path: Path) -> Description:
    try:
        stored = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _metadata_error(path, f"is no JSON: {error}") from error
    if not isinstance(stored, dict) or not _is_count(stored.get("version")):
        raise _metadata_error(path, "has no version")
    if stored["version"] > VERSION:
        version = stored["version"]
        raise _metadata_error(path, f"has version {version}; this headwise reads {VERSION}")
    name, modules, counts, function, config = (
        stored.get(field) for field in ("layout", "modules", "counts", "function", "config")
    )
    if not isinstance(name, str) or name not in layouts_by_name():
        raise _metadata_error(path, f"names the unknown layout {name!r:.60}")
    if not isinstance(modules, int) or not _is_count(modules):
        raise _metadata_error(path, f"has {modules!r:.60} modules, not a count")
    if not isinstance(counts, dict) or not all(map(_is_count, counts.values())):
        raise _metadata_error(path, f"has the counts {counts!r:.60}")
    if not isinstance(config, dict):
        raise _metadata_error(path, f"has a config that is a {type(config).__name__}")
    if not isinstance(function, dict) or function.keys() != {*FIELDS}:
        raise _metadata_error(path, f"has no function with the fields {', '.join(FIELDS)}")
    if not all(value is None or isinstance(value, str) for value in function.values()):
        raise _metadata_error(path, "has a function with a value that is no text")
    try:
        described = layout(name).with_settings(function)
    except OptionError as error:
        raise _metadata_error(path, f"has a function with {error.saw}") from error
    origin = f"the metadata of {path}"
    return Description(
        described,
        modules,
        counts,
        ConfigFields(config, origin=origin),
        origin,
        _removal_advice(path),
    )


def _is_count(value: Any) -> bool:
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


@dataclass(frozen=True)
class ModelArgs:
    """Layout and config of a model that is stored with its arguments.

    Attributes:
        layout: the name of the layout.
        layers: the number of layers.
        config: the fields of config.json.
        removal: the way to read the weights without the arguments, for messages.
    """

    layout: str
    layers: int
    config: ConfigFields
    removal: str


def read_model_args(source: CheckpointSource) -> ModelArgs | None:
    """Return the arguments that are stored with a checkpoint; None where there are none.

    Raises:
        CheckpointError: params.json beside consolidated.00.pth is no JSON.
        OptionError: an argument has the wrong type.
    """
    first = source.shards[0]
    if first.model_args:
        code = f"torch.save(torch.load({first.path.name!r}, weights_only=True)['model'], NEW)"
        origin, removal = f"model_args in {first.path}", f"save them alone: {code}"
        return _translate_model_args(ConfigFields(first.model_args, origin=origin), removal)
    params = source.folder / PARAMS
    if first.path.name.startswith("consolidated") and params.is_file():
        fields = ConfigFields(_read_params(params), origin=str(params))
        return _translate_model_args(fields, f"remove {params}")
    return None


def _translate_model_args(fields: ConfigFields, removal: str) -> ModelArgs | None:
    layers, heads = (fields.count(name) for name in ("n_layers", "n_heads"))
    if layers is not None and heads is not None:
        return ModelArgs("llama-meta", layers, _meta_config(fields, layers, heads), removal)
    layers, heads, width = (fields.count(name) for name in ("n_layer", "n_head", "n_embd"))
    if layers is None or heads is None or width is None:
        return None
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "n_positions": fields.count("block_size"),
        "vocab_size": fields.count("vocab_size"),
        "activation_function": "gelu",
    }
    return ModelArgs("nanogpt", layers, ConfigFields(config, origin=fields.origin), removal)


def _meta_config(fields: ConfigFields, layers: int, heads: int) -> ConfigFields:
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
    return ConfigFields(config, origin=fields.origin)


def mlp_width(width: int, multiple_of: int, factor: float | None) -> int:
    """Return the MLP width of Meta's code for an embed_dim: llama/model.py, FeedForward."""
    inner = int(2 * (4 * width) / 3)
    if factor is not None:
        inner = int(factor * inner)
    return multiple_of * -(-inner // multiple_of)


def _read_params(path: Path) -> Mapping[str, Any]:
    try:
        stored = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            saw=f"{path} is no JSON: {error}",
            needed="the arguments of the model, in Meta's format",
            do="copy the file again; or remove it, and name the layout and the counts",
        ) from error
    return stored if isinstance(stored, dict) else {}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors of a path, with their description, config and counts.

    Attributes:
        source: the tensors.
        description: the description in the files; None where they carry none.
        config: the caller's, else the one beside the files, else the one in the description.
        known: the counts of the caller, the config and the description.
    """

    source: CheckpointSource
    description: Description | None
    config: ConfigFields
    known: dict[str, int]


def open_checkpoint(
    path: Path,
    counts: Mapping[str, int | None],
    *,
    config: Config | None = None,
    stored: str | Layout | None = None,
) -> Checkpoint:
    """Open a checkpoint with its description and config; no tensor is read.

    Args:
        path: a file, an index or a folder; also a folder with shares of tensor-parallel processes.
        counts: the caller's counts, named as in ``COUNTS``; None where a count is unknown.
        config: the fields of config.json; those of the files if None.
        stored: the layout of shares; the one that the files state or fit if None.

    Raises:
        CheckpointError: no weights, or a description that does not fit them.
        OptionError: counts that contradict each other.
    """
    shares = open_shares(path)
    source = open_source(path) if shares is None else shares
    description = read_description(source)
    stated = (
        read_config_file_or_description(source, description)
        if config is None
        else ConfigFields.wrap(config)
    )
    if shares is not None:
        source = _join_shares(shares, stored, description, stated, counts)
    if description is not None:
        if shares is None:
            require_all_shares(source, description.layout, description.counts)
        description.require_fit_to_headers(source.headers)
        description.merge_known_counts(
            counts
        )  # report the caller's wrong counts before the config's
    known = config_json.merge_counts(stated, counts, origin=source.folder)
    if description is not None:
        known = description.merge_known_counts(known)
    return Checkpoint(source, description, stated, known)


def _join_shares(
    shares: JoinedSource,
    stored: str | Layout | None,
    description: Description | None,
    config: ConfigFields,
    counts: Mapping[str, int | None],
) -> JoinedSource:
    described = {} if description is None else description.counts
    given = {name: count for name, count in counts.items() if count is not None}
    name = description.layout if stored is None and description is not None else stored
    known = {**config_json.read_stated_counts(config), **described, **given}
    return join_shares(shares, None if name is None else layout(name), known)
