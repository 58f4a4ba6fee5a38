"""``python -m tools.api``: what users may build on, written into docs/api.json.

With ``--check`` nothing is written, and a difference ends with 1. What was lost or changed is
written only once CHANGELOG.md's part "Unreleased" has its name in backticks.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import is_dataclass
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from typer.core import TyperGroup
from typer.main import get_command

import headwise
from headwise.cli import app, output
from headwise.errors import HeadwiseError
from headwise.study.experiments.same_weights import SameFunction

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.json"
CHANGELOG = ROOT / "CHANGELOG.md"
DOCUMENTS = [ROOT / "README.md", *sorted(PAGE.parent.rglob("*.md"))]
IMPORT = re.compile(r"from (headwise[\w.]*) import (\([\w,\s]+|[\w, ]+)")
WORD = re.compile(r"\w+(?:-\w+)*")
BASES = (object, Exception, BaseException, nn.Module, tuple, dict)


def api() -> dict[str, Any]:
    """Every public name with its signature, every command, JSON key and exit status."""
    named = _named()
    classes = _classes(list(named.values()))
    twice = Counter(one.__name__ for one in classes)
    by_name = {
        one.__name__ if twice[one.__name__] == 1 else f"{one.__module__}.{one.__name__}": one
        for one in classes
    }
    return {
        "names": {name: _said(value) for name, value in sorted(named.items())},
        "classes": {name: dict(_members(one)) for name, one in sorted(by_name.items())},
        "errors": dict(sorted(_errors(HeadwiseError))),
        "warnings": dict(sorted(_errors(Warning))),
        "commands": dict(_commands(get_command(app), "headwise")),
        "exit_statuses": {
            name: value for name, value in sorted(vars(output).items()) if type(value) is int
        },
        "json": _json(),
    }


def _named() -> dict[str, Any]:
    """What the door has, what the documents import, and what a room's ``__all__`` names."""
    named = {f"headwise.{name}": getattr(headwise, name) for name in headwise.__all__}
    written = [match for page in DOCUMENTS for match in IMPORT.findall(page.read_text("utf-8"))]
    for home, names in written:
        for name in re.findall(r"\w+", names):
            named[f"{home}.{name}"] = resolve_name(f"{home}.{name}")
    for path in sorted(Path(headwise.__path__[0]).rglob("__init__.py")):
        home = ".".join(["headwise", *path.parent.relative_to(headwise.__path__[0]).parts])
        room = resolve_name(home)
        named |= {f"{home}.{name}": getattr(room, name) for name in getattr(room, "__all__", ())}
    for home, value in list(named.items()):
        if inspect.ismodule(value):
            names = getattr(value, "__all__", [n for n in vars(value) if _is_own(value, n)])
            named |= {f"{home}.{name}": getattr(value, name) for name in names}
    return named


def _is_own(module: Any, name: str) -> bool:
    return (
        not name.startswith("_")
        and getattr(vars(module)[name], "__module__", "") == module.__name__
    )


def _said(value: Any) -> str:
    if inspect.isclass(value):
        return f"class {value.__name__}"
    return _signature(value) if callable(value) else type(value).__name__


def _signature(function: Any) -> str:
    return re.sub(r"<function .*? at 0x\w+>", "...", str(inspect.signature(function)))


def _classes(values: list[Any]) -> set[type]:
    """The classes among them, what functions give back, and methods if a document names it."""
    found: set[type] = set()
    words = set(re.findall(r"\w+", " ".join(page.read_text("utf-8") for page in DOCUMENTS)))
    while values:
        value = values.pop()
        if inspect.isclass(value):
            if value in found or not value.__module__.startswith("headwise"):
                continue
            found.add(value)
            values += [_function(one) for _, one in _public(value)]
        elif inspect.isfunction(value):
            returned = re.findall(r"\w+", str(value.__annotations__.get("return", "")))
            home = vars(sys.modules[value.__module__])
            told = words if "." in value.__qualname__ else home
            values += [home[n] for n in returned if n in told and inspect.isclass(home.get(n))]
    return found


def _function(member: Any) -> Any:
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _public(one: type) -> Iterator[tuple[str, Any]]:
    for base in one.__mro__:
        if base.__module__.startswith("headwise"):
            yield from ((n, v) for n, v in vars(base).items() if not n.startswith("_"))


def _members(one: type) -> Iterator[tuple[str, Any]]:
    """Its constructor, methods, properties and fields, those of its bases too."""
    if one.__init__ not in [base.__init__ for base in BASES]:  # type: ignore[misc]
        yield "()", _signature(one)
    members: dict[str, Any] = {}
    for base in reversed([b for b in one.__mro__ if b.__module__.startswith("headwise")]):
        fields = vars(base).get("__annotations__", {})
        members |= {name: str(said) for name, said in fields.items() if name[0] != "_"}
    for name, member in reversed(list(_public(one))):
        function = _function(member)
        if isinstance(member, property) or hasattr(member, "func"):  # a cached_property
            returns = getattr(function, "func", function).__annotations__.get("return")
            members[name] = f"property -> {returns}"
        elif callable(function) and not inspect.isclass(function):
            kind = f"{type(member).__name__} " if function is not member else ""
            members[name] = f"{kind}{_signature(function)}"
        elif name not in members:
            members[name] = type(member).__name__
    yield from sorted(members.items())


def _errors(base: type[BaseException]) -> Iterator[tuple[str, list[str]]]:
    for one in {base, *base.__subclasses__()}:
        if one.__module__.startswith("headwise"):
            yield one.__name__, [parent.__name__ for parent in one.__bases__]
        if one is not base:
            yield from _errors(one)


def _commands(command: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    statuses = re.findall(r"(?:: |; )(\d+) ", command.epilog or "")
    parameters = {" ".join(one.opts): _parameter(one) for one in command.params}
    yield path, {"exit": " ".join(statuses), "takes": parameters}
    if isinstance(command, TyperGroup):
        for name, below in sorted(command.commands.items()):
            yield from _commands(below, f"{path} {name}")


def _parameter(one: Any) -> str:
    kind = one.type_descriptor.annotation
    words = [one.param_type_name, kind.__name__ if inspect.isclass(kind) else str(kind)]
    words += ["required"] if one.required else []
    words += ["several times"] if one.multiple else []
    words += [f"default {one.default}"] if one.default is not None else []
    return ", ".join(words)


def _json() -> dict[str, Any]:
    """The keys of what ``--json`` prints: of real output where it is quick to have."""
    with tempfile.TemporaryDirectory() as folder:
        layer, page = f"{folder}/layer.safetensors", f"{folder}/page.html"
        save_file(nn.MultiheadAttention(12, 3).state_dict(), layer)
        projections = {f"{name}_proj.weight": torch.rand(12, 12) for name in "qkvo"}
        save_file(projections, f"{folder}/open.safetensors")
        scan = _printed("scan", "--demo", "--length", "16", "--page", page, "--json")
        detections = [
            _printed("detect", f"{folder}/{name}.safetensors", "--json", "--heads", "3")
            for name in ("layer", "open")
        ]
    # docs/study.json is what the command prints; a test holds it to a fresh run.
    study = json.loads(PAGE.with_name("study.json").read_text("utf-8"))
    numbers = {answer["id"]: sorted(answer.pop("numbers")) for answer in study["questions"]}
    return {
        "headwise demo": {
            "scan": "as headwise scan",
            "encoder": {"all else": "as headwise scan", "same_function": _fields(SameFunction)},
        },
        "headwise detect": _keys(detections[0], detections[1]),
        "headwise scan": _keys({**scan, "missing": {}, "versions": {}}),
        "headwise study": {**_keys(study), "numbers": numbers},
    }


def _printed(*arguments: str) -> Any:
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(StringIO()), suppress(SystemExit):
        app(list(arguments), prog_name="headwise")
    return json.loads(printed.getvalue())


def _keys(*values: Any) -> Any:
    """Keys all the way down; the items of a list are one."""
    if all(isinstance(value, dict) for value in values):
        names = sorted({name for value in values for name in value})
        return {name: _keys(*(v[name] for v in values if name in v)) for name in names}
    if all(isinstance(value, list) for value in values):
        items = [item for value in values for item in value]
        return [_keys(*items)] if items else []
    return " | ".join(sorted({type(value).__name__ for value in values}))


def _fields(one: type) -> Any:
    home = vars(sys.modules[one.__module__])
    found = {}
    for name, field in one.__dataclass_fields__.items():  # type: ignore[attr-defined]
        classes = [home[word] for word in re.findall(r"\w+", field.type) if word in home]
        below = [each for each in classes if is_dataclass(each)]
        found[name] = _fields(below[0]) if below else field.type  # type: ignore[arg-type]
    return found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{path} / {name}" if path else name)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _outermost(path: str, found: dict[str, str]) -> str:
    """The outermost part of a lost path of which nothing is left: to tell of that is enough."""
    parts = path.split(" / ")
    wholes = (" / ".join(parts[:count]) for count in range(1, len(parts)))
    return next((w for w in wholes if not any(p.startswith(f"{w} /") for p in found)), path)


def main(*, check: bool) -> int:
    """Compare, and write unless told not to. Returns the exit status."""
    was = dict(_flat(json.loads(PAGE.read_text("utf-8")))) if PAGE.exists() else {}
    today = api()
    found = dict(_flat(today))
    lost = [path for path, said in was.items() if found.get(path) != said]
    new = [path for path in found if path not in was]
    for path in lost:
        now = f"is now {found[path]}" if path in found else "is lost"
        print(f"{path}\n    was    {was[path]}\n    {now}")
    print("".join(f"{path}\n    is new {found[path]}\n" for path in new), end="")
    if check:
        if lost or new:
            print(
                "docs/api.json differs. Write it by `make api`; what was lost or changed must stand"
            )
            print('in the table of CHANGELOG.md, "Unreleased", by its name in backticks.')
        return bool(lost or new)
    unreleased = CHANGELOG.read_text("utf-8").split("\n## [")[1]
    told = {word for code in re.findall(r"`[^`]+`", unreleased) for word in WORD.findall(code)}
    untold = [path for path in lost if WORD.findall(_outermost(path, found))[-1] not in told]
    if untold:
        print("Not written: CHANGELOG.md does not tell of:", *untold, sep="\n    ")
        return 1
    PAGE.write_text(json.dumps(today, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
