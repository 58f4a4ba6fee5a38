"""A padding mask of the reverse polarity: the drop-in warns where a whole sequence is hidden."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, AttentionMatrix, Mask, MultiheadAttention, upgrade
from headwise.errors import PolarityWarning

BATCH, LENGTH, EMBED, HEADS = 3, 7, 12, 4
X = torch.randn(BATCH, LENGTH, EMBED)
# As a tokenizer of Hugging Face gives it: 1 = real. Read by torch's convention, the longest
# sequence is hidden from end to end.
ATTENTION_MASK = (torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 2])[:, None]).long()
REVERSED = ATTENTION_MASK.bool()


def layer() -> MultiheadAttention:
    return MultiheadAttention(EMBED, HEADS, batch_first=True).eval()


def warned(run: Callable[[], object]) -> list[str]:
    """The first line of each warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    assert all(warning.category is PolarityWarning for warning in found)
    return [str(warning.message).splitlines()[0] for warning in found]


def attend(module: nn.Module, padding: Tensor, x: Tensor = X) -> Callable[[], object]:
    return lambda: module(x, x, x, key_padding_mask=padding)


def test_a_reversed_mask_is_noticed_once_for_each_layer() -> None:
    first, second = layer(), layer()
    line = (
        "key_padding_mask of shape (3, 7) hides every key of sequence 0, but not of every sequence"
    )
    assert warned(attend(first, REVERSED)) == [line]
    assert warned(attend(first, REVERSED)) == []
    assert warned(attend(second, REVERSED)) == [line]


def test_the_message_has_the_mend() -> None:
    with pytest.warns(PolarityWarning, match="key_padding_mask=attention_mask == 0"):
        layer()(X, X, X, key_padding_mask=REVERSED)
    assert warned(attend(layer(), ATTENTION_MASK == 0)) == []  # and the mend is one


def test_the_encoder_of_torch_passes_floats() -> None:
    options = {"dim_feedforward": 5, "dropout": 0.0, "batch_first": True}
    block = nn.TransformerEncoderLayer(EMBED, HEADS, **options).eval()  # type: ignore[arg-type]
    upgrade(block)
    assert len(warned(lambda: block(X, src_key_padding_mask=REVERSED))) == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_copy_has_warned_where_its_original_has(
    copied: Callable[[MultiheadAttention], MultiheadAttention],
) -> None:
    original = layer()
    before = copied(original)
    assert len(warned(attend(original, REVERSED))) == 1
    assert warned(attend(copied(original), REVERSED)) == []
    assert len(warned(attend(before, REVERSED))) == 1
    assert original.state_dict().keys() == before.state_dict().keys()


def test_what_is_no_sign_of_it() -> None:
    hidden, ours = torch.ones(BATCH, LENGTH, dtype=torch.bool), layer()
    assert warned(attend(ours, ATTENTION_MASK == 0)) == []
    assert warned(attend(ours, hidden)) == []  # all are hidden: of a batch without tokens
    assert warned(attend(ours, ~hidden)) == []
    assert warned(attend(ours, hidden[0], X[0])) == []  # one sequence, without a batch
    assert warned(attend(ours, hidden.float().masked_fill(hidden, -1e9))) == []  # a number
    assert warned(attend(ours.to("meta"), REVERSED.to("meta"), X.to("meta"))) == []  # no values
    assert not ours._has_warned


def test_lengths_of_zero_are_meant() -> None:
    mask = Mask.lengths(keys=torch.tensor([0, 4, 7]))
    q = torch.randn(BATCH, HEADS, LENGTH, 3)
    assert warned(lambda: AttentionMatrix(q, q, mask=mask).dense()) == []
    assert warned(lambda: Attention(EMBED, HEADS)(X, mask=mask)) == []
