"""The templates of the pages."""

from __future__ import annotations

import jinja2


def templates() -> jinja2.Environment:
    """They escape what is put into them, and a name that is not given is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
