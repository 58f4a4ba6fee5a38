"""Jinja environment of the HTML pages, and the policy that keeps them complete and safe.

A page says in its head what may run: the script and the styles that are in it, by their digests.
Nothing is loaded, and no text of a model or of a file can become a script or a style.
"""

from __future__ import annotations

import base64
import hashlib
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
    environment.filters["prose"] = mark_identifiers_as_code
    return environment


def mark_identifiers_as_code(text: str) -> Markup:
    return Markup(_IDENTIFIER.sub(lambda match: f"<code>{match[0]}</code>", escape(text)))


# ---- policy --------------------------------------------------------------------------------------

POLICY = "<!-- policy -->"  # where a template leaves room for it
SCRIPT = "<!-- script -->"  # and for the page's script
_STYLE_ATTRIBUTE = re.compile(r'(<[a-zA-Z][^<>]*?)\sstyle="([^"]*)"([^<>]*>)')
_CLASS_ATTRIBUTE = re.compile(r'\sclass="([^"]*)"')
_STYLE = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)


def secure_page(html: str, *, script: str = "") -> str:
    """Return a page with its script and its Content-Security-Policy, and without style attributes.

    The policy forbids style attributes, since it could not tell ours from those of a hostile text:
    classes take their place.
    """
    rules: dict[str, str] = {}
    html = _STYLE_ATTRIBUTE.sub(lambda match: _replace_style_by_class(match, rules), html)
    # Three times the class, so that a rule beats those that a style attribute would beat.
    added = "".join(f".{name}.{name}.{name}{{{rule}}}" for rule, name in rules.items())
    html = html.replace("</style>", f"{added}</style>", 1)
    styles = " ".join(map(_policy_digest, dict.fromkeys(_STYLE.findall(html))))
    scripts = f"; script-src {_policy_digest(script)}" if script else ""
    policy = f"default-src 'none'; img-src data:; style-src {styles}{scripts}"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return html.replace(POLICY, meta, 1).replace(
        SCRIPT, f'<script type="module">{script}</script>', 1
    )


def _replace_style_by_class(match: re.Match[str], rules: dict[str, str]) -> str:
    before, rule, after = match.groups()
    name = rules.setdefault(rule, f"s{len(rules)}")
    tag = before + after
    if _CLASS_ATTRIBUTE.search(tag):
        return _CLASS_ATTRIBUTE.sub(lambda given: f' class="{given[1]} {name}"', tag, count=1)
    return f'{before} class="{name}"{after}'


def _policy_digest(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
