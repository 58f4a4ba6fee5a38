"""A page as a tree, and what it would make a browser ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements below, in order, with these attributes (``class_`` for class)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        found = []
        for child in self.children:
            if child.tag == tag and wanted.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, **attributes)
        return found


class Tree(HTMLParser):
    """Elements with their attributes and all their text; unbalanced tags are an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = Element("root", {})
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert self.open == [self.root], f"never closed: {self.open[-1].tag}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def everything(element: Element) -> list[Element]:
    return [element, *(e for child in element.children for e in everything(child))]


def outside(html: str) -> list[str]:
    """Whatever would make a browser ask for something."""
    root = Tree(html).root
    loading = ("src", "href", "srcset", "poster", "data", "action", "background", "xlink:href")
    found = [
        value
        for element in everything(root)
        for name, value in element.attributes.items()
        if name in loading and not value.startswith(("#", "data:"))
    ]
    found += [e.tag for tag in ("script", "iframe", "object", "embed") for e in root.all(tag)]
    # A namespace is a name, not an address; url(#...) is a place on the page.
    words = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    return found + re.findall(r"url\((?!#)[^)]*\)|@import|https?://[^\s\"<]*", words)
