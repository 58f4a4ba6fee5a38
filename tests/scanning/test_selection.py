"""Options that name several things take a single one; what they do not take is said shortly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headwise.errors import OptionError
from headwise.models import tiny
from headwise.scanning._scan import scan
from headwise.scanning.importance import ablations, gradients, mean_outputs
from headwise.scanning.inputs import ModelInput, require_valid_token_ids
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import (
    normalise_heads_option,
    normalise_layers_option,
    normalise_token_ids_option,
    select_statistics,
)
from headwise.scanning.statistics.catalogue import find_standard_statistics
from headwise.scanning.statistics.maps import TopKeysOfChosenQueries
from tests.quick import others_slow
from tests.scanning.models import BATCH, LENGTH, VOCABULARY, bert, own, tokens
from tests.scanning.scans import standard

# As for users, for whom the library's own refusal speaks.
pytestmark = pytest.mark.usefixtures("shapes_unchecked")
EPS = torch.finfo(torch.float32).eps
LONGEST = 1000  # characters of a message


def test_one_name_is_one() -> None:
    model, ids = own().double(), tokens(BATCH, LENGTH)
    whole = scan(model, ids, statistics=["previous_token"])
    part = scan(model, ids, statistics="previous_token", layers="blocks.1", heads=3)
    assert (part.layers, part.layer_scans[0].heads) == (("blocks.1",), (3,))
    # One head and all heads may round differently, in float64 by far less than float32's EPS.
    torch.testing.assert_close(
        part["previous_token"][0, 3], whole["previous_token"][1, 3], rtol=EPS, atol=EPS
    )
    assert scan(model, ids, statistics=standard("entropy")).names == ("entropy",)
    assert normalise_token_ids_option("separators", 7) == (7,)
    assert TopKeysOfChosenQueries(queries=-2).queries == (-2,)


@pytest.mark.parametrize("measure", [gradients, ablations])
def test_one_layer_of_importance(measure: Callable[..., Any]) -> None:
    def loss(output: Tensor, _: Any) -> Tensor:
        return output.square().sum((-1, -2))

    model, ids = own(), tokens(BATCH, LENGTH)
    assert measure(model, ids, loss=loss, layers="*.1").layers == ("blocks.1",)
    assert list(mean_outputs(model, ids, layers="*.1")) == ["blocks.1"]


def test_numbers_of_any_kind_and_each_once() -> None:
    assert normalise_heads_option(torch.tensor([3, 1])) == (3, 1)
    assert normalise_heads_option(torch.tensor(3)) == (3,)
    assert normalise_heads_option([2, 0, 2]) == (2, 0)
    assert normalise_heads_option(range(3)) == (0, 1, 2)
    assert normalise_heads_option(None) is normalise_layers_option(None) is None


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (lambda: normalise_heads_option("13"), "heads='13'"),
        (lambda: normalise_heads_option([]), r"heads=\[\], which names no head"),
        (lambda: normalise_heads_option([1.0]), r"heads=\[1.0\]"),
        (lambda: normalise_heads_option(True), "heads=True"),
        (lambda: normalise_heads_option(object()), "heads=<object"),  # type: ignore[arg-type]
        (lambda: normalise_layers_option([3]), r'layers=\[3\][\s\S]*layers="\*\.3\.\*"'),  # type: ignore[list-item]
        (lambda: normalise_layers_option(3), "layers=3"),  # type: ignore[arg-type]
        (
            lambda: normalise_token_ids_option("separators", "."),
            r"separators='\.'[\s\S]*convert_tokens_to_ids",
        ),
        (
            lambda: select_statistics([TopKeysOfChosenQueries]),  # type: ignore[list-item]
            r"do: +TopKeysOfChosenQueries\(\), an object",
        ),
        (lambda: select_statistics(3), "statistics=3"),  # type: ignore[arg-type]
        (lambda: normalise_layers_option(b"x"), "layers=b'x'"),  # type: ignore[arg-type]
        (lambda: select_statistics(b"entropy"), "statistics=b'entropy'"),  # type: ignore[arg-type]
        (lambda: select_statistics([3]), "statistics with 3"),  # type: ignore[list-item]
        (
            lambda: find_standard_statistics(["entropie"]),
            r"'entropie'[\s\S]*do: +'entropy' is the nearest",
        ),
        (lambda: find_standard_statistics(["zzz"]), "a Statistic of your own"),
    ],
)
def test_what_names_nothing(select: Callable[[], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        select()


def test_the_nearest_layer_is_named() -> None:
    with pytest.raises(OptionError, match=r"do: +'blocks\.1', the nearest name"):
        scan(own(), tokens(BATCH, LENGTH), layers="block.1")


# ---- models and inputs -------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [scan, gradients, ablations, mean_outputs])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("gpt2", r"model='gpt2', which is a name[\s\S]*AutoModel\.from_pretrained\('gpt2'\)"),
        (Path("a"), "which is a name"),
        (torch.zeros(2, 3), r"shape \(2, 3\), which is no model[\s\S]*the model first"),
        (tiny.Tiny, r"a class[\s\S]*e\.g\. Tiny\("),
    ],
)
def test_a_model_is_loaded_first(measure: Callable[..., Any], model: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        measure(model, tokens(BATCH, LENGTH))


@pytest.mark.parametrize("make", [bert, own])
@pytest.mark.parametrize("measure", [scan, gradients])
def test_one_sequence_is_a_batch_of_one(
    measure: Callable[..., Any], make: Callable[[], Any]
) -> None:
    with pytest.raises(OptionError, match=rf"shape \({LENGTH},\)[\s\S]*ids\[None\] for one"):
        measure(make(), tokens(LENGTH))


@pytest.mark.parametrize("make", [bert, own])
def test_there_are_tokens(make: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match=r"token ids of shape \(1, 0\): there are none"):
        scan(make(), tokens(1, 0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": [1, 2, 3]}, "return_tensors"),
        ([1, 2, 3], r"torch\.tensor\(\[ids\]\)"),
        ("a text", "return_tensors"),
    ],
)
def test_tokens_are_a_tensor(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        scan(bert(), given)


@pytest.mark.parametrize("measure", [scan, mean_outputs])
@pytest.mark.parametrize("given", [{}, (), [()]])
def test_there_is_an_input(measure: Callable[..., Any], given: Any) -> None:
    with pytest.raises(OptionError, match="an input without arguments"):
        measure(own(), given)


def test_a_function_without_arguments_has_empty_inputs() -> None:
    q = torch.randn(1, 2, 5, 4)
    assert scan(lambda: functional.scaled_dot_product_attention(q, q, q), ()).tokens == 5


@pytest.mark.parametrize("option", ["call", "progress"])
def test_what_is_called_is_a_function(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option}=3[\\s\\S]*{option}=lambda"):
        scan(own(), tokens(BATCH, LENGTH), **{option: 3})


@pytest.mark.parametrize("n", [1.5, "3", None, -1])
def test_top_takes_how_many(n: Any) -> None:
    found = scan(own(), tokens(BATCH, LENGTH), statistics="entropy")
    with pytest.raises(OptionError, match=r"^n="):
        found.top("entropy", n)


def test_a_scan_is_kept_under_a_name(tmp_path: Path) -> None:
    found = scan(own(), tokens(BATCH, LENGTH), statistics="entropy")
    for name in ("a\0b", "a" * 5000):
        with pytest.raises(OptionError, match="needed"):
            found.save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    path = found.save(tmp_path / "a")
    with pytest.raises(OptionError, match="statistics with 'e'"):
        HeadScan.load(path, statistics="entropy")  # type: ignore[arg-type]


@pytest.mark.parametrize("measure", [gradients, ablations])
def test_a_loss_is_a_function(measure: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="loss=3"):
        measure(own(), tokens(BATCH, LENGTH), loss=3)


def test_a_scan_is_merged_and_compared_with_scans() -> None:
    found = scan(own(), tokens(BATCH, LENGTH), statistics="entropy")
    for put_together in (found.merge, found.diff):
        with pytest.raises(OptionError, match="None instead of a scan"):
            put_together(None)  # type: ignore[arg-type]


def test_no_tokenizer_is_blamed_where_there_may_be_none() -> None:
    with pytest.raises(OptionError) as refused:
        require_valid_token_ids(bert(), ModelInput((torch.tensor([[5, VOCABULARY]]),), {}))
    assert refused.value.do.startswith("check where the ids come from")


@pytest.mark.parametrize(
    "options",
    others_slow(
        [
            {"layers": ["a" * 10**5] * 50},
            {"heads": range(10**5)},
            {"heads": "1" * 10**5},
            {"statistics": "entropy" * 10**5},
            {"separators": "." * 10**5},
            {"inputs": [[0] * 10**5] * 20},
            {"inputs": {"input_ids": [[0] * 10**5]}},
            {"model": "m" * 10**5},
            {"model": torch.zeros(10**5)},
        ]
    ),
)
def test_no_message_prints_what_was_given(options: dict[str, Any]) -> None:
    given = {"model": own(), "inputs": tokens(BATCH, LENGTH), "statistics": "entropy"}
    with pytest.raises(OptionError) as refused:
        scan(**{**given, **options})
    assert len(str(refused.value)) < LONGEST


@pytest.mark.parametrize(
    "heads",
    [torch.tensor([True, False]), torch.tensor(True), torch.tensor([[0, 1]]), torch.ones(2)],
)
def test_a_tensor_of_other_numbers_names_no_heads(heads: Tensor) -> None:
    with pytest.raises(OptionError, match="heads="):
        normalise_heads_option(heads)
