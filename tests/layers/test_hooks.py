"""Layers show what they compute, to the watcher of the running context and to nobody else."""

import threading

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, AttentionMatrix, Mask, MultiheadAttention
from headwise.layers.hooks import attention_hook, has_attention_hook
from headwise.study.implementations import EinopsPostNormBlock
from tests.test_door import printed_by

BATCH, LENGTH, WIDTH, HEADS = 2, 11, 24, 3


class Seen:
    """Keeps what it is shown, and gives back what it was made to."""

    def __init__(self, factor: float | None = None) -> None:
        self.calls: list[tuple[AttentionMatrix, Tensor, Tensor]] = []
        self.factor = factor

    def __call__(self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
        self.calls.append((matrix, v, outputs))
        return outputs if self.factor is None else outputs * self.factor


def native() -> nn.Module:
    return Attention(WIDTH, HEADS)


class DropIn(nn.Module):
    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.attention = MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]

    @property
    def out_proj(self) -> nn.Module:
        return self.attention.out_proj


class Einops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EinopsPostNormBlock(WIDTH, HEADS, head_dim=8, value_dim=8, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, x, x)


MAKERS = [
    native,
    lambda: DropIn(need_weights=False),
    lambda: DropIn(need_weights=True),
    Einops,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("grad", [False, True])
def test_every_layer_shows_its_matrix_values_and_outputs(make: type, grad: bool) -> None:
    layer, seen = make(), Seen()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.set_grad_enabled(grad):
        alone = layer(x)
        with attention_hook(seen):
            shown = layer(x)
    torch.testing.assert_close(shown, alone, rtol=0, atol=0)
    [(matrix, v, outputs)] = seen.calls
    assert matrix.shape == (BATCH, HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(outputs, matrix @ v)


@pytest.mark.parametrize("make", MAKERS)
def test_a_layer_goes_on_with_what_the_watcher_gives_back(make: type) -> None:
    layer = make()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        whole = layer(x)
        with attention_hook(Seen(0.0)):
            without = layer(x)
    assert not torch.equal(whole, without)
    if not isinstance(layer, Einops):  # which adds its input and normalises
        out_proj = layer.out_proj
        assert isinstance(out_proj, nn.Module)
        expected = out_proj(torch.zeros(BATCH, LENGTH, WIDTH))
        torch.testing.assert_close(without, expected, rtol=0, atol=0)


def test_nobody_is_shown_anything_afterwards_also_after_an_exception() -> None:
    seen = Seen()
    with attention_hook(seen):
        assert has_attention_hook()

    def fail() -> None:
        with attention_hook(seen):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not has_attention_hook()
    native()(torch.randn(BATCH, LENGTH, WIDTH))
    assert seen.calls == []


def test_the_inner_watcher_is_the_one_that_is_told() -> None:
    outer, inner = Seen(), Seen()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with attention_hook(outer):
        with attention_hook(inner):
            native()(x)
        native()(x)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)


def test_other_threads_are_not_watched() -> None:
    found = []
    with attention_hook(Seen()):
        thread = threading.Thread(target=lambda: found.append(has_attention_hook()))
        thread.start()
        thread.join()
    assert found == [False]


def test_a_watcher_is_shown_padded_tokens_where_they_were_given() -> None:
    layer, seen = Attention(WIDTH, HEADS).eval(), Seen()
    x, lengths = torch.randn(BATCH, 700, WIDTH), torch.tensor([700, 30])
    mask = Mask.lengths(keys=lengths, queries=lengths)
    with torch.no_grad():
        packed = layer(x, mask=mask)
        with attention_hook(seen):
            whole = layer(x, mask=mask)
    assert seen.calls[0][0].shape == (BATCH, HEADS, 700, 700)
    torch.testing.assert_close(whole, packed)


COMPILED = """
import torch
from headwise import Attention
from headwise.layers.hooks import attention_hook
layer, calls = Attention(24, 3).eval(), []
def seen(matrix, v, outputs):
    calls.append(matrix)
    return outputs * 0
compiled = torch.compile(layer, backend="eager", fullgraph=True)
x = torch.randn(2, 11, 24)
with torch.no_grad():
    whole = layer(x)
    with attention_hook(seen):
        watched = compiled(x)
print(len(calls), torch.equal(watched, whole))
"""


@pytest.mark.extra
def test_a_compiled_graph_shows_nothing() -> None:
    # In an interpreter of its own: the checks of shapes cannot be compiled.
    assert printed_by(COMPILED).split() == ["0", "True"]
