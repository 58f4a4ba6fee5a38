"""Jinja environment of the HTML pages."""

from __future__ import annotations

import re

import jinja2
from markupsafe import Markup, escape

# Identifiers with a dot or an underscore, such as head_dim, torch.rand or nn.MultiheadAttention.
_IDENTIFIER = re.compile(r"\b[A-Za-z]\w*(?:[._][A-Za-z]\w*)+(?:\(\))?")


def template_environment() -> jinja2.Environment:
    """Return an environment that escapes values and raises an error for undefined names.

    The filter ``prose`` marks identifiers as code.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = mark_identifiers
    return environment


def mark_identifiers(text: str) -> Markup:
    """Return a sentence as HTML, with identifiers marked as code."""
    return Markup(_IDENTIFIER.sub(lambda match: f"<code>{match[0]}</code>", escape(text)))
