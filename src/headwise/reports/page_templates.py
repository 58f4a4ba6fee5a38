"""The templates of the pages."""

from __future__ import annotations

import re

import jinja2
from markupsafe import Markup, escape

# head_dim, torch.rand, nn.MultiheadAttention: words that nobody writes but in code.
_IDENTIFIER = re.compile(r"\b[A-Za-z]\w*(?:[._][A-Za-z]\w*)+(?:\(\))?")


def templates() -> jinja2.Environment:
    """They escape what is put into them, and a name that is not given is an error.

    The filter ``prose`` sets identifiers in code.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    return environment


def prose(text: str) -> Markup:
    """A sentence as HTML, with its identifiers in code."""
    return Markup(_IDENTIFIER.sub(lambda found: f"<code>{found[0]}</code>", escape(text)))
