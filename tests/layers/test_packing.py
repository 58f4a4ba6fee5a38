"""Padded and packed batches: only real tokens are computed, and the function stays the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary, ScoreBias
from headwise.layers.distance import Alibi
from headwise.matrix.kernels import dense, varlen
from tests.layers.test_options import bound

BATCH, LENGTH, SOURCE, EMBED = 5, 48, 57, 64
LENGTHS = torch.tensor([48, 7, 0, 13, 1])
KEYS = torch.tensor([57, 3, 20, 0, 9])
SEGMENTS = torch.tensor([[4] * 20 + [-1] * 10 + [0] * 18, [1] * 9 + [-1] * 39]).repeat(3, 1)[:5]


def tokens_seen(layer: Attention, *inputs: Tensor, **options: Any) -> dict[str, tuple[int, ...]]:
    """What shape each projection was called with."""
    seen: dict[str, tuple[int, ...]] = {}
    hooks = [
        getattr(layer, name).register_forward_hook(
            lambda _, given, __, name=name: seen.update({name: tuple(given[0].shape)})
        )
        for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    ]
    layer(*inputs, **options)
    for hook in hooks:
        hook.remove()
    return seen


def made(**options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = Attention(EMBED, 4, num_kv_heads=2, **options, dtype=torch.float64)
    torch.nn.init.normal_(layer.out_proj.bias)
    return layer, torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64, requires_grad=True)


SELF = {
    "lengths": ({}, Mask.lengths(queries=LENGTHS, keys=LENGTHS), 69),
    "causal, rotary": (
        {"rotary": Rotary()},
        Mask.lengths(queries=LENGTHS, keys=LENGTHS) & Mask.causal(),
        69,
    ),
    "window, alibi": (
        {"window": (9, 3), "score_bias": Alibi()},
        Mask.lengths(queries=LENGTHS, keys=LENGTHS),
        69,
    ),
    "left-padded": (
        {"rotary": Rotary(), "window": (9, 0)},
        Mask.lengths(queries=LENGTHS, keys=LENGTHS, side="left"),
        69,
    ),
    "segments": ({"rotary": Rotary()}, Mask.segments(SEGMENTS), 3 * 38 + 2 * 9),
    "segments, lengths": (
        {},
        Mask.segments(SEGMENTS) & Mask.lengths(queries=LENGTHS, keys=LENGTHS),
        38 + 7 + 0 + 9 + 1,
    ),
}


@pytest.fixture
def packs_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "CALL", 1)


@pytest.mark.parametrize("gate", [None, (4,), (BATCH, 4)], ids=str)
@pytest.mark.parametrize(("options", "mask", "real"), SELF.values(), ids=SELF)
def test_packed_is_padded(
    options: dict[str, Any],
    mask: Mask,
    real: int,
    gate: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = made(**options)
    call: dict[str, Any] = {"mask": mask}
    if gate is not None:
        call["gate"] = torch.rand(gate, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    leaves = [x, *layer.parameters(), *([call["gate"]] if gate is not None else [])]
    found = []
    for worth in (1, 2**60):
        monkeypatch.setattr(varlen, "CALL", worth)
        out = layer(x, **call)
        found.append([out, *torch.autograd.grad(out, leaves, direction)])
        seen = tokens_seen(layer, x, **call)
        expected = (1, real, EMBED) if worth == 1 else (BATCH, LENGTH, EMBED)
        assert seen["q_proj"] == seen["v_proj"] == expected
        # One token more, of zeros: its output is that of the padding.
        assert seen["out_proj"][1] == (real + 1 if worth == 1 else LENGTH)
    for packed, padded in zip(*found, strict=True):
        tolerance = BATCH * LENGTH * bound(layer, padded, torch.float64)
        assert (packed - padded).abs().max() <= tolerance


@pytest.mark.usefixtures("packs_always")
def test_cross_attention_packs_both_sides() -> None:
    layer, x = made(source_dim=33)
    source = torch.randn(BATCH, SOURCE, 33, dtype=torch.float64)
    mask = Mask.lengths(queries=LENGTHS, keys=KEYS)
    seen = tokens_seen(layer, x, source, mask=mask)
    # Sequences without a query or without a key are left out.
    assert seen["q_proj"] == (1, 48 + 7 + 1, EMBED)
    assert seen["k_proj"] == (1, 57 + 3 + 9, 33)
    found = layer(x, source, mask=mask)
    for row in range(BATCH):
        n, m = int(LENGTHS[row]), int(KEYS[row])
        alone = layer(x[row : row + 1, :n], source[row : row + 1, :m])
        tolerance = bound(layer, found, torch.float64)
        assert torch.all((found[row, :n] - alone[0]).abs() <= tolerance)
        assert torch.equal(found[row, n:], layer.out_proj.bias.expand(LENGTH - n, -1))


@pytest.mark.usefixtures("packs_always")
@pytest.mark.parametrize(
    "call",
    [
        {"mask": Mask.lengths(keys=LENGTHS)},
        {"mask": Mask.lengths(queries=LENGTHS)},
        {"mask": Mask.lengths(queries=LENGTHS, keys=LENGTHS.clamp(max=12))},
        {"mask": Mask.segments(SEGMENTS, SEGMENTS.flip(1))},
        {
            "mask": Mask.lengths(queries=LENGTHS, keys=LENGTHS)
            & Mask.may_attend(torch.ones(BATCH, LENGTH, dtype=torch.bool), axes="batch keys")
        },
        {
            "mask": Mask.lengths(queries=LENGTHS, keys=LENGTHS)
            & Mask.may_attend(torch.ones(4, LENGTH, LENGTH).bool(), axes="heads queries keys")
        },
        {
            "mask": Mask.lengths(queries=LENGTHS, keys=LENGTHS),
            "score_bias": ScoreBias.dense(torch.zeros(LENGTH).double(), axes="keys"),
        },
    ],
    ids=[
        "keys",
        "queries",
        "fewer keys",
        "other keys",
        "dense mask",
        "dense mask of heads",
        "dense bias",
    ],
)
def test_what_is_not_packed(call: dict[str, Any]) -> None:
    """Where not the same tokens are queries and keys, or a clause names their places."""
    layer, x = made()
    assert tokens_seen(layer, x, **call)["q_proj"] == (BATCH, LENGTH, EMBED)


def test_nothing_is_packed_for_little() -> None:
    layer, x = made()
    mask = Mask.lengths(queries=LENGTHS, keys=LENGTHS)
    assert tokens_seen(layer, x, mask=mask)["q_proj"] == (BATCH, LENGTH, EMBED)


@pytest.mark.usefixtures("packs_always")
def test_a_batch_without_a_real_token() -> None:
    layer, x = made()
    none = torch.zeros(BATCH, dtype=torch.long)
    out = layer(x, mask=Mask.lengths(queries=none, keys=none))
    assert torch.equal(out, layer.out_proj.bias.expand_as(out))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.usefixtures("packs_always")
def test_a_packed_row_stays_packed_without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(rotary=Rotary())
    monkeypatch.setattr(Mask, "segments", None)
    row, offsets = x[:1], torch.tensor([0, 20, 20, 41])  # the last seven tokens are none
    mask = Mask.packed(offsets) & Mask.causal()
    assert tokens_seen(layer, row, mask=mask)["q_proj"] == (1, 41, EMBED)
    found = layer(row, mask=mask)
    for first, stop in ((0, 20), (20, 41)):
        alone = layer(row[:, first:stop], mask=Mask.causal())
        tolerance = LENGTH * bound(layer, alone, torch.float64)
        assert (found[:, first:stop] - alone).abs().max() <= tolerance
    assert torch.equal(found[0, 41:], layer.out_proj.bias.expand(7, -1))


@pytest.mark.usefixtures("packs_always")
def test_dropout_drops_within_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dropout writes is queries x keys of each sequence, not of the packed row."""
    layer, x = made(dropout=0.5, softcap=4.0)
    mask = Mask.lengths(queries=LENGTHS, keys=LENGTHS)
    shapes: list[tuple[int, ...]] = []
    drop = dense.dropout
    monkeypatch.setattr(dense, "dropout", lambda w, p: shapes.append(w.shape) or drop(w, p))
    dropped = layer.train()(x, mask=mask)
    assert shapes == [(1, 4, n, n) for n in (48, 7, 13, 1)]
    assert "dropout in training allocates queries x keys" in str(layer.explain(x, mask=mask))
    assert torch.equal(dropped[1, 7:], layer.out_proj.bias.expand(41, -1))
    assert not torch.equal(dropped, layer.eval()(x, mask=mask))
