"""Record of the public interface in docs/api.json: ``python -m tools.api``.

With ``--check`` nothing is written, and the exit status is 1 if the interface differs from the
record. A removed or changed name is written only if CHANGELOG.md has the name in backticks, below
"Changed" of the section "Unreleased".
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
from headwise.reports.report import SameFunction

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.json"
CHANGELOG = ROOT / "CHANGELOG.md"
DOCUMENTS = [ROOT / "README.md"]
DOCUMENTS += sorted(page for page in PAGE.parent.rglob("*.md") if page.name != "log.md")
IMPORT = re.compile(r"from (headwise[\w.]*) import (\([\w,\s]+|[\w, ]+)")
WORD = re.compile(r"\w+(?:-\w+)*")
BASES = (object, Exception, BaseException, nn.Module, tuple, dict)


def api() -> dict[str, Any]:
    """Return every public name with its signature, every command, JSON key and exit status."""
    named = _named()
    classes = _classes(list(named.values()))
    counts = Counter(kind.__name__ for kind in classes)
    by_name = {
        kind.__name__ if counts[kind.__name__] == 1 else f"{kind.__module__}.{kind.__name__}": kind
        for kind in classes
    }
    return {
        "names": {name: _describe(value) for name, value in sorted(named.items())},
        "classes": {name: dict(_members(kind)) for name, kind in sorted(by_name.items())},
        "errors": dict(sorted(_errors(HeadwiseError))),
        "warnings": dict(sorted(_errors(Warning))),
        "commands": dict(_commands(get_command(app), "headwise")),
        "exit_statuses": {
            name: value for name, value in sorted(vars(output).items()) if type(value) is int
        },
        "json": _json(),
    }


def _named() -> dict[str, Any]:
    """Return the names of `headwise`, of imports in documents, and of every ``__all__``."""
    named = {f"headwise.{name}": getattr(headwise, name) for name in headwise.__all__}
    written = [match for page in DOCUMENTS for match in IMPORT.findall(page.read_text("utf-8"))]
    for home, names in written:
        for name in re.findall(r"\w+", names):
            named[f"{home}.{name}"] = resolve_name(f"{home}.{name}")
    for path in sorted(Path(headwise.__path__[0]).rglob("*.py")):
        if "__all__ = " not in path.read_text("utf-8"):
            continue
        *rooms, module = path.relative_to(headwise.__path__[0]).with_suffix("").parts
        home = ".".join(["headwise", *rooms, *([] if module == "__init__" else [module])])
        room = resolve_name(home)
        named |= {f"{home}.{name}": getattr(room, name) for name in getattr(room, "__all__", ())}
    for home, value in list(named.items()):
        if inspect.ismodule(value):
            names = getattr(value, "__all__", [n for n in vars(value) if _is_defined_in(value, n)])
            named |= {f"{home}.{name}": getattr(value, name) for name in names}
    _require_one_path(named)
    return named


def _require_one_path(named: dict[str, Any]) -> None:
    """Exit if a function, class or module is public at two paths."""
    paths: dict[Any, str] = {}
    for path, value in named.items():
        if callable(value) or inspect.ismodule(value):
            other = paths.setdefault(value, path)
            if other != path:
                sys.exit(f"{path} and {other} are the same: a public name has one import path.")


def _is_defined_in(module: Any, name: str) -> bool:
    return (
        not name.startswith("_")
        and getattr(vars(module)[name], "__module__", "") == module.__name__
    )


def _describe(value: Any) -> str:
    if inspect.isclass(value):
        return f"class {value.__name__}"
    return _signature(value) if callable(value) else type(value).__name__


def _signature(function: Any) -> str:
    return re.sub(r"<function .*? at 0x\w+>", "...", str(inspect.signature(function)))


def _classes(values: list[Any]) -> set[type]:
    """Return the classes among the values, and classes returned by functions or named methods."""
    classes: set[type] = set()
    words = set(re.findall(r"\w+", " ".join(page.read_text("utf-8") for page in DOCUMENTS)))
    while values:
        value = values.pop()
        if inspect.isclass(value):
            if value in classes or not value.__module__.startswith("headwise"):
                continue
            classes.add(value)
            values += [_function(member) for _, member in _public(value)]
        elif inspect.isfunction(value):
            returned = re.findall(r"\w+", str(value.__annotations__.get("return", "")))
            home = vars(sys.modules[value.__module__])
            known = words if "." in value.__qualname__ else home
            values += [home[n] for n in returned if n in known and inspect.isclass(home.get(n))]
    return classes


def _function(member: Any) -> Any:
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.startswith("headwise"):
            yield from ((n, v) for n, v in vars(base).items() if not n.startswith("_"))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the constructor, methods, properties and fields, including those of base classes."""
    if kind.__init__ not in [base.__init__ for base in BASES]:  # type: ignore[misc]
        yield "()", _signature(kind)
    members: dict[str, Any] = {}
    for base in reversed([b for b in kind.__mro__ if b.__module__.startswith("headwise")]):
        fields = vars(base).get("__annotations__", {})
        members |= {name: str(annotation) for name, annotation in fields.items() if name[0] != "_"}
    for name, member in reversed(list(_public(kind))):
        function = _function(member)
        if isinstance(member, property) or hasattr(member, "func"):  # a cached_property
            returns = getattr(function, "func", function).__annotations__.get("return")
            members[name] = f"property -> {returns}"
        elif callable(function) and not inspect.isclass(function):
            prefix = f"{type(member).__name__} " if function is not member else ""
            members[name] = f"{prefix}{_signature(function)}"
        elif name not in members:
            members[name] = type(member).__name__
    yield from sorted(members.items())


def _errors(base: type[BaseException]) -> Iterator[tuple[str, list[str]]]:
    for error in {base, *base.__subclasses__()}:
        if error.__module__.startswith("headwise"):
            yield error.__name__, [parent.__name__ for parent in error.__bases__]
        if error is not base:
            yield from _errors(error)


def _commands(command: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    statuses = re.findall(r"(?:: |; )(\d+) ", command.epilog or "")
    parameters = {" ".join(parameter.opts): _parameter(parameter) for parameter in command.params}
    yield path, {"exit": " ".join(statuses), "takes": parameters}
    if isinstance(command, TyperGroup):
        for name, below in sorted(command.commands.items()):
            yield from _commands(below, f"{path} {name}")


def _parameter(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    words = [parameter.param_type_name, kind.__name__ if inspect.isclass(kind) else str(kind)]
    words += ["required"] if parameter.required else []
    words += ["several times"] if parameter.multiple else []
    words += [f"default {parameter.default}"] if parameter.default is not None else []
    return ", ".join(words)


def _json() -> dict[str, Any]:
    """Return the keys of the output of ``--json``, from real output if that is quick."""
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
    # docs/study.json is output of the command; a test compares it with a new run.
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
    """Return nested keys; the items of a list are merged."""
    if all(isinstance(value, dict) for value in values):
        names = sorted({name for value in values for name in value})
        return {name: _keys(*(v[name] for v in values if name in v)) for name in names}
    if all(isinstance(value, list) for value in values):
        items = [item for value in values for item in value]
        return [_keys(*items)] if items else []
    return " | ".join(sorted({type(value).__name__ for value in values}))


def _fields(kind: type) -> Any:
    home = vars(sys.modules[kind.__module__])
    fields = {}
    for name, field in kind.__dataclass_fields__.items():  # type: ignore[attr-defined]
        classes = [home[word] for word in re.findall(r"\w+", field.type) if word in home]
        below = [each for each in classes if is_dataclass(each)]
        fields[name] = _fields(below[0]) if below else field.type  # type: ignore[arg-type]
    return fields


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{path} / {name}" if path else name)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _outermost(path: str, current: dict[str, str]) -> str:
    """Return the outermost part of a removed path of which nothing is left."""
    parts = path.split(" / ")
    wholes = (" / ".join(parts[:count]) for count in range(1, len(parts)))
    return next((w for w in wholes if not any(p.startswith(f"{w} /") for p in current)), path)


def main(*, check: bool) -> int:
    """Compare with the record, write it unless ``check``, and return the exit status."""
    was = dict(_flat(json.loads(PAGE.read_text("utf-8")))) if PAGE.exists() else {}
    today = api()
    current = dict(_flat(today))
    lost = [path for path, value in was.items() if current.get(path) != value]
    new = [path for path in current if path not in was]
    for path in lost:
        now = f"is now {current[path]}" if path in current else "is lost"
        print(f"{path}\n    was    {was[path]}\n    {now}")
    print("".join(f"{path}\n    is new {current[path]}\n" for path in new), end="")
    if check:
        if lost or new:
            print("docs/api.json differs: run `make api`. Removed and changed names stand in")
            print('backticks in CHANGELOG.md, below "Changed" of "Unreleased".')
        return bool(lost or new)
    unreleased = CHANGELOG.read_text("utf-8").split("\n## [")[1]
    changed = unreleased.partition("\n### Changed\n")[2]
    documented = {word for code in re.findall(r"`[^`]+`", changed) for word in WORD.findall(code)}
    undocumented = [
        path for path in lost if WORD.findall(_outermost(path, current))[-1] not in documented
    ]
    if undocumented:
        print("Not written: CHANGELOG.md does not list:", *undocumented, sep="\n    ")
        return 1
    PAGE.write_text(json.dumps(today, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
