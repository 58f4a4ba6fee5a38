"""Differences of two configs that change the attention and that no tensor shows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from headwise.checkpoints.config import Config, attention_window
from headwise.checkpoints.options import layout_in_layer, resolve
from headwise.errors import OptionError
from headwise.function.spec import ABSENT, Softcap
from headwise.layouts._layout import Layout

Fields = dict[str, str]


def find_config_differences(
    first: Config, second: Config, layouts: tuple[Layout, Layout], layers: Iterable[int]
) -> dict[str, tuple[str, str]]:
    """Return the fields in which two configs differ -> (first, second), by the first such layer.

    Compared are theta and scaling of a rotation, the softcap and the window. Without a config of
    each side nothing is known to differ.
    """
    differing: dict[str, tuple[str, str]] = {}
    if not first or not second or first == second:
        return differing
    for layer in sorted({*layers}):
        with suppress(OptionError):  # a setting that headwise has no name for
            mine, theirs = (
                _read_attention_settings(config, layout, layer)
                for config, layout in zip((first, second), layouts, strict=True)
            )
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    differing.setdefault(name, (mine[name], theirs[name]))
    return differing


def _read_attention_settings(config: Config, layout: Layout, layer: int) -> Fields:
    described = layout_in_layer(layout, config, layer)
    spec = resolve(replace(described.function, window=ABSENT), config, layer=layer)
    fields = {"window": str(attention_window(config, layer))}
    if described.function.softcap is not ABSENT:
        fields["softcap"] = str(spec.softcap.limit if isinstance(spec.softcap, Softcap) else None)
    if (rotary := spec.rotation) is not None:
        fields |= {"rope_theta": f"{rotary.theta:g}", "rotary scaling": str(rotary.scaling)}
    return fields
