"""A long window and a large softcap that a function alone has show in further inputs."""

import pytest
import torch
from torch import Tensor

import headwise
from headwise import Attention, Mask, Rotary
from tests.diagnosis.among import compare_among

WIDTH, HEADS = 24, 3


def pair(known: dict[str, object], other: dict[str, object]) -> tuple[Attention, Attention]:
    torch.manual_seed(0)
    first, second = (
        Attention(WIDTH, HEADS, rotary=Rotary(), **each)  # type: ignore[arg-type]
        for each in (known, other)
    )
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize(
    ("known", "other", "name", "parameters"),
    [
        ((None, 0), (99, 0), "window unexpected", {"window": 100}),
        (None, (80, 80), "window unexpected", {"window": (80, 80)}),
        pytest.param(
            (50, 0), (99, 0), "window off by one", {"window": 100}, marks=pytest.mark.slow
        ),
        pytest.param((50, 0), (None, 0), "window missing", {}, marks=pytest.mark.slow),
    ],
)
def test_a_window_of_more_keys_than_usual_inputs_have(
    known: object, other: object, name: str, parameters: dict[str, object]
) -> None:
    layer, windowed = pair({"window": known}, {"window": other})
    diagnosis = headwise.compare(lambda x: windowed(x), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert (cause.name, cause.parameters) == (name, parameters)
    assert cause.place == ("where keys are hidden" if known else "")  # a window goes by words


@pytest.mark.slow
def test_a_softcap_that_only_large_scores_reach() -> None:
    layer, capped = pair({}, {"softcap": 100.0})
    diagnosis = headwise.compare(lambda x: capped(x), layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == "softcap"
    assert cause.parameters["softcap"] == pytest.approx(100.0, rel=1e-3)


def test_a_function_that_takes_few_tokens_is_the_same() -> None:
    layer, _ = pair({}, {})

    def short(x: Tensor) -> Tensor:
        assert x.shape[1] <= 64, "more tokens than the block"
        return layer(x)

    assert headwise.compare(short, layer)


MASKS = {
    "of each head": lambda mask: mask,
    "of the first head, for all": lambda mask: mask[:, :1],
    "of the first head, by its number": lambda mask: mask[:, 0],
    "without an axis of heads": lambda mask: mask.reshape(len(mask), *mask.shape[2:]),
}


@pytest.mark.parametrize("words", MASKS)
def test_a_mask_for_each_head(words: str) -> None:
    layer, _ = pair({}, {})

    def port(x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return layer(x)
        read = MASKS[words](mask)
        axes = "batch heads queries keys" if read.dim() == 4 else "batch queries keys"
        read = read.expand(len(x), *[HEADS] * (read.dim() == 4), x.shape[1], -1)
        return layer(x, mask=Mask.may_attend(read, axes=axes))

    diagnosis = compare_among(
        ["one head for all heads", "window missing"], port, layer, further=True
    )
    assert diagnosis.function is not None
    if words == "of the first head, for all":
        [cause] = diagnosis.function.causes
        assert cause.parameters == {"of": "the mask", "head": 0}
        return
    assert diagnosis
    is_seen, is_read = words == "of each head", words == "of the first head, by its number"
    assert ("under a mask for each head" in str(diagnosis)) == is_seen
    assert ("it reads the mask of the first head" in str(diagnosis)) == is_read
    beyond = "a window or a base of the rotation that changes with the length beyond 259 keys"
    unseen = beyond if is_seen else f"{beyond}, and a mask for each head"
    assert f"not seen: {unseen}\n" in str(diagnosis)


@pytest.mark.slow
def test_what_is_unknown_in_long_inputs_is_not_the_same() -> None:
    layer, _ = pair({}, {})

    def odd(x: Tensor) -> Tensor:
        return layer(x) + (0.1 * x if x.shape[1] > 100 else 0.0)

    diagnosis = headwise.compare(odd, layer)
    assert str(diagnosis.verdict) == "unknown cause"
    assert diagnosis.function is not None
    assert "259 random tokens" in diagnosis.function.probes
