"""`load_attention`: one attention layer from a checkpoint, with the settings of its model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import config as config_json
from headwise.checkpoints import description as descriptions
from headwise.checkpoints.config import Config, layout_in_layer, resolve
from headwise.checkpoints.description import COUNTS, Checkpoint, open_checkpoint
from headwise.checkpoints.source import CheckpointSource
from headwise.errors import OptionError
from headwise.function.spec import ABSENT, FROM_CONFIG, OPEN_FIELDS, AttentionSpec, BucketRule
from headwise.function.weights import State
from headwise.layers.attention import Attention
from headwise.layers.conversion import options_of_spec
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import (
    NamedModule,
    find_modules,
    find_unlisted_tensors_of_module,
    locate_weight_outside_attention,
)
from headwise.layouts.pattern import Sizes
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.text import list_some

MAX_NAMES = 6  # modules that an error names
ROUNDED = (
    " rounds its distance bias to bfloat16 at each position; the layer does not:"
    " the two part from position 257 on, earlier for 16 or more heads"
)


@explain_arguments(RENAMED_COUNTS)
def load_attention(
    path: str | Path,
    *,
    layer: int = 0,
    prefix: str | None = None,
    layout: str | Layout | None = None,
    config: Config | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
    **options: Any,
) -> Attention:
    """Return one attention layer of a stored model, in the dtype of its file.

    The layout, the counts and the settings that no tensor holds come from the metadata of the file,
    or else from the config.json beside it. The layer has the rotation, scale, softcap, norms and
    window of the model. The mask is an argument of the call: a decoder needs ``Mask.causal()``.

    Args:
        path: a file of weights, an index, or a folder with them.
        layer: the number of the layer, from 0, as in the names of the tensors.
        prefix: the start of the module's tensor names, where a layer has several modules.
        layout: the layout of the file, where neither metadata nor config.json names it.
        config: the fields of config.json; those of the file if None.
        heads: query heads, where the file does not state them.
        kv_heads: key and value heads.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        options: arguments of `Attention` that override the file's, such as ``window=(3, None)``.

    Raises:
        CheckpointError: the path leads to no weights, or its metadata does not fit its tensors.
        OptionError: no such layer, or a setting of the layer is stated nowhere.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    opened = open_checkpoint(Path(path), counts, config=config)
    source, stated = opened.source, opened.config
    stored = _select_layout(opened, layout)
    modules = find_modules(stored, source.headers)
    module = _select_module(source, stored, modules, layer, prefix)
    shapes = {local: source.headers[name].shape for name, local in module.tensors.items()}
    sizes = stored.sizes(shapes, opened.known)
    described = layout_in_layer(stored, stated, module.layer)
    if described.function.rotary and "rotary" not in options:
        _check_stated_rotation(module, source, described, stated)
    if getattr(described.function.score_bias, "before_scale", False):
        warnings.warn(f"{module.prefix}{ROUNDED}", stacklevel=2)
    return attention_from_state(module, modules, source, described, stated, sizes, **options)


def _check_stated_rotation(
    module: NamedModule, source: CheckpointSource, layout: Layout, config: Config
) -> None:
    """Raise OptionError without a config; warn of positions in sections, which no layer has."""
    if not config:
        raise OptionError(
            saw=f"{source.path} has rotary {layout.name} attention and no config",
            needed="the theta of the rotation, which no tensor holds",
            do="pass rotary=Rotary(theta=...) with the model's theta, or config=...",
        )
    if sections := config_json.rotary_section_of_layer(config, module.layer).get("mrope_section"):
        message = f"{module.prefix} turns by time, row and column of a token, mrope_section"
        rest = "the layer turns by one position, which is right for text without images"
        warnings.warn(f"{message} {sections}; {rest}", stacklevel=4)


def attention_from_state(
    module: NamedModule,
    modules: Sequence[NamedModule],
    state: Mapping[str, Tensor],
    layout: Layout,
    config: Config,
    sizes: Sizes,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Attention:
    """Return the layer of one module of a model; its rotation has the pairing of the layout.

    ``layout`` is that of the layer, see `layout_in_layer`; ``options`` override the config's.
    """
    _require_fitting_config(module, layout, config, sizes)
    stored = {local: state[name] for name, local in module.tensors.items()}
    if isinstance(layout.function.score_bias, BucketRule):
        layout = _add_shared_distance_table(layout, module, modules, stored, state)
    if dtype is not None:
        stored = {local: tensor.to(dtype) for local, tensor in stored.items()}
    given: dict[str, Any] = dict.fromkeys(OPEN_FIELDS & options.keys(), ABSENT)
    spec = resolve(replace(layout.function, **given), config, layer=module.layer)
    if isinstance(spec.score_bias, BucketRule) and module.place.role in ("encoder", "decoder"):
        is_encoder = module.place.role == "encoder"  # a decoder has no later keys to tell apart
        spec = replace(spec, score_bias=replace(spec.score_bias, bidirectional=is_encoder))
    if spec.rotation is not None and "rotary_width" in sizes:
        spec = replace(spec, rotary=replace(spec.rotation, width=sizes["rotary_width"]))
    _require_whole_function(module, spec, config)
    sized = replace(spec, num_heads=sizes["heads"], head_dim=sizes["head_dim"])
    stated = options_of_spec(sized)
    forms = ("score_bias", "qk_norm", "clip")  # that a layer may lack
    left = (n for n in forms if getattr(layout.function, n) is FROM_CONFIG and n not in given)
    read: dict[str, Any] = {name: getattr(spec, name) for name in left}
    return Attention.from_layout(
        stored,
        layout=replace(layout, function=replace(layout.function, **read)),
        num_heads=sizes["heads"],
        num_kv_heads=sizes.get("kv_heads"),
        **{**stated, **options},
    )


def _require_fitting_config(
    module: NamedModule, layout: Layout, config: Config, sizes: Sizes
) -> None:
    """Raise OptionError for a config of another layout or part, or a tensor without a reader."""
    problem = config_json.find_config_contradiction(config, layout.function, sizes)
    if problem is not None:
        raise OptionError(
            saw=f"{module.prefix} of {layout.name}: the layout has {problem}",
            needed="a layout and a config of the same model",
            do="pass the layout=... or the config=... of this model",
        )
    if unread := find_unlisted_tensors_of_module(module, layout):
        raise OptionError(
            saw=f"{list_some(unread, MAX_NAMES)} in the attention of {layout.name}",
            needed=f"tensors that the layout has: {', '.join(layout.tensors)}",
            do="use the model's own class: a layer without these tensors computes something else",
        )
    if part := config_json.find_other_part(config, module.prefix):
        raise OptionError(
            saw=f"{module.prefix}, where the config has {part} beside text_config",
            needed="an attention of the text model: the function of other parts is not read",
            do=f"pass config=... with the fields of {part} and its model_type",
        )


def _require_whole_function(module: NamedModule, spec: AttentionSpec, config: Config) -> None:
    forms = dict(config_json.find_stated_forms(config))
    for name, value in vars(spec).items():
        if value is FROM_CONFIG and (name != "scale" or config):
            stated = forms.get(name, "no field that headwise reads")
            raise OptionError(
                saw=f"{name} of {module.prefix} is left to the config, which has {stated}",
                needed=f"{name} in a form that `Attention` has",
                do=f"pass {name}=... of Attention, None if there is none; or use the model's class",
            )


def _select_layout(opened: Checkpoint, layout: str | Layout | None) -> Layout:
    description = opened.description
    if layout is not None:
        named = descriptions.layout_with_described_function(layout, description)
        if description is not None and description.layout.name != named.name:
            raise OptionError(
                saw=f"layout {named.name}, but {description.origin} says {description.layout.name}",
                needed="the layout of the file: another one puts rows into wrong places",
                do="leave out layout=...",
            )
        return named
    if description is not None:
        return description.layout
    name = config_json.layout_name(opened.config)
    if name is None:
        raise OptionError(
            saw=f"{opened.source.path} has no headwise metadata, and no config.json with a "
            "model_type of the catalogue",
            needed="the layout of the weights",
            do="headwise.checkpoints.load_attention(path, layer=0, layout=...); headwise detect "
            "lists the layouts that fit",
        )
    return registry.layout(name)


def _select_module(
    source: CheckpointSource,
    layout: Layout,
    modules: Sequence[NamedModule],
    layer: int,
    prefix: str | None,
) -> NamedModule:
    if not modules:
        obstacle = registry.find_obstacle(source.headers)
        why = "" if obstacle is None else f": {obstacle.reason}"
        raise OptionError(
            saw=f"{source.path} holds no attention in the layout {layout.name}{why}",
            needed=f"modules with {', '.join(sorted(layout.required))}",
            do="headwise detect names the layout of weights: pass it as layout=..."
            if obstacle is None
            else obstacle.do,
        )
    matches = [module for module in modules if module.layer == layer]
    if prefix is not None:
        matches = [module for module in modules if module.prefix == prefix]
    if len(matches) == 1:
        return matches[0]
    shown = matches or modules
    selection = f"layer {layer}" if prefix is None else f"prefix {prefix!r}"
    fault = f"where {layout.name} has {len(matches)} modules"
    numbers = sorted({module.layer for module in modules if module.layer is not None})
    if prefix is None and not matches and numbers:
        is_whole = len(numbers) == numbers[-1] - numbers[0] + 1
        span = f"{numbers[0]} to {numbers[-1]}" if is_whole else ", ".join(map(str, numbers))
        fault = f"which has the layers {span}"
    raise OptionError(
        saw=f"{selection} of {source.path}, {fault}",
        needed=f"one module, among {list_some([repr(m.prefix) for m in shown], MAX_NAMES)}",
        do=f"load_attention(path, prefix={matches[0].prefix!r}) in Python, or another of them"
        if matches
        else "change layer or prefix",
    )


def _add_shared_distance_table(
    layout: Layout,
    module: NamedModule,
    modules: Sequence[NamedModule],
    stored: State,
    state: Mapping[str, Tensor],
) -> Layout:
    """Add T5's table of distances, which one module stores for all, or MPNet outside of them."""
    place, texts = module.place, {**layout.tensors, **layout.outside}
    local = next(name for name, text in texts.items() if text.startswith("distances:"))
    if local in stored:  # UMT5 has a table in each layer
        return layout
    if local in layout.outside:
        at = {n: locate_weight_outside_attention(layout, n, [place.root]) for n in state}
        tables = [name for name, match in at.items() if match and match[0] == local]
        layout = replace(layout, tensors={**layout.tensors, local: texts[local]})
    else:
        near = [m for m in modules if (m.place.role, m.place.root) == (place.role, place.root)]
        tables = [name for m in near for name, inner in m.tensors.items() if inner == local]
    if tables:
        stored[local] = state[tables[0]]
        return layout
    if place.role != "cross":  # which has none in T5
        raise OptionError(
            saw=f"{module.prefix} of {layout.name}, and no table of distances",
            needed=f"{local}, of this module or of another that shares it",
            do="give all tensors of the model",
        )
    return replace(layout, function=replace(layout.function, score_bias=ABSENT))
