"""Functions as users write them: other axes, masks, results, dtypes and lengths than usual.

Each is compared, or refused with a sentence that helps.
"""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import Attention, compare
from headwise.diagnosis.probes import SIDES
from headwise.diagnosis.simulation.model import Inputs
from headwise.errors import OptionError
from headwise.identify.results import Verdict
from tests.diagnosis.test_stopped import interrupt_at
from tests.quick import others_slow

WIDTH, HEADS, HEAD_DIM = 40, 5, 8
torch.manual_seed(0)
LAYER = Attention(WIDTH, HEADS)
CAUSAL = Attention(WIDTH, HEADS, window=(None, 0))
CAUSAL.load_state_dict(LAYER.state_dict())
WIDE, NARROW = copy.deepcopy(LAYER).double(), copy.deepcopy(LAYER).bfloat16()


def heads(x: Tensor, role: str) -> Tensor:
    projected: Tensor = getattr(LAYER, f"{role}_proj")(x)
    return projected.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)


def mix(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0) -> Tensor:
    weights = (q @ k.mT / math.sqrt(HEAD_DIM) + added).softmax(-1)
    output: Tensor = LAYER.out_proj((weights @ v).transpose(-2, -3).flatten(-2))
    return output


def attend(x: Tensor, added: Tensor | float = 0.0) -> Tensor:
    return mix(heads(x, "q"), heads(x, "k"), heads(x, "v"), added)


def hide(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def view_as_one_sequence(x: Tensor) -> Tensor:
    def split(role: str) -> Tensor:
        rows: Tensor = getattr(LAYER, f"{role}_proj")(x)
        return rows.view(1, x.shape[1], HEADS, HEAD_DIM).transpose(1, 2)

    return mix(split("q"), split("k"), split("v"))


def reshape_to_one_sequence(x: Tensor) -> Tensor:
    return attend(x.reshape(1, -1, WIDTH))


def causal_mask_of_eight(x: Tensor) -> Tensor:
    length, shown = x.shape[1], torch.ones(8, 8, dtype=torch.bool).tril()
    return attend(x, torch.zeros(length, length).masked_fill(~shown[:length, :length], -math.inf))


def table_of_sixteen(x: Tensor) -> Tensor:
    return attend(x + torch.zeros(16, WIDTH))


def tokens_by_width(x: Tensor) -> Tensor:
    _, _ = x.shape
    return attend(x)


def list_of_sequences(sequences: list[Tensor]) -> list[Tensor]:
    if not isinstance(sequences, list):
        raise TypeError("a list of sequences")
    return [attend(x) for x in sequences]


def channels_first(x: Tensor) -> Tensor:
    weights = LAYER.q_proj.weight[..., None]
    rows = F.conv1d(x, weights, LAYER.q_proj.bias).mT
    q = rows.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
    return mix(q, heads(x.mT, "k"), heads(x.mT, "v")).mT


def float64_array(x: np.ndarray) -> np.ndarray:
    assert isinstance(x, np.ndarray)
    assert x.dtype == np.float64
    output: np.ndarray = attend(torch.from_numpy(x).float()).numpy().astype(np.float64)
    return output


def query_key_value(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return mix(heads(query, "q"), heads(key, "k"), heads(value, "v"))


def query_and_context(x: Tensor, context: Tensor) -> Tensor:
    return mix(heads(x, "q"), heads(context, "k"), heads(context, "v"))


def output_and_weights(x: Tensor) -> tuple[Tensor, None]:
    return attend(x), None


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "batch of one": (view_as_one_sequence, "one sequence a call: x of shape (2, 11, 40) gives"),
    "batch as tokens": (reshape_to_one_sequence, "gives an output of shape (1, 22, 40)"),
    "block size": (causal_mask_of_eight, "sequences of 3 to 8 tokens: x of shape (2, 11, 40)"),
    "one length": (table_of_sixteen, "sequences of 16 tokens alone: x of shape (2, 11, 40) gives"),
    "no batch": (tokens_by_width, "one sequence a call, as (tokens, width): x of shape"),
    "list": (list_of_sequences, "a list of sequences: x of shape (2, 11, 40) gives TypeError"),
    "channels first": (channels_first, "(batch, width, tokens): x of shape (2, 11, 40) gives"),
    "float64 array": (float64_array, "float64 tokens: x of shape (2, 11, 40) gives Assertion"),
    "float64 module": (lambda x: WIDE(x), "float64 tokens: x of shape (2, 11, 40) gives DType"),
    "bfloat16 module": (lambda x: NARROW(x), "bfloat16 tokens: x of shape (2, 11, 40) gives"),
    "q, k, v": (query_key_value, ""),
    "context": (query_and_context, ""),
    "tuple": (output_and_weights, ""),
}


@pytest.mark.parametrize(
    "name", others_slow(FORMS, "batch of one", "no batch", "channels first", "list")
)
@torch.no_grad()
def test_inputs_of_another_form_are_tried_and_told(name: str) -> None:
    port, words = FORMS[name]
    diagnosis = compare(port, CAUSAL if port is causal_mask_of_eight else LAYER)
    assert diagnosis.verdict is Verdict.TO_ROUNDING, str(diagnosis)
    assert diagnosis.function is not None
    assert diagnosis.function.isolated[0].startswith("compared with") == bool(words)
    assert words in "; ".join(diagnosis.function.isolated)


# Sequences that come alone are many calls.
PARTS = [table_of_sixteen, pytest.param(view_as_one_sequence, marks=pytest.mark.slow)]


@pytest.mark.parametrize("port", PARTS)
@torch.no_grad()
def test_a_fault_shows_in_such_inputs(port: Callable[..., Any]) -> None:
    layer = Attention(WIDTH, HEADS, scale=0.5)
    layer.load_state_dict(LAYER.state_dict())
    function = compare(port, layer).function
    assert function is not None
    assert function.cause_names == ["scale"]


def takes_batch_by_keys(x: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        return attend(x)
    _, _ = mask.shape
    return attend(x, hide(mask)[:, None, None])


def takes_queries_by_keys(x: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is None or mask.shape[-2] == mask.shape[-1] == mask.numel() ** 0.5
    assert mask is None or mask.dim() == 2
    return attend(x, 0.0 if mask is None else hide(mask))


def takes_all_axes(x: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is None or mask.shape == (len(x), 1, x.shape[1], x.shape[1])
    return attend(x, 0.0 if mask is None else hide(mask))


def needs_a_mask(x: Tensor, mask: Tensor) -> Tensor:
    return attend(x, hide(mask))


def ignores_its_mask(x: Tensor, mask: Tensor | None = None) -> Tensor:
    assert mask is None or mask.dim() == 2
    return attend(x)


CAUSAL_MASK, PADDING = "under a causal mask", "under a mask of padding on the right"
MASKS = {
    takes_batch_by_keys: (PADDING,),
    takes_queries_by_keys: (CAUSAL_MASK,),
    takes_all_axes: (CAUSAL_MASK, PADDING),
    needs_a_mask: (CAUSAL_MASK, PADDING),
}


@pytest.mark.parametrize(
    "port", others_slow(MASKS, takes_batch_by_keys), ids=lambda port: port.__name__
)
@torch.no_grad()
def test_masks_of_other_shapes_are_tried(port: Callable[..., Any]) -> None:
    diagnosis = compare(port, LAYER)
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    probes = "; ".join(diagnosis.function.probes)
    assert tuple(words for words in (CAUSAL_MASK, PADDING) if words in probes) == MASKS[port]


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_of_another_shape_shows_a_fault() -> None:
    progress = interrupt_at("trying mask added as 0/1")  # which comes after it
    function = compare(ignores_its_mask, LAYER, progress=progress).function
    assert function is not None
    assert "padding ignored" in function.cause_names_with_equals[0]


@pytest.mark.slow
@torch.no_grad()
def test_code_for_arrays_may_run_on_tensors_until_it_meets_a_mask() -> None:
    def port(x: Any, mask: Any = None) -> Any:
        shown = None if mask is None else torch.from_numpy(mask.astype(np.float32))
        added = 0.0 if shown is None else torch.where(shown > 0, 0.0, -math.inf)
        return attend(torch.as_tensor(x), added)

    function = compare(port, LAYER).function
    assert function is not None
    assert "11 random tokens under a mask of padding on the right" in function.probes
    assert not any("compared with" in sentence for sentence in function.isolated)


@pytest.mark.parametrize("scale", [1.0, 1.3])
@torch.no_grad()
def test_code_that_reads_the_row_of_the_first_query_gets_masks_of_padding(scale: float) -> None:
    """It runs on any mask, and is right on those of padding alone."""

    def port(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return attend(scale * x, 0.0 if mask is None else hide(mask[:, 0, 0])[:, None, None])

    progress = interrupt_at("trying q and k exchanged")
    diagnosis = compare(port, LAYER, progress=progress)
    assert diagnosis.verdict.is_same == (scale == 1.0), str(diagnosis)
    assert "reads the row of the first query" in str(diagnosis)
    assert diagnosis.function is not None
    masked = [name for name in diagnosis.function.probes if "under a mask" in name]
    assert masked == [f"11 random tokens under a mask of padding on the {side}" for side in SIDES]


def hides_where_true(x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return attend(x, 0.0 if attn_mask is None else hide(~attn_mask))


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_of_another_name_is_not_guessed() -> None:
    function = compare(hides_where_true, LAYER).function
    assert function is not None
    assert "port(x, attn_mask=mask), ...), True attends" in function.unprobed[0]
    assert compare(lambda x, mask: hides_where_true(x, ~mask), LAYER)


def takes_a_config(x: Tensor, config: object) -> Tensor:
    del config
    return attend(x)


def needs_an_additive_mask(x: Tensor, attention_mask: Tensor) -> Tensor:
    return attend(x, attention_mask)


def takes_ids(x: Tensor) -> Tensor:
    return attend(F.embedding(x, torch.zeros(9, WIDTH)))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "config": (takes_a_config, "compare(lambda x: function(x, config), ...), with your values"),
    "additive mask": (needs_an_additive_mask, "torch.where(mask, 0.0, -torch.inf) where it is"),
    "dict": (lambda x: {"y": attend(x)}, "compare(lambda x: function(x)['y'], ...)"),
    "object": (lambda x: SimpleNamespace(last=attend(x)), "function(x).last, ...) selects one"),
    "weights first": (lambda x: (heads(x, "q"), attend(x)), "[1], ...) selects another output"),
    "changes x": (lambda x: attend(x.add_(1.0)), "compare(lambda x: function(x.clone()), ...)"),
    "ids": (takes_ids, "on such an input first; other lengths, types and axes fail too"),
    "device": (lambda x: attend(x.to("meta")), "on such an input first; other lengths"),
}


@pytest.mark.parametrize("name", others_slow(REFUSED, "config", "ids"))
@torch.no_grad()
def test_others_are_refused_with_a_step_that_helps(name: str) -> None:
    port, words = REFUSED[name]
    with pytest.raises(OptionError) as error:
        compare(port, LAYER)
    assert words in error.value.do, str(error.value)


@torch.no_grad()
def test_inputs_on_which_it_fails_are_left_out_and_told() -> None:
    def at_most_twenty(x: Tensor) -> Tensor:
        return attend(x + torch.zeros(20, WIDTH)[: x.shape[1]])

    function = compare(at_most_twenty, LAYER).function
    assert function is not None
    assert "40 random tokens" not in function.probes
    [words] = [each for each in function.unprobed if each.startswith("40 random tokens (")]
    assert "fails on x of shape (2, 40, 40) (RuntimeError: The size of tensor" in words


@torch.no_grad()
def test_your_inputs_take_another_form_too() -> None:
    x = torch.randn(3, 6, WIDTH)
    function = compare(tokens_by_width, lambda x: attend(x), x).function
    assert function is not None
    assert function.isolated[-1].startswith("compared with one sequence a call, as (tokens, width)")
    with pytest.raises(OptionError, match="other lengths"):
        compare(table_of_sixteen, LAYER, Inputs(x))


@pytest.mark.slow
@torch.no_grad()
def test_a_slow_function_is_run_on_each_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attentions", "probes", "subjects.function"):
        monkeypatch.setattr(f"headwise.diagnosis.{module}.SLOW", 0.0)
    calls: list[tuple[int, ...]] = []

    def slow(x: Tensor, mask: Tensor | None = None) -> Tensor:
        calls.append(tuple(x.shape))
        return attend(x, 0.0 if mask is None else hide(mask))

    said: list[str] = []
    diagnosis = compare(slow, LAYER, progress=lambda stage, *_: said.append(stage))
    assert diagnosis.verdict is Verdict.TO_ROUNDING
    assert diagnosis.function is not None
    assert len(calls) <= len(diagnosis.function.probes) + 5
    assert any("s a call, 10 calls are planned" in stage for stage in said)
