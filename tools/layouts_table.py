"""``python -m tools.layouts_table``: the catalogue and its pictures, written into docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from headwise.layouts.attention_spec import CALLING, AttentionSpec
from headwise.layouts.canonical import BIASES
from headwise.layouts.layout import Layout
from headwise.layouts.registry import layout, published
from tools.layouts_picture import bands, panel_of, turning

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "catalogue.md"
IMAGES = DOCS / "images" / "layouts"
BEGIN, END = "<!-- the catalogue -->", "<!-- end of the catalogue -->"


def table() -> str:
    """Every published layout: an index of the names, and a table for each family."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    known = [one for family in published().values() for one in family]
    checked = sum(not one.unchecked for one in known)
    yield f"{len(known)} layouts, {checked} of them checked:\n"
    yield "| | layouts |\n| --- | --- |"
    for initial, names in groupby(sorted(one.name for one in known), key=lambda name: name[0]):
        yield f"| {initial} | {', '.join(f'[{name}](#{_anchor(name)})' for name in names)} |"
    for heading, family in published().items():
        yield f"\n### {heading.rstrip('.')}\n"
        yield "| name | its tensors; what is in none of them; source, and what else to know |"
        yield "| --- | --- |"
        for one in family:
            named = f'<a id="{_anchor(one.name)}"></a>`{one.name}`'
            name = named + ("" if one.unchecked else "<br>checked")
            lines = "<br>".join([*_tensors(one), *_function(one), *_about(one)])
            yield f"| {name} | {lines.replace('|', '&#124;')} |"


def _anchor(name: str) -> str:
    return f"layout-{name}"  # headings have anchors of their own


def _tensors(one: Layout) -> Iterator[str]:
    required, patterns = one.required, one.patterns
    for name, text in one.tensors.items():
        if not {*BIASES}.issuperset(patterns[name].tensors):
            # Of code in a table GitHub wants the bars escaped, and mkdocs shows what escapes them.
            yield f"`{name}`: <code>{text}</code>{'' if name in required else ', if any'}"


def _function(one: Layout) -> list[str]:
    usual = vars(AttentionSpec())
    found = [
        f"{name.replace('_', ' ')}: {value or 'by config'}"
        for name, value in vars(one.function).items()
        if name not in CALLING and value != usual[name]
    ]
    return [f"*{'; '.join(found)}*"] if found else []


def _about(one: Layout) -> list[str]:
    described = f"Not checked: {one.unchecked}." if one.unchecked else ""
    return [part for part in (one.source, one.note, described) if part]


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    fused = [
        panel_of(layout("nanogpt"), "c_attn.weight", "all q, all k, all v", heads=4),
        panel_of(layout("neox"), "query_key_value.weight", "head by head", heads=4),
        panel_of(layout("megatron-v1"), "query_key_value.weight", "row by row", heads=4),
    ]
    grouped = [
        panel_of(layout("phi3"), "qkv_proj.weight", "all q, all k, all v"),
        panel_of(layout("falcon-40b"), "query_key_value.weight", "kv head by kv head"),
    ]
    return {
        "fused.svg": bands(
            fused,
            says="Three layouts of one tensor of 48 rows, 4 heads of 4 channels. nanogpt: the rows "
            "of q0 to q3, then k0 to k3, then v0 to v3. neox: q0, k0, v0, then q1, k1, v1, and so "
            "on. megatron-v1: one row of q0, one of k0, one of v0, and again.",
        ),
        "grouped.svg": bands(
            grouped,
            says="Two layouts of one tensor of 32 rows, 4 query and 2 kv heads of 4 channels. "
            "phi3: q0 to q3, k0, k1, v0, v1. falcon-40b: q0, q1, k0, v0, then q2, q3, k1, v1.",
        ),
        "pairing.svg": turning(
            8,
            says="The 8 rows of one head. Half-split: rows 0 and 4, 1 and 5, 2 and 6, 3 and 7 are "
            "rotated together. Interleaved: rows 0 and 1, 2 and 3, 4 and 5, 6 and 7.",
        ),
    }


def with_table(page: str) -> str:
    """The page with the catalogue of today."""
    pattern = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.S)
    found, count = pattern.subn(lambda _: f"\n{table()}\n\n", page)
    assert count == 1, f"{PAGE.name} holds the place of the catalogue {count} times"
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    IMAGES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        IMAGES.joinpath(name).write_text(picture, "utf-8")
