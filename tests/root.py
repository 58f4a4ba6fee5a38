"""Where the repository stands, and what its files say."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))
