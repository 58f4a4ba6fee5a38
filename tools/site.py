"""Hooks of mkdocs: public names and the check that each is documented, filter boxes, live pages.

The names are those of docs/api.json. ``make docs`` fails where one of them is not in the reference,
or where a method has no docstring.
"""

from __future__ import annotations

import inspect
import json
import re
import zlib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import headwise.errors
from tools import live_pages

ROOT = Path(__file__).parents[1]
API: dict[str, Any] = json.loads(ROOT.joinpath("docs", "api.json").read_text("utf-8"))
INDEX = "reference/index.md"
# The pages about causes are in the package, since `compare` names them to its users.
CAUSES = "src/headwise/diagnosis/causes/pages/"
NOTEBOOKS = ROOT / "docs" / "notebooks"
LOG = "log.md"
LISTS = {
    "catalogue.md",
    "causes/index.md",
    "huggingface.md",
    LOG,
    "mutants.md",
    "statistics.md",
}
FILTER = (
    '<p class="filter" hidden><input type="search" aria-label="Show only entries with these words"'
    ' placeholder="Show only entries with these words"> <output></output></p>'
)


VIEWER, HOME = "viewer.md", "index.md"
# Below the first picture of a page; docs/javascripts/live.js gives it the scheme of the site.
FRAME = '<iframe class="live" src="{}" loading="lazy" title="The page of a scan"></iframe>'
LINKS = (
    f"Open a live page: [a trained encoder and the small model]({live_pages.HEADS}), or "
    f"[one model beside a changed copy]({live_pages.TWO_MODELS}), of which one head attends evenly."
)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)#]+)\.png\)")


def on_files(files: Files, config: MkDocsConfig, **_: object) -> Files:
    """Add the pages about causes, as causes/NAME.md, notebooks with outputs, and live pages."""
    pages = {
        live_pages.HEADS: live_pages.render_heads,
        live_pages.TWO_MODELS: live_pages.render_two_models,
    }
    for name, render in pages.items():
        files.append(File.generated(config, name, content=render()))
    for path in sorted(ROOT.joinpath(CAUSES).glob("*.md")):
        files.append(File.generated(config, f"causes/{path.name}", abs_src_path=str(path)))
    for path in [*sorted(NOTEBOOKS.glob("*.ipynb")), NOTEBOOKS.parent / "viewer.ipynb"]:
        link = path.name if path.parent == NOTEBOOKS else f"../{path.name}"
        page = notebook_page(json.loads(path.read_text("utf-8")), link)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def notebook_page(notebook: dict[str, Any], link: str) -> str:
    """The cells of a notebook with their outputs, and a link to the file."""
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                source = f"data:image/png;base64,{image}"
                blocks.append(f'<img alt="The figure that the cell above draws" src="{source}">')
            else:
                blocks.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join([*blocks, f"[The notebook as a file]({link})"]) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Write the public names into the first page of the reference; break the log's lines."""
    markdown = markdown.replace(f"(../{CAUSES}", "(causes/")
    if page.file.src_uri in (VIEWER, HOME):
        live = f"\\g<0>\n\n{LINKS}" + f"\n\n{FRAME.format(live_pages.HEADS)}" * (
            page.file.src_uri == VIEWER
        )
        markdown = PICTURE.sub(live, markdown, count=1)
    markdown = PICTURE.sub(_in_both_schemes, markdown)
    if page.file.src_uri == LOG:
        return re.sub(r"\n(?=\*(?:Tried|Seen|So):\*)", "  \n", markdown)
    if page.file.src_uri != INDEX:
        return markdown
    rows = [f"| [`{name}`][{target(name)}] | {summary(name)} |" for name in public_names()]
    return "\n".join([markdown, "| name | |", "| --- | --- |", *rows])


def _in_both_schemes(picture: re.Match[str]) -> str:
    """Return a picture for each colour scheme of the site, where there is one of the dark page."""
    words, name = picture.groups()
    if not ROOT.joinpath("docs", f"{name}-dark.png").is_file():
        return picture[0]
    return f"![{words}]({name}.png#only-light)![{words}]({name}-dark.png#only-dark)"


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Put a filter box below the title of a long list; docs/javascripts/filter.js shows it."""
    return html.replace("</h1>", f"</h1>{FILTER}", 1) if page.file.src_uri in LISTS else html


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    """Fail where a public name has no place in the reference."""
    documented = inventory(Path(config.site_dir, "objects.inv").read_bytes())
    missing = sorted(wanted(documented) - documented)
    if missing:
        raise PluginError("public names without documentation: " + ", ".join(missing))


def public_names() -> list[str]:
    """Every public name, then the errors and warnings."""
    names = dict.fromkeys(API["names"])
    # Those that are elsewhere join one of these with an error of torch's layer.
    for name in sorted([*API["errors"], *API["warnings"]]):
        if hasattr(headwise.errors, name) and f"headwise.{name}" not in names:
            names[f"headwise.errors.{name}"] = None
    return [*names]


def value_of(name: str) -> Any:
    """What ``from home import last`` gives: a function also where a module has the same name."""
    home, _, last = name.rpartition(".")
    return getattr(__import__(home, fromlist=[last]), last)


def summary(name: str) -> str:
    """The first line of its docstring; of a constant, its value."""
    value = value_of(name)
    if not (callable(value) or inspect.ismodule(value)):
        return f"`{value!r}`" if len(repr(value)) < 40 else ""
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("``", "`").replace("|", "\\|")


def wanted(documented: set[str]) -> set[str]:
    """The public names, and the methods and properties of every class that is documented.

    The fields of a class are described in its docstring.
    """
    found = {target(name) for name in public_names()}
    for name, members in API["classes"].items():
        # A class that is exported has two paths; its members are listed at one of them.
        homes = [home for home in documented if home.rpartition(".")[2] == name]
        for member, kind in members.items():
            is_field = not re.match(r"property|(\w+ )?\(self|classmethod|staticmethod", kind)
            if homes and not is_field and member != "()":
                paths = {f"{home}.{member}" for home in homes}
                found.add(next(iter(paths & documented), f"{homes[0]}.{member}"))
    return found


def target(name: str) -> str:
    """The name in the reference: another path where a module has the name of its function."""
    value = value_of(name)
    if f"{name}." in f"{getattr(value, '__module__', '')}.":
        return f"{value.__module__}.{value.__qualname__}"
    return name


def inventory(content: bytes) -> set[str]:
    """The names in an inventory of Sphinx, version 2: four lines, then what zlib packed."""
    packed = content.split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(packed).decode().splitlines()}
