"""`load_attention`: one attention layer of a checkpoint, with the function that its files state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.config import Config, layout_of, window_of
from headwise.checkpoints.config_check import in_layer, objection, options_of
from headwise.checkpoints.description import COUNTS, Checkpoint, as_described, open_checkpoint
from headwise.checkpoints.source import CheckpointSource
from headwise.errors import OptionError
from headwise.layers.native.attention import Attention
from headwise.layouts import registry
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.canonical import State
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NamedModule, modules_of

NAMED = 6  # modules, in an error


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

    Layout, counts and the settings that no tensor holds are read from the metadata of the file, or
    else from the config.json beside it. The layer has the rotation, scale, softcap, norms and
    window of the model. Who may attend is an argument of the call: a decoder needs
    ``Mask.causal()``.

    Args:
        path: a file of weights, an index, or a folder with them.
        layer: the number of the layer, from 0, as the names in the file have it.
        prefix: of the names of the module's tensors, where a layer has several modules.
        layout: the layout of the file, where neither metadata nor config.json says it.
        config: as in config.json; that of the file if None.
        heads: query heads, where the file does not say it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        options: of `Attention`, which come before those of the file, such as ``window=(3, None)``.

    Raises:
        CheckpointError: the path leads to no weights, or its metadata does not fit its tensors.
        OptionError: no such layer, or the file does not say what the layer needs.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    opened = open_checkpoint(Path(path), counts, config=config)
    source, stated = opened.source, opened.config
    stored = _layout(opened, layout)
    modules = modules_of(stored, source.headers)
    module = _module(source, stored, modules, layer, prefix)
    shapes = {local: source.headers[name].shape for name, local in module.tensors.items()}
    sizes = stored.sizes(shapes, opened.known)
    described = in_layer(stored, stated, module.layer)
    _require_config(module, source, described, stated, sizes, options)
    if described.function.window != "none" and "window" not in options:
        window = window_of(stated, module.layer)
        options["window"] = None if window is None else (window - 1, None)
    return attention_of(module, modules, source, described, stated, sizes, **options)


def _require_config(
    module: NamedModule,
    source: CheckpointSource,
    layout: Layout,
    config: Config,
    sizes: Sizes,
    options: Mapping[str, Any],
) -> None:
    """Raise OptionError where the config says another function, or is needed and not there."""
    if (why := objection(config, layout.function, sizes)) is not None:
        raise OptionError(
            saw=f"{module.prefix} in {source.path}, whose function has {why}",
            needed="a layout and a config of one model",
            do="give layout=... or config=... as the model has them",
        )
    if layout.function.rotary not in (None, "none") and not config and "rotary" not in options:
        raise OptionError(
            saw=f"{source.path}, whose {layout.name} attention rotates, and no config",
            needed="the theta of the rotation, which no tensor holds",
            do="give rotary=Rotary(theta=...) as the model has it, or config=...",
        )


def attention_of(
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
    """Return the layer of one module, whose rotation has the pairing of the layout.

    Args:
        module: which.
        modules: all of the model, among which T5 has one table of distances for each side.
        state: name -> tensor of the model.
        layout: of the weights, as this layer has it: see `in_layer`.
        config: what the layout leaves open.
        sizes: heads, and kv_heads and rotary_width where they are known.
        dtype: of the layer; that of its tensors if None.
        options: of `Attention`, which come before those of the config.
    """
    stored = {local: state[name] for name, local in module.tensors.items()}
    if layout.function.score_bias == "t5":
        layout = _with_distances(layout, module, modules, stored, state)
    if dtype is not None:
        stored = {local: tensor.to(dtype) for local, tensor in stored.items()}
    stated = options_of(config, layout.function, layer=module.layer)
    rotary = stated.get("rotary")
    if rotary is not None:
        is_interleaved = layout.function.rotary == "interleaved"
        stated["rotary"] = replace(
            rotary,
            pairing="interleaved" if is_interleaved else rotary.pairing,
            width=sizes.get("rotary_width", rotary.width),
        )
    return Attention.from_layout(
        stored,
        layout=layout,
        num_heads=sizes["heads"],
        num_kv_heads=sizes.get("kv_heads"),
        **{**stated, **options},
    )


def _layout(opened: Checkpoint, layout: str | Layout | None) -> Layout:
    description = opened.description
    if layout is not None:
        named = as_described(layout, description)
        if description is not None and description.layout.name != named.name:
            raise OptionError(
                saw=f"layout {named.name}, where {description.place} says "
                f"{description.layout.name}",
                needed="one layout: read as another one, rows stand in wrong places",
                do="leave out layout",
            )
        return named
    if description is not None:
        return description.layout
    name = layout_of(opened.config)
    if name is None:
        raise OptionError(
            saw=f"{opened.source.path}, without metadata of headwise, and without a config.json "
            "of a model_type that the catalogue knows",
            needed="the layout of the weights",
            do="give layout=...; headwise detect says which ones fit",
        )
    return registry.layout(name)


def _module(
    source: CheckpointSource,
    layout: Layout,
    modules: Sequence[NamedModule],
    layer: int,
    prefix: str | None,
) -> NamedModule:
    """The one module of a layer."""
    same = [module for module in modules if module.layer == layer]
    if prefix is not None:
        same = [module for module in modules if module.prefix == prefix]
    if len(same) == 1:
        return same[0]
    shown = same or modules
    names = ", ".join(repr(module.prefix) for module in shown[:NAMED]) or "none"
    more = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    asked = f"layer {layer}" if prefix is None else f"prefix {prefix!r}"
    raise OptionError(
        saw=f"{asked} of {source.path}, where {layout.name} has {len(same)} modules",
        needed=f"one module, among {names}{more}",
        do="give the prefix of one of them" if same else "give layer=... or prefix=...",
    )


def _with_distances(
    layout: Layout,
    module: NamedModule,
    modules: Sequence[NamedModule],
    stored: State,
    state: Mapping[str, Tensor],
) -> Layout:
    """T5 has the table in the first layer of each side, for all of it; cross attention has none."""
    local = next(n for n, pattern in layout.patterns.items() if pattern.tensors == ("distances",))
    tables = (
        name
        for other in modules
        if other.place.role == module.place.role and other.place.root == module.place.root
        for name, inner in other.tensors.items()
        if inner == local
    )
    table = next(tables, None)
    if table is None:
        return replace(layout, function=replace(layout.function, score_bias="none"))
    stored[local] = state[table]
    return layout
