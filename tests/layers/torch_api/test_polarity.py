"""Masks of the reverse polarity: the drop-in warns, and its warning mends the call."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, AttentionMatrix, Mask, MultiheadAttention, upgrade
from headwise.errors import PolarityWarning
from headwise.layers import multi_head_attention_forward

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


TRIL = torch.ones(LENGTH, LENGTH).tril()
ALL, LOWER = TRIL >= 0, TRIL == 1
EVERY_KEY = "hides every key of every"
FIRST = "hides the first keys of every sequence, and shows the last"
PADDED = torch.arange(LENGTH) < torch.tensor([5, 4, 2])[:, None]  # every sequence is padded
EARLIER = "hides the key of each query and all before it, and so all of the last query"
ADDED = "holds 0 and 1 in torch."
HIDDEN = torch.ones(BATCH, LENGTH).bool()


def infinite(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize(
    ("mask", "sign", "mend"),
    [
        ({"key_padding_mask": HIDDEN}, EVERY_KEY, {"key_padding_mask": ~HIDDEN}),
        ({"key_padding_mask": infinite(HIDDEN)}, EVERY_KEY, {"key_padding_mask": ~HIDDEN}),
        ({"key_padding_mask": PADDED}, FIRST, {"key_padding_mask": ~PADDED}),
        ({"key_padding_mask": infinite(PADDED)}, FIRST, {"key_padding_mask": ~PADDED}),
        ({"key_padding_mask": REVERSED.float()}, ADDED, {"key_padding_mask": ~REVERSED}),
        ({"key_padding_mask": REVERSED.bfloat16()}, ADDED, {"key_padding_mask": ~REVERSED}),
        ({"attn_mask": LOWER}, EARLIER, {"attn_mask": ~LOWER}),
        ({"attn_mask": infinite(LOWER)}, EARLIER, {"attn_mask": ~LOWER}),
        ({"attn_mask": LOWER.repeat(BATCH * HEADS, 1, 1)}, EARLIER, {"attn_mask": ~LOWER}),
        ({"attn_mask": TRIL}, ADDED, {"attn_mask": ~LOWER}),
        ({"attn_mask": TRIL.repeat(BATCH * HEADS, 1, 1)}, ADDED, {"attn_mask": ~LOWER}),
        ({"attn_mask": ALL}, EVERY_KEY, {"attn_mask": None}),
        ({"attn_mask": infinite(ALL)}, EVERY_KEY, {"attn_mask": None}),
    ],
)  # fmt: skip
def test_each_sign_is_found_once_and_its_line_mends_it(
    mask: dict[str, Tensor], sign: str, mend: dict[str, Tensor | None]
) -> None:
    ours, (name,) = layer(), mask
    with pytest.warns(PolarityWarning) as found:
        ours(X, X, X, **mask)
    assert len(found) == 1
    saw, _, do = str(found[0].message).splitlines()
    assert saw.startswith(f"{name} of shape {tuple(mask[name].shape)} {sign}")
    assert found[0].filename == __file__
    assert warned(lambda: ours(X, X, X, **mask)) == []
    # The line of Python of the third line, up to its condition, is run as it stands.
    code = do.removeprefix("  do:     ").split(";")[0].split(",")[0].split(" if ")[0]
    attention_mask = PADDED if sign == FIRST else torch.ones(BATCH, LENGTH)
    given = {"attention_mask": attention_mask} | mask
    options = eval(f"dict({code})", {}, given)
    fresh = layer()
    fresh.load_state_dict(ours.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fresh(X, X, X, **options), fresh(X, X, X, **mend))


def test_a_mask_of_the_native_layer_warns_too() -> None:
    for reverse in (REVERSED, PADDED, HIDDEN):
        with pytest.warns(PolarityWarning) as found:
            Mask.from_torch_padding(reverse)
        assert "Mask.from_torch_padding(attention_mask == 0);" in str(found[0].message)
        assert found[0].filename == __file__
        assert warned(lambda padding=reverse == 0: Mask.from_torch_padding(padding)) == []


def test_the_reverse_of_a_mask_for_more_keys_than_queries() -> None:
    mask = torch.ones(4, LENGTH).tril(LENGTH - 4).bool()
    assert len(warned(lambda: layer()(X[:, :4], X, X, attn_mask=mask))) == 1
    assert warned(lambda: layer()(X[:, :4], X, X, attn_mask=~mask)) == []


def test_each_sign_has_its_own_warning() -> None:
    ours = layer()
    assert len(warned(lambda: ours(X, X, X, key_padding_mask=HIDDEN, attn_mask=LOWER))) == 2
    assert len(warned(attend(ours, REVERSED))) == 1
    assert len(warned(attend(ours, REVERSED.float()))) == 1
    assert warned(lambda: ours(X, X, X, key_padding_mask=REVERSED.float(), attn_mask=LOWER)) == []


def test_long_masks_are_read_to_their_end() -> None:
    x, mask = torch.randn(1, 600, EMBED), torch.ones(600, 600).tril().bool()
    assert len(warned(lambda: layer()(x, x, x, attn_mask=mask))) == 1
    mask[300, 20] = False  # within the third block, and on no edge
    assert warned(lambda: layer()(x, x, x, attn_mask=mask)) == []
    zeros_and_ones = (~mask).float()
    zeros_and_ones[300, 20] = 0.5
    assert warned(lambda: layer()(x, x, x, attn_mask=zeros_and_ones)) == []


def test_the_functional_form_warns_in_each_call() -> None:
    ours = layer()
    options = {"in_proj_weight": ours.in_proj_weight, "in_proj_bias": ours.in_proj_bias}
    options |= {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0}
    options |= {"out_proj_weight": ours.out_proj.weight, "out_proj_bias": None}
    x = X.transpose(0, 1)
    for _ in range(2):
        with pytest.warns(PolarityWarning, match=EARLIER) as found:
            multi_head_attention_forward(x, x, x, EMBED, HEADS, **options, attn_mask=LOWER)
        assert found[0].filename == __file__


def test_what_is_no_sign_of_it() -> None:
    ours = layer()
    assert warned(attend(ours, ATTENTION_MASK == 0)) == []
    assert warned(attend(ours, ~HIDDEN)) == []
    assert warned(attend(ours, HIDDEN.float().masked_fill(HIDDEN, -1e9))) == []  # a number
    meta = layer().to("meta")
    assert warned(attend(meta, REVERSED.to("meta"), X.to("meta"))) == []  # no values
    masks = [
        LOWER.logical_not(),  # causal
        torch.eye(LENGTH).bool(),  # no query sees itself
        torch.ones(LENGTH, LENGTH).tril(-1).bool(),  # a query sees itself and later keys
        torch.zeros(LENGTH, LENGTH),
        TRIL.clone().requires_grad_(),  # a learned bias
        2 * TRIL,
        infinite(~LOWER),
        torch.zeros(LENGTH, LENGTH).masked_fill(TRIL == 0, -1e9),
    ]
    for mask in masks:
        assert warned(lambda mask=mask: ours(X, X, X, attn_mask=mask)) == []
    assert not ours._warned


def test_a_sequence_without_a_batch_axis() -> None:
    assert len(warned(attend(layer(), HIDDEN[0], X[0]))) == 1
    assert warned(attend(layer(), ~HIDDEN[0], X[0])) == []


def test_lengths_of_zero_are_meant() -> None:
    mask = Mask.lengths(keys=torch.tensor([0, 4, 7]))
    q = torch.randn(BATCH, HEADS, LENGTH, 3)
    assert warned(lambda: AttentionMatrix(q, q, mask=mask).dense()) == []
    assert warned(lambda: Attention(EMBED, HEADS)(X, mask=mask)) == []
