"""What torch's layer refuses is refused here: same types, torch's wording, and the user's numbers.

Each row of the table is run on both layers. The test fails when torch's layer accepts the input,
when ours cannot be caught as what torch raises, when torch's wording is missing, or when the
message does not hold the numbers.
"""

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise import HeadwiseError, MultiheadAttention
from headwise.errors import DTypeError
from headwise.layers import multi_head_attention_forward
from headwise.layers.torch_api import checks
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, pair

Q, K, V = (
    torch.randn(QUERIES, BATCH, EMBED),
    torch.randn(KEYS, BATCH, EMBED),
    torch.randn(KEYS, BATCH, EMBED),
)


def boolean(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


@dataclass(frozen=True)
class Wrong:
    """A wrong call, torch's wording (None: its operators' own), and what our message names."""

    name: str
    inputs: tuple[Any, Any, Any]
    names: tuple[str, ...]
    wording: str | None = None
    call: dict[str, Any] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


U = (Q[:, 0], K[:, 0], V[:, 0])
TABLE = [
    Wrong("4-D query", (Q[None], K, V), ("(1, 24, 3, 60)",), "query should be unbatched 2D or"),
    Wrong("2-D key", (Q, K[:, 0], V), ("2-D and 3-D",), "For batched (3-D) `query`, expected"),
    Wrong("unbatched, 3-D key", (U[0], K, U[2]), ("3-D and 2-D",), "For unbatched (2-D) `query`"),
    Wrong("query width", (Q[..., :59], K, V), ("60", "59"), "was expecting embedding dimension of"),
    Wrong("key width", (Q, K[..., :59], V[..., :59]), ("(29, 3, 59)",), "mat1 and mat2 shapes"),
    Wrong("values shorter", (Q, K, V[:28]), ("29", "28"), "key shape torch.Size([29, 3, 60])"),
    Wrong("values narrower", (Q, K, V[..., :59]), ("59",), "does not match value shape"),
    Wrong("batch", (Q, K[:, :2], V[:, :2]), ("batch 3", "batch 2", "batch_first"), "is invalid"),
    Wrong("batch of one", (Q, K[:, :1], V[:, :1]), ("batch 1",), "is invalid for input of size"),
    Wrong("query dtype", (Q.double(), K, V), ("query",), "mat1 and mat2 must have the same dtype"),
    Wrong("key dtype", (Q, K.double(), V.double()), ("key",), "must have the same dtype"),
    Wrong("integers", (Q.long(), K, V), ("int64",), "mat1 and mat2 must have the same dtype"),
    Wrong("device", (Q.to("meta"), K, V), ("meta", "cpu"), None),
    Wrong("hint alone", (Q, Q, Q), ("is_causal=True",),
          "Need attn_mask if specifying the is_causal hint. You may use the Transformer",
          {"is_causal": True}),
    Wrong("uint8 padding", (Q, K, V), ("True = may not attend", "mask == 0", "uint8"),
          "only bool and floating types of key_padding_mask are supported",
          {"key_padding_mask": torch.zeros(BATCH, KEYS, dtype=torch.uint8)}),
    Wrong("int64 mask", (Q, K, V), ("mask.bool()", "int64"),
          "only bool and floating types of attn_mask are supported",
          {"attn_mask": torch.zeros(QUERIES, KEYS, dtype=torch.int64)}),
    Wrong("1-D padding", (Q, K, V), ("(29,)",), "expected `key_padding_mask` to be `None` or 2-D",
          {"key_padding_mask": boolean(KEYS)}),
    Wrong("padding, batch", (Q, K, V), ("(4, 29)", "batch 3"),
          "Expected key_padded_mask.shape[0] to be 3, but got 4",
          {"key_padding_mask": boolean(BATCH + 1, KEYS)}),
    Wrong("padding, keys", (Q, K, V), ("(3, 24)", "keys 29"),
          "Expected key_padded_mask.shape[1] to be 29, but got 24",
          {"key_padding_mask": boolean(BATCH, QUERIES)}),
    Wrong("padding, batch first", (Q, K, V), ("batch_first=True, if query is (batch, length",),
          "Expected key_padded_mask.shape[0] to be 3, but got 29",
          {"key_padding_mask": boolean(KEYS, BATCH)}),
    Wrong("unbatched padding, keys", U, ("30",),
          "Expected key_padded_mask.shape[1] to be 29, but got 30",
          {"key_padding_mask": boolean(KEYS + 1)}),
    Wrong("unbatched 2-D padding", U, ("(keys,)",),
          "expected `key_padding_mask` to be `None` or 1-D",
          {"key_padding_mask": boolean(1, KEYS)}),
    Wrong("4-D mask", (Q, K, V), ("flatten(0, 1)",),
          "expected `attn_mask` to be `None`, 2-D or 3-D",
          {"attn_mask": boolean(BATCH, HEADS, QUERIES, KEYS)}),
    Wrong("1-D mask", U, ("(29,)",), "expected `attn_mask` to be `None`, 2-D or 3-D",
          {"attn_mask": boolean(KEYS)}),
    Wrong("transposed mask", (Q, K, V), ("attn_mask.mT",),
          "The shape of the 2D attn_mask is torch.Size([29, 24]), but should be (24, 29).",
          {"attn_mask": boolean(KEYS, QUERIES)}),
    Wrong("padding as mask", (Q, K, V), ("pass a mask (batch, keys) as key_padding_mask",),
          "The shape of the 2D attn_mask is torch.Size([3, 29])",
          {"attn_mask": boolean(BATCH, KEYS)}),
    Wrong("mask per sequence", (Q, K, V), ("repeat_interleave(6, dim=0)",),
          "The shape of the 3D attn_mask is torch.Size([3, 24, 29]), but should be (18, 24, 29).",
          {"attn_mask": boolean(BATCH, QUERIES, KEYS)}),
    Wrong("unbatched mask per head", U, ("heads 6",),
          "Expected `attn_mask` shape to be (6, 24, 29)",
          {"attn_mask": boolean(BATCH, QUERIES, KEYS)}),
    Wrong("kdim", (Q, K, V), ("key", "12"), "expecting key weights shape of (60, 60), but got"
          " torch.Size([60, 12])", layer={"kdim": 12, "vdim": 7}),
    Wrong("vdim", (Q, K[..., :12], V), ("value", "7"), "expecting value weights shape of (60, 60)",
          layer={"kdim": 12, "vdim": 7}),
    Wrong("kdim, lengths", (Q, K[..., :12], V[:28, :, :7]), ("29", "28"), "key's sequence and batch"
          " dims torch.Size([29, 3]) do not match value's torch.Size([28, 3])",
          layer={"kdim": 12, "vdim": 7}),
    Wrong("dropout above 1", (Q, K, V), ("1.5",),
          "dropout probability has to be between 0 and 1, but got 1.5", layer={"dropout": 1.5}),
]  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("wrong", TABLE, ids=str)
def test_the_table(wrong: Wrong, need_weights: bool) -> None:
    theirs, ours = pair(dtype=torch.float32, **wrong.layer)
    call = {"need_weights": need_weights} | wrong.call
    their_error = raised(lambda: theirs(*wrong.inputs, **call))
    our_error = raised(lambda: ours(*wrong.inputs, **call))
    require_same(our_error, their_error, wrong.wording, wrong.names)


@pytest.mark.parametrize("missing", ["k", "v"])
def test_one_bias_alone(missing: str) -> None:
    layers = pair(dtype=torch.float32, add_bias_kv=True)
    for layer in layers:
        setattr(layer, f"bias_{missing}", None)
    theirs, ours = (raised(lambda layer=layer: layer(Q, K, V)) for layer in layers)
    require_same(ours, theirs, str(theirs), (missing,))


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((60, 7), ("60", "7", "6 or 10")), ((0, 6), ("embed_dim=0",)), ((60, -6), ("num_heads=-6",))],
)
def test_construction(sizes: tuple[int, int], names: tuple[str, ...]) -> None:
    theirs = raised(lambda: nn.MultiheadAttention(*sizes))
    require_same(raised(lambda: MultiheadAttention(*sizes)), theirs, str(theirs), names)


def arguments(**other: Any) -> dict[str, Any]:
    return {
        "embed_dim_to_check": EMBED,
        "num_heads": HEADS,
        "in_proj_weight": torch.randn(3 * EMBED, EMBED),
        "in_proj_bias": None,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": torch.randn(EMBED, EMBED),
        "out_proj_bias": None,
    } | other


SLOT, STATIC = torch.zeros(1, 1, EMBED), torch.zeros(BATCH * HEADS, KEYS, 10)
WEIGHTS = {f"{x}_proj_weight": torch.zeros(EMBED, EMBED) for x in "qkv"}
FUNCTIONAL = [
    ({"static_k": torch.zeros(19, KEYS, 10)}, "expecting static_k.size(0) of 18, but got 19"),
    ({"static_k": torch.zeros(18, KEYS, 11)}, "expecting static_k.size(2) of 10, but got 11"),
    ({"static_v": torch.zeros(19, KEYS, 10)}, "expecting static_v.size(0) of 18, but got 19"),
    ({"static_v": torch.zeros(18, KEYS, 11)}, "expecting static_v.size(2) of 10, but got 11"),
    ({"static_k": torch.zeros(18, 30, 10)}, "but got: [18, 29]"),
    ({"bias_k": SLOT, "bias_v": SLOT, "static_k": STATIC}, "bias cannot be added to static key."),
    ({"bias_k": SLOT, "bias_v": SLOT, "static_v": STATIC}, "bias cannot be added to static value."),
    ({"num_heads": 7}, "embed_dim 60 not divisible by num_heads 7"),
    ({"embed_dim_to_check": 66}, "was expecting embedding dimension of 66, but got 60"),
    ({"in_proj_weight": None}, "use_separate_proj_weight is False but in_proj_weight is None"),
    ({"use_separate_proj_weight": True}, "use_separate_proj_weight is True but q_proj_weight is"),
    (
        {"use_separate_proj_weight": True, **WEIGHTS, "k_proj_weight": None},
        "use_separate_proj_weight is True but k_proj_weight is None",
    ),
    (
        {"use_separate_proj_weight": True, **WEIGHTS, "q_proj_weight": torch.zeros(60, 61)},
        "expecting query weights shape of (60, 60), but got torch.Size([60, 61])",
    ),
    (
        {"use_separate_proj_weight": True, **WEIGHTS, "in_proj_bias": torch.zeros(183)},
        "expecting query bias shape of (60,), but got",
    ),
    ({"in_proj_weight": torch.zeros(180, 61)}, "mat1 and mat2 shapes cannot be multiplied (72x60"),
]


@pytest.mark.parametrize(("other", "wording"), FUNCTIONAL, ids=[w for _, w in FUNCTIONAL])
def test_the_functional_form(other: dict[str, Any], wording: str) -> None:
    theirs = raised(lambda: functional.multi_head_attention_forward(Q, K, V, **arguments(**other)))
    ours = raised(lambda: multi_head_attention_forward(Q, K, V, **arguments(**other)))
    require_same(ours, theirs, wording, ())


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (which type it is, is the question)
        return error
    raise AssertionError("nothing was raised")


def require_same(
    ours: Exception, theirs: Exception, wording: str | None, names: tuple[str, ...]
) -> None:
    assert isinstance(ours, HeadwiseError)
    assert isinstance(ours, type(theirs)), f"{type(ours).__mro__} is no {type(theirs)}"
    if wording is not None:
        assert wording in str(theirs).replace("\n", " ")
        assert wording in str(ours)
    assert all(name in str(ours) for name in names), str(ours)
    lines = str(ours).splitlines()
    assert len(lines) == 3
    assert re.match(r"  needed: .+", lines[1])
    assert re.match(r"  do:     .+", lines[2])


# ---- beyond torch: what it lets through -------------------------------------------------------


@pytest.mark.parametrize("where", ["attn_mask", "key_padding_mask"])
def test_nan_in_a_mask_is_refused(where: str) -> None:
    theirs, ours = pair(dtype=torch.float32)
    mask = torch.zeros((QUERIES, KEYS) if where == "attn_mask" else (BATCH, KEYS))
    mask[2, 3] = torch.nan
    assert theirs(Q, K, V, **{where: mask})[0].isnan().any()
    for training in (True, False):
        with pytest.raises(HeadwiseError, match="nan"):
            ours.train(training)(Q, K, V, **{where: mask})


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("wrong", [None, [[1.0]], numpy.zeros((24, 3, 60))])
def test_an_input_is_a_tensor(wrong: object) -> None:
    _, ours = pair()
    for inputs, name in (
        ((wrong, K, V), "query"),
        ((Q, wrong, V), "key"),
        ((Q, K, wrong), "value"),
    ):
        with pytest.raises(DTypeError, match=f"{name} of type {type(wrong).__name__}"):
            ours(*inputs)


def test_negative_dropout_is_refused_with_weights_and_without() -> None:
    _, ours = pair(dtype=torch.float32, dropout=-0.5)
    for need_weights in (True, False):
        with pytest.raises(RuntimeError, match="but got -0\\.5"):
            ours(Q, K, V, need_weights=need_weights)


@pytest.mark.parametrize("where", ["attn_mask", "key_padding_mask", "static_k", "bias_v"])
def test_what_is_on_another_device_is_refused(where: str) -> None:
    shape = {"attn_mask": (QUERIES, KEYS), "key_padding_mask": (BATCH, KEYS)}.get(where)
    other = boolean(*shape) if shape else STATIC if where == "static_k" else SLOT
    given = arguments(bias_k=SLOT, bias_v=SLOT) if where == "bias_v" else arguments()
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device"
    ) as error:
        multi_head_attention_forward(Q, K, V, **given | {where: other.to("meta")})
    assert isinstance(error.value, HeadwiseError)
    assert where.startswith("static") or where in str(error.value)


@pytest.mark.parametrize("where", ["static_k", "static_v", "bias_k", "k_proj_weight"])
def test_a_dtype_of_its_own_is_refused_as_in_torch(where: str) -> None:
    given, key = arguments(), K
    if where == "bias_k":
        given |= {"bias_k": SLOT.double(), "bias_v": SLOT}
    elif where == "k_proj_weight":
        given |= {"use_separate_proj_weight": True, **WEIGHTS, where: WEIGHTS[where].double()}
        key = K.double()
    else:
        given |= {where: STATIC.double()}
    theirs = raised(lambda: functional.multi_head_attention_forward(Q, key, V, **given))
    ours = raised(lambda: multi_head_attention_forward(Q, key, V, **given))
    require_same(ours, theirs, None, ("float64", "float32"))


@pytest.mark.parametrize("options", [{}, {"kdim": EMBED, "vdim": 7}])
def test_a_bias_of_another_width_is_refused(options: dict[str, int]) -> None:
    _, ours = pair(dtype=torch.float32, **options)
    ours.in_proj_bias = nn.Parameter(torch.zeros(61))
    with pytest.raises(AssertionError, match="expecting query bias shape of"):
        ours(Q, K, V[..., : ours.vdim])


def test_every_error_survives_pickle() -> None:
    kinds = [kind for kind in vars(checks).values() if isinstance(kind, type)]
    errors = [kind for kind in kinds if issubclass(kind, HeadwiseError)]
    own = [kind for kind in errors if kind.__module__ == checks.__name__]
    assert len(own) == 9
    for kind in own:
        error = pickle.loads(pickle.dumps(kind(saw="a 3", needed="b", do="c")))
        assert type(error) is kind
        assert str(error) == "a 3\n  needed: b\n  do:     c"
