"""Lines on weights: each is run on the wrong weights, and gives the right ones."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.diagnosis.repairs.lines import translate
from headwise.diagnosis.repairs.rows import write_index, write_weight_lines

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WIDTH = 6, 2, 8, 5, 26
SHAPES = {"q": (HEADS, HEAD_DIM), "k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, VALUE_DIM)}
Flat = dict[str, Tensor]


def stored(seed: int = 0) -> Flat:
    """Return weights and biases as `torch.nn.Linear` holds them."""
    generator = torch.Generator().manual_seed(seed)
    flat = {f"w{r}": torch.randn(n * d, WIDTH, generator=generator) for r, (n, d) in SHAPES.items()}
    flat |= {f"b{r}": torch.randn(n * d, generator=generator) for r, (n, d) in SHAPES.items()}
    flat["wo"] = torch.randn(WIDTH, HEADS * VALUE_DIM, generator=generator)
    return {name: x.double() for name, x in flat.items()}


def canonical(flat: Flat) -> Flat:
    """Return them by head."""
    by_head = {
        f"{kind}{r}": flat[f"{kind}{r}"].unflatten(0, s) for r, s in SHAPES.items() for kind in "wb"
    }
    return {**by_head, "wo": flat["wo"].T.unflatten(0, (HEADS, VALUE_DIM))}


def run(lines: tuple[str, ...], flat: Flat, language: str) -> Flat:
    names = {n: x.numpy().copy() if language == "numpy" else x.clone() for n, x in flat.items()}
    exec("\n".join(translate(lines, language)), {"torch": torch, "np": np}, names)
    return {name: torch.as_tensor(names[name]) for name in flat}


def turn(flat: Flat, name: str, change: Callable[[Tensor], Tensor]) -> Flat:
    return {**flat, name: change(flat[name])}


def nest(x: Tensor, *sizes: int) -> Tensor:
    return x.unflatten(0, sizes).transpose(0, 1).flatten(0, 1)


def exchange(flat: Flat) -> Flat:
    return {**flat, "wk": flat["wv"], "wv": flat["wk"], "bk": flat["bv"], "bv": flat["bk"]}


def fuse(flat: Flat) -> Flat:
    """Rows by kv head, read as blocks."""
    group = HEADS // KV_HEADS
    fused = {}
    for kind in "wb":
        rows = torch.cat([flat[f"{kind}{role}"] for role in "qkv"])
        rows = rows.unflatten(0, (KV_HEADS, -1))
        parts = rows.split([group * HEAD_DIM, HEAD_DIM, VALUE_DIM], 1)
        fused |= {f"{kind}{r}": x.flatten(0, 1) for r, x in zip("qkv", parts, strict=True)}
    return {**flat, **fused}


FAULTS: dict[str, Callable[[Flat], Flat]] = {
    "interleaved": lambda flat: turn(flat, "wq", lambda x: nest(x, HEADS, HEAD_DIM)),
    "a bias alone": lambda flat: turn(flat, "bq", lambda x: nest(x, HEADS, HEAD_DIM)),
    "heads in another order": lambda flat: turn(
        flat, "wq", lambda x: x.unflatten(0, (HEADS, -1))[[3, 0, 1, 5, 4, 2]].flatten(0, 1)
    ),
    "channels of each head": lambda flat: turn(
        flat, "wq", lambda x: x.unflatten(0, (HEADS, -1))[:, [2, 0, 1, 3, 4, 5, 6, 7]].flatten(0, 1)
    ),
    "one head": lambda flat: turn(flat, "wk", lambda x: torch.cat([x[:8].flip(0), x[8:]])),
    "columns of the output": lambda flat: turn(flat, "wo", lambda x: nest(x.T, 2, 15).T),
    "reshaped": lambda flat: turn(flat, "wq", lambda x: x.T.reshape(x.shape)),
    "reshaped, the other way": lambda flat: turn(flat, "wq", lambda x: x.reshape(x.mT.shape).T),
    "reshaped output": lambda flat: turn(flat, "wo", lambda x: x.T.reshape(x.shape)),
    "sign": lambda flat: turn(flat, "wv", torch.neg),
    "sign of the output": lambda flat: turn(flat, "wo", torch.neg),
    "factor": lambda flat: turn(flat, "wk", lambda x: 0.3 * x),
    "factor of the output": lambda flat: turn(flat, "wo", lambda x: 0.3 * x),
    "a factor of each head": lambda flat: turn(
        flat,
        "wk",
        lambda x: (x.unflatten(0, (2, 8)) * torch.tensor([2.0, 3.0])[:, None, None]).flatten(0, 1),
    ),
    "two roles": lambda flat: turn(turn(flat, "wq", torch.neg), "bv", lambda x: 2 * x),
    "fused": fuse,
}


@pytest.mark.parametrize("language", ["torch", "numpy"])
@pytest.mark.parametrize("fault", FAULTS)
def test_lines_make_the_right_weights(fault: str, language: str) -> None:
    flat = stored()
    wrong = FAULTS[fault](flat)
    lines = write_weight_lines(canonical(wrong), canonical(flat))
    assert lines
    made = run(lines, wrong, language)
    for name, x in flat.items():
        torch.testing.assert_close(made[name], x, rtol=1e-11, atol=0.0)


def test_a_whole_role_is_exchanged() -> None:
    shapes = dict.fromkeys("qk", (HEADS, HEAD_DIM))
    generator = torch.Generator().manual_seed(0)
    right = {f"w{r}": torch.randn(*s, WIDTH, generator=generator) for r, s in shapes.items()}
    right |= {f"b{r}": torch.randn(*s, generator=generator) for r, s in shapes.items()}
    wrong = {"wq": right["wk"], "wk": right["wq"], "bq": right["bk"], "bk": right["bq"]}
    assert write_weight_lines(wrong, right) == ("wq, wk = wk, wq", "bq, bk = bk, bq")


LOST: dict[str, Callable[[Flat], Flat]] = {
    "the first head at every place": lambda flat: turn(flat, "wq", lambda x: x[:8].repeat(6, 1)),
    "zeros": lambda flat: turn(flat, "wv", torch.zeros_like),
    "rows of another layer": lambda flat: {**flat, "wk": stored(1)["wk"]},
    "rounded": lambda flat: turn(flat, "wk", lambda x: x.half().double()),
    "all in disorder": lambda flat: turn(flat, "wq", lambda x: x[torch.randperm(48)]),
}


@pytest.mark.parametrize("fault", LOST)
def test_there_is_no_line_for_numbers_that_are_lost_or_for_no_order(fault: str) -> None:
    flat = stored()
    assert write_weight_lines(canonical(LOST[fault](flat)), canonical(flat)) == ()


def test_equal_weights_have_no_line() -> None:
    assert write_weight_lines(canonical(stored()), canonical(stored())) == ()


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ([0, 1, 2, 3], "[*range(0, 4)]"),
        ([2, 0, 1], "[2, 0, 1]"),
        ([0, 2, 4, 1, 3, 5], "[*range(0, 5, 2), *range(1, 6, 2)]"),
        ([3, 2, 1, 0], "[*range(3, -1, -1)]"),
        ([1, 1, 1], "[1, 1, 1]"),
    ],
)
def test_an_index_in_code(index: list[int], text: str) -> None:
    assert write_index(index) == text
    assert eval(text) == index
