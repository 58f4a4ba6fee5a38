"""Names and docstrings of the source in plain words, as far as they can be counted."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain

from tests.root import ROOT, tree_of

SOURCE = ROOT / "src" / "headwise"

# Words of a private dialect: a name is the noun of the field instead (layout, head, message).
DIALECT = {"found", "one", "own", "said", "told"}
EMPTY_NAMES = {"res", "tmp", "obj", "item", "hit", "thing"}
QUESTION_WORDS = {"what", "who", "where", "how", "whether", "which", "when", "why"}

# A command has the name of the function that it runs, a question of the study that of its subject.
MAY_SHARE_A_NAME = ("cli", "study/questions")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the source, by its path."""
    return {
        path.relative_to(SOURCE).as_posix(): tree_of(path) for path in sorted(SOURCE.rglob("*.py"))
    }


def names(tree: ast.AST) -> Iterator[str]:
    """Names of variables, arguments, attributes, functions and classes; not torch's ``x.item``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="item"):
                pass
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def questions(tree: ast.AST) -> list[str]:
    """Docstrings that open with a question word."""
    docstrings = [
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, Documented)
    ]
    return [
        text.splitlines()[0]
        for text in docstrings
        if text and text.split()[0].strip(",`").lower() in QUESTION_WORDS
    ]


def repeated(values: Iterator[str]) -> list[str]:
    return sorted(value for value, times in Counter(values).items() if times > 1)


def test_names_are_words_of_the_field() -> None:
    counts = Counter(chain.from_iterable(map(names, trees().values())))
    assert {word: counts[word] for word in DIALECT | EMPTY_NAMES if counts[word]} == {}


def test_no_docstring_opens_with_a_question_word() -> None:
    opened = {path: found for path, tree in trees().items() if (found := questions(tree))}
    assert opened == {}


def test_no_two_classes_share_a_name() -> None:
    classes = (
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert repeated(classes) == []


def test_the_counts_see_what_they_count() -> None:
    tree = ast.parse(
        '"""Where it is."""\n'
        'class Own:\n    """A thing."""\n    one: int\n'
        "def told(item, *, hit=1):\n"
        '    """Whether, or not."""\n'
        "    return item.one.item() + f(said=hit.obj)\n"
    )
    counts = Counter(names(tree))
    assert sum(counts[word] for word in DIALECT) == 4  # one, told, .one, said=
    assert (counts["item"], counts["hit"], counts["obj"]) == (2, 2, 1)
    assert questions(tree) == ["Where it is.", "Whether, or not."]
    assert repeated(iter("abca")) == ["a"]
