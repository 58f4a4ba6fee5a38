"""Table of the layouts catalogue in docs/, with its pictures: ``python -m tools.layouts_table``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from headwise.function.spec import AttentionSpec
from headwise.function.weights import BIASES
from headwise.layouts._layout import Layout
from headwise.layouts.registry import catalogue_by_family, layout
from tools.layouts_picture import draw_panels, draw_rotary_pairs, make_panel

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "catalogue.md"
IMAGES = DOCS / "images" / "layouts"
BEGIN, END = "<!-- the catalogue -->", "<!-- end of the catalogue -->"


def table() -> str:
    """Return the index of all published layouts, and a table for each family."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    layouts = [each for family in catalogue_by_family().values() for each in family]
    checked = sum(not each.unchecked for each in layouts)
    yield f"{len(layouts)} layouts, {checked} of them checked:\n"
    yield "| | layouts |\n| --- | --- |"
    all_names = sorted(each.name for each in layouts)
    for initial, names in groupby(all_names, key=lambda name: name[0]):
        yield f"| {initial} | {', '.join(f'[{name}](#{_anchor(name)})' for name in names)} |"
    for heading, family in catalogue_by_family().items():
        yield f"\n### {heading.rstrip('.')}\n"
        yield "| name | its tensors; what is in none of them; source, and what else to know |"
        yield "| --- | --- |"
        for each in family:
            name = f'<a id="{_anchor(each.name)}"></a>`{each.name}`'
            name += "" if each.unchecked else "<br>checked"
            lines = "<br>".join([*_tensors(each), *_function(each), *_about(each)])
            yield f"| {name} | {lines.replace('|', '&#124;')} |"


def _anchor(name: str) -> str:
    return f"layout-{name}"  # distinct from the anchors of headings


def _tensors(entry: Layout) -> Iterator[str]:
    required, patterns = entry.required, entry.patterns
    for name, text in entry.tensors.items():
        if not {*BIASES}.issuperset(patterns[name].tensors):
            # GitHub needs escaped bars in the code of a table, and mkdocs shows the escapes.
            yield f"`{name}`: <code>{text}</code>{'' if name in required else ', if any'}"


def _function(entry: Layout) -> list[str]:
    usual = AttentionSpec().words()
    options = [
        f"{name.replace('_', ' ')}: {value or 'by config'}"
        for name, value in entry.function.words().items()
        if value != usual[name]
    ]
    return [f"*{'; '.join(options)}*"] if options else []


def _about(entry: Layout) -> list[str]:
    described = f"Not checked: {entry.unchecked}." if entry.unchecked else ""
    names = ", ".join(f"`{axis}`" for axis in entry.sharded)
    sharded = f"Divided over tensor-parallel processes: {names}" if names else ""
    return [part for part in (entry.source, entry.note, sharded, described) if part]


def pictures() -> dict[str, str]:
    """Return the pictures: file name -> SVG."""
    fused = [
        make_panel(layout("nanogpt"), "c_attn.weight", "all q, all k, all v", heads=4),
        make_panel(layout("neox"), "query_key_value.weight", "head by head", heads=4),
        make_panel(layout("megatron-v1"), "query_key_value.weight", "row by row", heads=4),
    ]
    grouped = [
        make_panel(layout("phi3"), "qkv_proj.weight", "all q, all k, all v"),
        make_panel(layout("falcon-40b"), "query_key_value.weight", "kv head by kv head"),
    ]
    return {
        "fused.svg": draw_panels(
            fused,
            alt="Three layouts of one tensor of 48 rows, 4 heads of 4 channels. nanogpt: the rows "
            "of q0 to q3, then k0 to k3, then v0 to v3. neox: q0, k0, v0, then q1, k1, v1, and so "
            "on. megatron-v1: one row of q0, one of k0, one of v0, and again.",
        ),
        "grouped.svg": draw_panels(
            grouped,
            alt="Two layouts of one tensor of 32 rows, 4 query and 2 kv heads of 4 channels. "
            "phi3: q0 to q3, k0, k1, v0, v1. falcon-40b: q0, q1, k0, v0, then q2, q3, k1, v1.",
        ),
        "pairing.svg": draw_rotary_pairs(
            8,
            alt="The 8 rows of one head. Half-split: rows 0 and 4, 1 and 5, 2 and 6, 3 and 7 "
            "are rotated together. Interleaved: rows 0 and 1, 2 and 3, 4 and 5, 6 and 7.",
        ),
    }


def replace_table(page: str) -> str:
    """Return the page with the current catalogue."""
    pattern = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.S)
    text, count = pattern.subn(lambda _: f"\n{table()}\n\n", page)
    assert count == 1, f"{PAGE.name} has {count} catalogue markers, not one"
    return text


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8")), "utf-8")
    IMAGES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        IMAGES.joinpath(name).write_text(picture, "utf-8")
