"""README and docs are programs: every block runs, and prints what the page says it prints.

The ```python blocks of a page run in order in one namespace. A ```text block right after one is
its output; "..." in it stands for anything, as in a doctest. A block that imports one of ELSEWHERE
is left out where that is not installed. A ```py block is a part of a script for several processes,
and does not run here: the tests of sharding run such calls. A shell block with an output is run as
well: it holds commands of headwise. Of the others, each command must exist.
"""

import ast
import contextlib
import doctest
import io
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import OptionError
from tests.quick import others_extra
from tests.root import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.joinpath("docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.M | re.S)
SHELLS = {"bash", "sh", "shell", "console"}
ELSEWHERE = {"x_transformers"}  # what a page speaks of and the tests do not need
PROJECT = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    output: str | None
    """The ```text block that follows with nothing but blank lines between."""


def blocks(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip_longest(fences, fences[1:]):
        output = None
        if following and following["language"] == "text":
            between = text[fence.end() : following.start()]
            output = None if between.strip() else textwrap.dedent(following["code"])
        line = text[: fence.start()].count("\n") + 1
        found.append(Block(fence["language"], textwrap.dedent(fence["code"]), line, output))
    return found


def run_page(text: str, name: str) -> int:
    """Run the page's blocks; how many outputs were compared."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    compared = 0
    for block in blocks(text):
        is_shown = block.language in SHELLS and block.output is not None
        if not is_shown and (block.language != "python" or missing(block.code)):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if is_shown:
                run_commands(block.code)
            else:
                # The blank lines make a traceback's line number that of the page.
                program = compile("\n" * block.line + block.code, name, "exec", dont_inherit=True)
                exec(program, namespace)
        if block.output is not None:
            assert_same_output(printed.getvalue(), block.output, f"{name}, line {block.line}")
            compared += 1
    return compared


def run_commands(code: str) -> None:
    """Run the commands of a shell block in this process; each must succeed."""
    from headwise.cli import app

    for line in code.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "headwise", line
        with pytest.raises(SystemExit) as ending:
            app(arguments, prog_name="headwise")
        assert ending.value.code in (None, 0), line


def missing(code: str) -> set[str]:
    """What a block imports of ELSEWHERE that is not installed."""
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    wanted = {str(node.module).partition(".")[0] for node in imports}
    return {name for name in wanted & ELSEWHERE if find_spec(name) is None}


def assert_same_output(got: str, want: str, where: str) -> None:
    got, want = (
        "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines()) for text in (got, want)
    )
    assert want.strip(" .\n"), f"{where}: the output shown is empty, or matches anything"
    if not doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS):
        pytest.fail(f"{where}\n--- the page says\n{want}--- printed was\n{got}", pytrace=False)


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z][a-z -]*):", ROOT.joinpath("Makefile").read_text("utf-8"), re.M)
    return set(" ".join(rules).split())


def unknown_commands(code: str) -> Iterator[str]:
    """Commands of a shell block that this repository does not have."""
    from headwise.cli import app  # in here, since a page may be fine while the command line is not

    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    targets = make_targets()
    extras = PROJECT["project"]["optional-dependencies"].keys()
    for line in code.splitlines():
        command = line.partition("#")[0].removeprefix("$ ").strip()
        words = command.replace("python -m headwise", "headwise").split()
        match words:
            case [] | ["cd" | "git", *_]:
                known = True
            case ["make", *wanted]:
                known = {word for word in wanted if "=" not in word} <= targets
            case ["headwise", wanted, *_]:
                known = wanted in commands or wanted.startswith("--")
            case ["torchrun", _, "-m", "headwise", wanted, *_]:
                known = wanted in commands
            case ["pip", "install", *_, package]:
                wanted_extras = re.findall(r"[a-z]+", package.partition("[")[2])
                is_headwise = package.partition("[")[0].strip("'\"") in {"headwise", "."}
                known = is_headwise and set(wanted_extras) <= extras
            case _:
                known = False
        if not known:
            yield command


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # x-transformers' own, at its import
@pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec:FutureWarning"
)  # of the exporter
@pytest.mark.parametrize(
    "page",
    others_extra(PAGES, *(page for page in PAGES if page.stem not in ("prune", "implementations"))),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    run_page(page.read_text("utf-8"), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_exists(page: Path) -> None:
    shell = [block for block in blocks(page.read_text("utf-8")) if block.language in SHELLS]
    assert [command for block in shell for command in unknown_commands(block.code)] == []


def test_every_target_of_make_in_a_sentence_exists() -> None:
    targets = make_targets()
    assert "bench-field" in targets
    named = {
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"`make ([\w-]+)", page.read_text("utf-8"))
        if target not in targets and page.stem != "log"  # which tells of earlier ones
    }
    assert named == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_language(page: Path) -> None:
    # An unnamed block is one that nothing checks.
    known = {"python", "py", "text", *SHELLS, "diff", "toml"}
    unnamed = [block for block in blocks(page.read_text("utf-8")) if block.language not in known]
    assert [f"line {block.line}: {block.language!r}" for block in unnamed] == []


def figures() -> dict[str, str]:
    """The range of each row of docs/figures.md that has one."""
    text = ROOT.joinpath("docs", "figures.md").read_text("utf-8")
    return dict(re.findall(r"^\| (.+?) \| (\d[\d.]* to [\d.]+) \|$", text, re.M))


@pytest.mark.parametrize(
    ("in_readme", "in_figures"),
    [
        ("inference {}", "inference, `need_weights=False`: median of the six"),
        ("training step {}", "training step, `need_weights=False`: median of the six"),
        ("ten statistics takes {} times", "ten statistics, float32"),
    ],
)
def test_the_readme_gives_the_range_of_all_machines(in_readme: str, in_figures: str) -> None:
    text = " ".join(ROOT.joinpath("README.md").read_text("utf-8").split())
    assert in_readme.format(figures()[in_figures]) in text


PAGE = """
```python
x = 1
```

```python
print(f"x = {x + 1}")
```

```text
x = 2
```
"""


def test_the_runner_compares() -> None:
    assert run_page(PAGE, "a page") == 1
    assert run_page(PAGE.replace("x = 2", "x ..."), "a page") == 1


@pytest.mark.parametrize("shown", ["x = 3", "x = 22", "", "..."])
def test_the_runner_can_fail(shown: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match="line 6"):
        run_page(PAGE.replace("x = 2", shown), "a page")


def test_the_runner_runs_commands_that_have_an_output() -> None:
    page = "```bash\nheadwise layouts show gpt2\n```\n"
    assert run_page(page, "a page") == 0
    assert run_page(f"{page}\n```text\ngpt2...\n```\n", "a page") == 1
    with pytest.raises(pytest.fail.Exception):
        run_page(f"{page}\n```text\nllama...\n```\n", "a page")
    with pytest.raises(OptionError, match="no-such-layout"):
        run_page(f"{page.replace('gpt2', 'no-such-layout')}\n```text\n...\n```\n", "a page")


def test_a_failing_block_is_named_by_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as failure:
        run_page(PAGE.replace("x + 1", "x / 0"), "a page")
    assert failure.traceback[-1].lineno == 6  # counted from 0


def test_a_block_is_left_out_only_for_what_need_not_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = PAGE.replace("x = 1", "from no_such_package.part import x")
    with pytest.raises(ModuleNotFoundError):
        run_page(page, "a page")
    monkeypatch.setitem(globals(), "ELSEWHERE", {"no_such_package", "torch"})
    with pytest.raises(NameError):  # of the block that runs
        run_page(page, "a page")
    assert run_page(PAGE.replace("x = 1", "from torch import e as x; x = 1"), "a page") == 1


def test_unknown_commands_are_noticed() -> None:
    good = (
        "make test\nheadwise demo # look\npip install 'headwise[demo]'\npip install .\n"
        "python -m headwise --help"
    )
    bad = ["make tset", "headwise dmeo", "pip install 'headwise[page]'", "pip install headwize"]
    assert list(unknown_commands(good)) == []
    assert list(unknown_commands("\n".join(bad))) == bad
