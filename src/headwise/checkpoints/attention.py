"""Attention layer of one module of a model, with the settings of its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import config as config_json
from headwise.checkpoints.config import resolve
from headwise.checkpoints.fields import Config
from headwise.errors import OptionError
from headwise.function.spec import ABSENT, FROM_CONFIG, OPEN_FIELDS, AttentionSpec, BucketRule
from headwise.function.weights import KINDS, SHARED, State
from headwise.layers.attention import Attention
from headwise.layers.conversion import options_of_spec
from headwise.layouts._layout import Layout
from headwise.layouts.modules import (
    NamedModule,
    find_unlisted_tensors_of_module,
    locate_weight_outside_attention,
)
from headwise.layouts.pattern import Sizes
from headwise.support.text import list_some

MAX_NAMES = 6  # modules that an error names
ROUNDED = (
    " rounds its distance bias to bfloat16 at each position; the layer does not:"
    " the two part from position 257 on, earlier for 16 or more heads"
)


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
    if layout.optional and not _has_values(layout, stored):
        _add_values_of_keys(module, layout, config, stored)
    tables = find_shared_tables(layout, module, modules, state)
    if isinstance(layout.function.score_bias, BucketRule):
        layout = _with_distance_table(layout, module, tables, stored)
    given: dict[str, Any] = dict.fromkeys(OPEN_FIELDS & options.keys(), ABSENT)
    spec = resolve(replace(layout.function, **given), config, layer=module.layer)
    if isinstance(spec.score_bias, BucketRule) and module.place.role in ("encoder", "decoder"):
        is_encoder = module.place.role == "encoder"  # a decoder has no later keys to tell apart
        spec = replace(spec, score_bias=replace(spec.score_bias, bidirectional=is_encoder))
    if spec.rotation is not None and "rotary_width" in sizes:
        spec = replace(spec, rotary=replace(spec.rotation, width=sizes["rotary_width"]))
    _require_whole_function(module, spec, config)
    if layout.function.score_bias is not ABSENT and spec.score_bias is not ABSENT:
        stored |= {local: state[name] for name, local in tables.items()}
        layout = layout.with_shared_tables(tables.values())
    if dtype is not None:
        stored = {local: tensor.to(dtype) for local, tensor in stored.items()}
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


def _has_values(layout: Layout, stored: State) -> bool:
    """False if a layout whose modules may lack a projection of values has none here."""
    values = KINDS[0]["v"]
    held = {tensor for name in stored for tensor in layout.patterns[name].tensors}
    return values not in layout.optional or values in held


def _add_values_of_keys(module: NamedModule, layout: Layout, config: Config, stored: State) -> None:
    """Add the projection of values that is that of keys, in layers of Gemma 4 without another."""
    fields = config_json.text_config(config)
    is_usual = str(fields.text("model_type")).startswith("diffusion_gemma")  # has no such field
    if not fields.flag("attention_k_eq_v", default=is_usual):
        raise OptionError(
            saw=f"{module.prefix} of {layout.name}, and no projection of values",
            needed="one, or attention_k_eq_v in the config: values are then projected keys",
            do="give all tensors of this module; or use the model's class",
        )
    for name in [name for name in stored if name.startswith("k_proj.")]:
        stored[name.replace("k_proj", "v_proj")] = stored[name]


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


def _with_distance_table(
    layout: Layout, module: NamedModule, tables: Mapping[str, str], stored: State
) -> Layout:
    """Return the layout without T5's table of distances where cross attention has none."""
    held = {*stored, *tables.values()}  # UMT5 has a table in each layer
    if not held.isdisjoint(names := _shared_names(layout)):
        return layout
    if names and module.place.role != "cross":  # which has none in T5
        raise OptionError(
            saw=f"{module.prefix} of {layout.name}, and no table of distances",
            needed=f"{names[0]}, of this module or of another that shares it",
            do="give all tensors of the model",
        )
    return replace(layout, function=replace(layout.function, score_bias=ABSENT))


def find_shared_tables(
    layout: Layout, module: NamedModule, modules: Sequence[NamedModule], names: Iterable[str]
) -> dict[str, str]:
    """Return the tables for scores that other modules hold, or no module: name -> that here."""
    place, held = module.place, {*module.tensors.values()}
    missing = [name for name in _shared_names(layout) if name not in held]
    tables: dict[str, str] = {}
    if outside := [name for name in missing if name in layout.outside]:
        at = {n: locate_weight_outside_attention(layout, n, [place.root]) for n in names}
        tables = {n: match[0] for n, match in at.items() if match and match[0] in outside}
    near = [m for m in modules if (m.place.role, m.place.root) == (place.role, place.root)]
    for local in missing:
        of_modules = (n for m in near for n, inner in m.tensors.items() if inner == local)
        tables |= dict.fromkeys(list(of_modules)[:1], local)
    return tables


def _shared_names(layout: Layout) -> list[str]:
    texts = {**layout.tensors, **layout.outside}
    return [name for name, text in texts.items() if text.partition(":")[0] in SHARED]
