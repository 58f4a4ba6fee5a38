"""Move a module or a package, and update every text that names it.

    python tools/move.py headwise.masks headwise.masks.mask
    python tools/move.py tests.layer tests.layers.native

The tool moves the file or folder with git, and rewrites imports, dotted names, paths, mutant
patches, the table of suites, documents and import contracts. It renames imported module names
(``from headwise import functional``) where they are used, and formats the files.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("src", "tests", "tools", "benchmarks", "docs", ".github")
LOOSE = ("pyproject.toml", "mkdocs.yml", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
KINDS = {".py", ".md", ".toml", ".yml", ".patch", ".json", ".html"}
# History keeps the old names.
UNTOUCHED = {"docs/log.md", "tools/move.py"}


def main() -> int:
    """Move the module, rewrite the texts and format them."""
    parser = argparse.ArgumentParser(
        description="Move a module, and update every text that names it."
    )
    parser.add_argument("old")
    parser.add_argument("new")
    options = parser.parse_args()
    source, target = module_path(options.old), module_path(options.new)
    if not source.exists():
        source, target = source.with_suffix(".py"), target.with_suffix(".py")
    if not source.exists() or target.exists():
        print(f"{source} must exist, and {target} must not")
        return 2
    move(source, target)
    changed = [path for path in text_files() if rewrite_file(path, options.old, options.new)]
    python = [str(path) for path in changed if path.suffix == ".py"] + [str(target)]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "-q", "--fix", "--select", "I", *python], cwd=ROOT, check=False)
    subprocess.run([*ruff, "format", "-q", *python], cwd=ROOT, check=True)
    print(f"{options.old} -> {options.new}: {len(changed)} files")
    return 0


def module_path(dotted: str) -> Path:
    """Return the folder of a package, or the file of a module without its suffix."""
    parts = dotted.split(".")
    return ROOT / ("src" if parts[0] == "headwise" else "") / Path(*parts)


def move(source: Path, target: Path) -> None:
    """Move with git, also into a package with the module's name."""
    aside = source.with_name(source.name + ".moving")
    subprocess.run(["git", "mv", source, aside], cwd=ROOT, check=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", aside, target], cwd=ROOT, check=True)


def text_files() -> Iterator[Path]:
    """Yield each file that may name a module."""
    for name in LOOSE:
        yield ROOT / name
    for folder in WHERE:
        for path in sorted((ROOT / folder).rglob("*")):
            named = path.relative_to(ROOT).as_posix()
            if path.suffix in KINDS and path.is_file() and named not in UNTOUCHED:
                yield path


def rewrite_file(path: Path, old: str, new: str) -> bool:
    """Rewrite one file; True if it changed."""
    before = text = path.read_text("utf-8")
    if path.suffix == ".py":
        text = rename_parent_imports(text, old, new)
    # Not twice, if a module moves into a package with its name.
    again = ""
    if new.startswith(old + "."):
        leaf = new.rpartition(".")[2]
        again = rf"(?!{re.escape(new.removeprefix(old))}\b)(?! import {leaf}\b)"
    text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w){again}", new, text)
    old_path, new_path = old.replace(".", "/"), new.replace(".", "/")
    text = re.sub(rf"(?<!\w){re.escape(old_path)}(?=\.py\b|/|[\"'`\s)]|$)", new_path, text)
    if text == before:
        return False
    path.write_text(text, "utf-8")
    return True


def rename_parent_imports(text: str, old: str, new: str) -> str:
    """Rename the module in ``from parent import module``, and each use of it in this file."""
    parent, _, leaf = old.rpartition(".")
    new_parent, _, new_leaf = new.rpartition(".")
    if leaf not in text or f"from {parent} import" not in text:
        return text
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    edits: list[tuple[int, int, int, int, str]] = []
    renamed = False
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and node.module == parent and not node.level):
            continue
        moved = [alias for alias in node.names if alias.name == leaf]
        if not moved:
            continue
        others = [ast.unparse(alias) for alias in node.names if alias.name != leaf]
        called = moved[0].asname
        renamed |= called is None and leaf != new_leaf
        indent = " " * node.col_offset
        written = f"from {new_parent} import {new_leaf}" + (f" as {called}" if called else "")
        if others:
            written = f"from {parent} import {', '.join(others)}\n{indent}{written}"
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        edits.append((*span, written))
    if renamed:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == leaf:
                at = (node.lineno, node.col_offset, node.lineno, node.col_offset + len(leaf))
                edits.append((*at, new_leaf))
    for line, column, last, end, written in sorted(edits, reverse=True):
        # Offsets of ast count UTF-8 bytes.
        head = lines[line - 1].encode()[:column].decode()
        tail = lines[last - 1].encode()[end:].decode()
        lines[line - 1 : last] = [head + written + tail]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
