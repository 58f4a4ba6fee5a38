"""The habits of the house, as far as a machine can see them."""

import ast
import gc
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from packaging.version import Version

import headwise
from tests.root import ROOT, tree_of

SOURCE = ROOT / "src" / "headwise"
FILES = sorted(
    path
    for room in ("src", "tests", "benchmarks", "tools", "examples")
    for path in ROOT.joinpath(room).rglob("*.py")
)
SOURCES = [path for path in FILES if path.is_relative_to(SOURCE)]

EVERY_ERROR = {None, "Exception", "BaseException"}
# The one tuple of every error, for a function of a caller, whose errors may have their own classes.
CALLERS_ERRORS = "src/headwise/diagnosis/subjects/function.py"
MOST_LINES_OF_A_FILE = 700
MOST_LINES_OF_A_FUNCTION = 50
# Room -> its ceiling of lines. A commit that raises one says so, and why.
MOST_LINES_OF_A_ROOM = {
    "checkpoints": 6_510,
    "cli": 1_990,
    "diagnosis": 13_620,
    "function": 4_340,
    "huggingface": 900,
    "identify": 5_400,
    "layers": 5_060,
    "layouts": 5_430,
    "masks": 2_400,
    "matrix": 2_480,
    "models": 700,
    "reports": 3_170,
    "scanning": 9_790,
    "sharding": 2_800,
    "study": 4_950,
    "support": 1_250,
    "surgery": 5_080,
}
# Letters of a module's name, which is read with its folder.
MOST_LETTERS, MOST_LETTERS_OF_NINE_IN_TEN, MEDIAN_LETTERS = 20, 14, 9

# word used elsewhere -> word used here. Torch's own words stay in torch_api/, torch's layer.
SYNONYMS = {
    "batch_size": "batch",
    "bsz": "batch",
    "n_head": "num_heads or heads",
    "n_heads": "num_heads or heads",
    "nhead": "num_heads or heads",
    "nheads": "num_heads or heads",
    "num_head": "num_heads",
    "num_attention_heads": "num_heads",
    "n_kv_heads": "num_kv_heads or kv_heads",
    "num_key_value_heads": "num_kv_heads",
    "seq_len": "queries, keys or length",
    "seqlen": "queries, keys or length",
    "seq_length": "queries, keys or length",
    "sequence_length": "queries, keys or length",
    "src_len": "keys",
    "kv_len": "keys",
    "k_len": "keys",
    "tgt_len": "queries",
    "q_len": "queries",
    "d_model": "embed_dim",
    "emb_dim": "embed_dim",
    "hidden_size": "embed_dim",
    "d_k": "head_dim",
    "dim_head": "head_dim",
    "head_size": "head_dim",
    "d_v": "value_dim",
    "kdim": "source_dim",
    "vdim": "source_dim",
    "attn_mask": "mask",
    "attn_bias": "score_bias",
    "attention_bias": "score_bias",
    "position_bias": "score_bias",
    "logit_cap": "softcap",
    "softmax_scale": "scale",
    "sinks": "sink",
}
TENSOR = re.compile(r"\b(Float|Int|Bool|Integer|Shaped|Num|Inexact|Tensor)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(tree: ast.AST) -> list[str]:
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and (lines := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION  # type: ignore[operator]
    ]


def public_functions(tree: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Functions and methods of no private name; nested functions are nobody's business."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, Function) and (
            not node.name.startswith("_") or node.name in ("__init__", "__call__")
        ):
            yield node


def functions_for_users(tree: ast.Module, path: Path) -> Iterator[Function]:
    """The methods of the door's classes, and the functions of the rooms that are functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in headwise.__all__:
            yield from public_functions(node)
        elif (
            isinstance(node, Function)
            and not node.name.startswith("_")
            and "heads" in path.relative_to(SOURCE).parts
        ):
            yield node


def public_fields(tree: ast.Module) -> Iterator[str]:
    """Annotated names in class bodies: a dataclass makes arguments of them."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id


def synonyms(tree: ast.Module) -> list[str]:
    words = set(public_fields(tree))
    for function in public_functions(tree):
        if function.name.startswith("from_"):  # takes another library's convention, in its words
            continue
        a = function.args
        words |= {argument.arg for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs]}
    return [f"{word}: say {SYNONYMS[word]}" for word in sorted(words & SYNONYMS.keys())]


def positional_after_tensors(functions: Iterable[Function]) -> list[str]:
    """Arguments that could be given by position behind a tensor, without being tensors."""
    found = []
    for function in functions:
        seen = False
        for argument in [*function.args.posonlyargs, *function.args.args]:
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            if TENSOR.search(annotation):
                seen = True
            elif seen:
                found.append(f"{function.name}({argument.arg})")
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """``a.b.c`` for ``import a.b.c`` and for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private_parts_of_torch(tree: ast.AST) -> list[str]:
    """Dotted names inside torch with a part that begins with an underscore, imported or used."""
    places: dict[str, str] = {}  # local name -> what it is in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    places[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                places[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def place(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return places.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := place(node.value)):
            return f"{parent}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (whole := place(node.value)):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    places[target.id] = whole
    names = [name for name in imports(tree) if name.split(".")[0] == "torch"]
    names += [whole for node in ast.walk(tree) if (whole := place(node))]
    return sorted({name for name in names if re.search(r"\._(?!_)", name)})


def blind_excepts(tree: ast.AST) -> list[str]:
    """Handlers of every error, and tuples for handlers that hold every one."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            kinds = node.value.elts
        else:
            continue
        if {None if kind is None else ast.unparse(kind) for kind in kinds} & EVERY_ERROR:
            lines.append(f"line {node.lineno}")
    return lines


def broken(
    check: Callable[[ast.Module], object], paths: Iterable[Path] = SOURCES
) -> dict[str, Any]:
    """What a check finds in each file that does not pass it."""
    found = {name_of(path): check(tree_of(path)) for path in paths}
    return {name: what for name, what in found.items() if what}


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_collection() -> Iterator[None]:
    """The trees of all files are kept, and each collection would walk them again."""
    gc.disable()
    yield
    gc.enable()


def test_files_and_functions_keep_their_budget() -> None:
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES_OF_A_FILE} == {}
    assert broken(long_functions, FILES) == {}
    rooms = Counter[str]()
    for path in (path for path in SOURCES if path.parent != SOURCE):
        rooms[path.relative_to(SOURCE).parts[0]] += lines[name_of(path)]
    assert rooms.keys() == MOST_LINES_OF_A_ROOM.keys()
    assert {room: n for room, n in rooms.items() if n > MOST_LINES_OF_A_ROOM[room]} == {}


def test_names_of_modules_are_one_or_two_words() -> None:
    names = [
        path.stem.strip("_")
        for path in SOURCES  # a question has the name of its id, which users type
        if path.stem not in ("__init__", "__main__") and path.parent.name != "questions"
    ]
    letters = sorted(map(len, names))
    assert letters[-1] <= MOST_LETTERS
    assert letters[len(letters) * 9 // 10] <= MOST_LETTERS_OF_NINE_IN_TEN
    assert letters[len(letters) // 2] <= MEDIAN_LETTERS
    assert [name for name in names if {"and", "of", "for"} & set(name.split("_"))] == []
    assert [name for name in names if name.count("_") > 1] == []


def test_a_module_with_the_name_of_its_public_function_is_private() -> None:
    # After `from headwise.layouts.layout import X`, `headwise.layouts.layout` is a module.
    for room in sorted({path.parent for path in SOURCES if path.name == "__init__.py"}):
        home = import_module(".".join(room.relative_to(SOURCE.parent).parts))
        names = set(getattr(home, "__all__", ()))
        modules = {path.stem for path in room.iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not names & modules - {"importance"}, room


def test_no_blind_except() -> None:
    assert [*broken(blind_excepts)] == [CALLERS_ERRORS]


def test_one_vocabulary_and_keywords_after_tensors() -> None:
    ours = [path for path in SOURCES if "torch_api" not in path.parts]
    assert broken(synonyms, ours) == {}
    for path in ours:
        functions = functions_for_users(tree_of(path), path)
        assert positional_after_tensors(functions) == [], name_of(path)


def test_private_parts_of_torch_stand_in_one_file() -> None:
    others = [path for path in SOURCES if path.name != "private_torch.py"]
    assert broken(private_parts_of_torch, others) == {}


def test_only_the_room_of_sharding_is_distributed() -> None:
    # import-linter sees torch only as a whole.
    others = [path for path in SOURCES if not path.is_relative_to(SOURCE / "sharding")]

    def distributed(tree: ast.Module) -> list[str]:
        return [name for name in imports(tree) if name.startswith("torch.distributed")]

    assert broken(distributed, others) == {}


def test_rooms_do_not_use_the_door() -> None:
    through = {f"headwise.{name}" for name in [*headwise.__all__, "__version__"]}
    rooms = [path for path in SOURCES if path.parent != SOURCE / "cli"]
    assert broken(lambda tree: through & set(imports(tree)), rooms) == {}


# file or room -> why it imports modules by names that stand in data
DYNAMIC_IMPORTS = {
    "checkpoints/skeleton.py": "transformers' way to place stored tensors, where it is installed",
    "checkpoints/transformers.py": "classes that transformers does not export",
    "layouts/registry.py": "families of layouts, loaded when one is named",
    "study": "questions, loaded when one is asked",
    "support/lazy.py": "rooms, packages that are not declared, and what draws",
}


def dynamic_imports(tree: ast.AST) -> list[str]:
    """Uses of ``import_module`` and ``__import__``, and imports of what has the former."""
    names = {"import_module", "__import__"}
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    return sorted(names & (used | {name.rpartition(".")[2] for name in imports(tree)}))


def test_few_files_import_modules_by_name() -> None:
    found = {
        "study" if "study" in path.relative_to(SOURCE).parts else str(path.relative_to(SOURCE))
        for path in SOURCES
        if dynamic_imports(tree_of(path))
    }
    assert found == {*DYNAMIC_IMPORTS}


def undocumented(names: Iterable[str]) -> list[str]:
    """Classes and functions without a docstring, and methods and properties of these classes."""
    found = []
    for name in names:
        value = resolve_name(name)
        parts = {name: value} if inspect.isclass(value) or inspect.isfunction(value) else {}
        for part, member in inspect.getmembers(value) if inspect.isclass(value) else ():
            # transformers adds methods to every nn.Module.
            is_code = inspect.isfunction(member) or inspect.ismethod(member)
            is_ours = is_code and str(member.__module__).startswith("headwise.")
            if not part.startswith("_") and (is_ours or isinstance(member, property)):
                parts[f"{name}.{part}"] = member
        found += [part for part, member in parts.items() if not inspect.getdoc(member)]
    return found


def test_public_names_have_docstrings() -> None:
    record = json.loads(ROOT.joinpath("docs/api.json").read_text("utf-8"))
    assert undocumented(record["names"]) == []
    assert undocumented(["tests.test_house.test_public_names_have_docstrings"]) != []


def test_the_version_is_that_of_the_changelog_or_a_later_one_in_development() -> None:
    text = ROOT.joinpath("CHANGELOG.md").read_text("utf-8")
    first, *released = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert "Unreleased" not in released
    if first == "Unreleased":
        assert headwise.__version__.endswith(".dev0")
        assert Version(headwise.__version__) > Version(released[0])
    else:
        assert first == headwise.__version__


def test_these_checks_can_fail() -> None:
    tree = ast.parse(
        "import torch.distributed.tensor\n"
        "from headwise import Mask\n"
        "class Layer:\n"
        "    nhead: int\n"
        "    def split(self, x: Float[Tensor, 'batch'], heads: int, *, seq_len: int): ...\n"
        "def long():\n" + "    1\n" * 50 + "try: long()\n"
        "except Exception: ...\n"
    )
    assert synonyms(tree) == [
        "nhead: say num_heads or heads",
        "seq_len: say queries, keys or length",
    ]
    assert positional_after_tensors(public_functions(tree)) == ["split(heads)"]
    assert list(imports(tree)) == ["torch.distributed.tensor", "headwise.Mask"]
    assert long_functions(tree) == ["long: 51 lines"]
    assert blind_excepts(tree) == ["line 58"]
    assert blind_excepts(ast.parse("ERRORS = (ValueError, Exception)")) == ["line 1"]
    assert blind_excepts(ast.parse("try: ...\nexcept (ValueError, Exception): ...")) == ["line 2"]
    tree = ast.parse("import importlib\nimportlib.import_module(__import__('a'))\n")
    assert dynamic_imports(tree) == ["__import__", "import_module"]
    assert dynamic_imports(ast.parse("from importlib import import_module, resources")) != []
    assert dynamic_imports(ast.parse("from importlib import metadata, util")) == []
    tree = ast.parse(
        "import torch\n"
        "import torch.nn.functional as F\n"
        "from torch import Tensor\n"
        "from torch.utils._pytree import tree_map\n"
        "aten = torch.ops.aten\n"
        "layer._own, torch.__version__\n"
        "torch._C.f, F._g, Tensor._h, aten._i.default\n"
    )
    assert private_parts_of_torch(tree) == [
        "torch.Tensor._h",
        "torch._C",
        "torch._C.f",
        "torch.nn.functional._g",
        "torch.ops.aten._i",
        "torch.ops.aten._i.default",
        "torch.utils._pytree.tree_map",
    ]


# ---- one description, one list of stages -------------------------------------------------------

# Operand bundles of one product: an attention matrix, and what a kernel or a ring takes of it.
OPERANDS = {
    "src/headwise/matrix/operator.py",
    "src/headwise/matrix/kernels/kernel.py",
    "src/headwise/sharding/sequence/scores.py",
}
DESCRIPTION, ARITHMETIC = "src/headwise/function/spec.py", "src/headwise/function/stages.py"


def fields_of(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def test_one_class_has_the_settings_of_an_attention() -> None:
    """A dataclass with a scale and a softcap describes an attention: `AttentionSpec` does."""
    described = {
        (name_of(path), node.name)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        and {"scale", "softcap"} <= fields_of(node)
    }
    assert {pair for pair in described if pair[0] not in OPERANDS} == {
        (DESCRIPTION, "AttentionSpec")
    }


def test_one_list_has_the_stages() -> None:
    """Other modules name single stages, or map them; none lists them again."""
    stages = {*import_module("headwise.function.records").STAGES}
    lists = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len(stages & {each.value for each in node.elts if isinstance(each, ast.Constant)}) > 7
    }
    assert lists <= {ARITHMETIC}


# Projections, biases, norms and extra keys; "sink" and "distances" are words of options too.
CANONICAL = {*import_module("headwise.function.weights").AXES} - {"sink", "distances"}
# Rooms and files that name a canonical tensor outside function/ and layouts/ -> the reason.
NAMING = {
    "diagnosis/causes/heads.py": "heads that the output projection lacks",
    "diagnosis/causes/norms.py": "a norm of values, read off one token through two projections",
    "diagnosis/causes/weights.py": "causes of the gate",
    "diagnosis/explained.py": "the output projection has its rows as columns",
    "diagnosis/outputs/names.py": "the bias of the output has no heads",
    "diagnosis/outputs/reading.py": "values and output projection, solved for",
    "identify/moves": "the bias of the output has no heads; rows as a tensor of a layout",
    "layers/conversion.py": "sizes of a layer",
    "study/questions/diagram.py": "a diagram of the matrices",
    "surgery": "heads of keys, values and output are cut, merged and fitted by their role",
}


ROOMS_OF_NAMES = ("function", "layouts")
# Tables by stage that are no properties of stages.
TABLES = {
    "study/questions/gradients.py": "roles in a picture",
    "study/trace.py": "names of a trace",
}


def canonical_names(tree: ast.AST) -> list[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({value for value in constants if isinstance(value, str)} & CANONICAL)


def tables_by_stage(tree: ast.Module) -> list[str]:
    """Dicts of a module, of no function, with two stages among their keys."""
    stages = {*import_module("headwise.function.records").STAGES}
    tables = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    return [
        f"line {node.lineno}"
        for table in tables
        for node in ast.walk(table)
        if isinstance(node, ast.Dict)
        and len(stages & {key.value for key in node.keys if isinstance(key, ast.Constant)}) > 1
    ]


def test_tensors_and_stages_are_named_by_the_function_and_by_layouts() -> None:
    """A new tensor or stage is a row there, and no other file has a list of its own."""
    others = [path for path in SOURCES if path.relative_to(SOURCE).parts[0] not in ROOMS_OF_NAMES]
    naming = {name.removeprefix("src/headwise/") for name in broken(canonical_names, others)}
    rooms = {name: next((x for x in NAMING if name.startswith(x)), name) for name in naming}
    assert {*rooms.values()} == {*NAMING}
    tables = {name.removeprefix("src/headwise/") for name in broken(tables_by_stage, others)}
    assert tables == {*TABLES}


# ---- one allowance -------------------------------------------------------------------------------

ALLOWANCE = "src/headwise/function/rounding.py"
# Formulas with a unit of rounding that do not say whether two runs part.
NO_RUNS = {
    "src/headwise/diagnosis/unseen.py": "values of one run that are equal over tokens",
    "src/headwise/diagnosis/causes/weights.py": "the rank of a matrix",
    "src/headwise/scanning/context.py": "whether factors of one run are those of a norm",
    "src/headwise/scanning/links.py": "the rounding of stored shares",
    "src/headwise/surgery/merge.py": "sums of the same costs in another order",
    "src/headwise/surgery/maps.py": "the rank of a matrix",
    "src/headwise/study/conventions.py": "sums of rows of one run",
    "src/headwise/study/questions/diagram.py": "sums of rows of one run",
    "src/headwise/study/questions/gradients.py": "ranks, and weights that are moved on purpose",
}


def units_of_rounding(tree: ast.AST) -> list[str]:
    """Return where a module takes the distance of neighbouring numbers of a dtype."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("eps", "resolution"))
        and "finfo" in ast.unparse(node.value)
    ]


def test_one_module_says_how_far_two_runs_may_part() -> None:
    """Budget, compare, verify, detect and capture ask it: none has a tolerance of its own."""
    found = {name_of(path) for path in SOURCES if units_of_rounding(tree_of(path))}
    assert found == {ALLOWANCE, *NO_RUNS}
