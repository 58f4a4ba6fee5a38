"""The block of einops' page: its checkpoint loads, and gives its output."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Mask
from headwise.errors import DTypeError, HeadwiseError, MaskError, OptionError, ShapeError
from headwise.function.rounding import BACKWARD, FORWARD
from headwise.study.implementations import EinopsPostNormBlock
from headwise.testing import Budget

BATCH, QUERIES, KEYS, EMBED, HEADS, HEAD_DIM, VALUE_DIM = 3, 24, 29, 40, 6, 10, 7
SHAPES = {
    "w_qs.weight": (HEADS * HEAD_DIM, EMBED),
    "w_qs.bias": (HEADS * HEAD_DIM,),
    "w_ks.weight": (HEADS * HEAD_DIM, EMBED),
    "w_ks.bias": (HEADS * HEAD_DIM,),
    "w_vs.weight": (HEADS * VALUE_DIM, EMBED),
    "w_vs.bias": (HEADS * VALUE_DIM,),
    "fc.weight": (EMBED, HEADS * VALUE_DIM),
    "fc.bias": (EMBED,),
    "layer_norm.weight": (EMBED,),
    "layer_norm.bias": (EMBED,),
}
DTYPES = (torch.float32, torch.float64)


def checkpoint(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: 0.3 * torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Three tensors, none of which is another."""
    torch.manual_seed(2)
    return [torch.randn(BATCH, n, EMBED, dtype=dtype) for n in (QUERIES, KEYS, KEYS)]


def hidden() -> Tensor:
    """Theirs: True = may not be attended to, (batch, queries, keys). Every query keeps a key."""
    torch.manual_seed(3)
    blocked = torch.rand(BATCH, QUERIES, KEYS) < 0.5
    blocked[..., 11] = False
    return blocked


def loaded(dtype: torch.dtype = torch.float32, **options: Any) -> EinopsPostNormBlock:
    block = EinopsPostNormBlock(
        EMBED, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dtype=dtype, **options
    )
    block.load_state_dict(checkpoint(dtype))
    return block.eval()


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor, blocked: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, and the weights (heads, batch, queries, keys): one head after the other."""
    p = dict(zip(SHAPES, parameters, strict=True))
    weights, total = [], p["fc.bias"]
    for head in range(HEADS):
        own, own_v = (slice(head * width, (head + 1) * width) for width in (HEAD_DIM, VALUE_DIM))
        queries = q @ p["w_qs.weight"][own].mT + p["w_qs.bias"][own]
        keys = k @ p["w_ks.weight"][own].mT + p["w_ks.bias"][own]
        values = v @ p["w_vs.weight"][own_v].mT + p["w_vs.bias"][own_v]
        scores = queries @ keys.mT / HEAD_DIM**0.5
        if blocked is not None:
            scores = scores.where(~blocked, -torch.inf)
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        weights.append(exponentials / exponentials.sum(-1, keepdim=True))
        total = total + weights[-1] @ values @ p["fc.weight"][:, own_v].mT
    total = total + q
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normed * p["layer_norm.weight"] + p["layer_norm.bias"], torch.stack(weights)


def budget(function: Callable[..., Tensor], given: list[Tensor], factor: float) -> Budget:
    """In float64 the reference rounds too: both at most what they round in float32, to scale."""
    narrow = Budget.for_function(function, *(x.detach().float() for x in given), factor=factor)
    if given[0].dtype == torch.float32:
        return narrow
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    exact = function(*given).detach()
    return replace(narrow, dtype=torch.float64, exact=exact, allowed=2 * finer * narrow.allowed)


def mask_of(blocked: Tensor | None) -> Mask | None:
    return None if blocked is None else Mask.may_attend(~blocked, axes="batch queries keys")


# ---- its checkpoint, its numbers ---------------------------------------------------------------


def test_the_state_dict_has_the_pages_names() -> None:
    block = EinopsPostNormBlock(EMBED, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM)
    assert {name: tuple(t.shape) for name, t in block.state_dict().items()} == SHAPES
    assert block.layer_norm.eps == 1e-5
    theirs = checkpoint(torch.float32)
    block.load_state_dict(theirs, strict=True)
    assert all(torch.equal(t, theirs[name]) for name, t in block.state_dict().items())


@pytest.mark.parametrize("blocked", [None, hidden()], ids=["no mask", "mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_and_the_weights_are_the_pages(
    dtype: torch.dtype, blocked: Tensor | None
) -> None:
    block, given = loaded(dtype), [*inputs(dtype), *checkpoint(dtype).values()]
    mask, both = mask_of(blocked), partial(written_out, blocked=blocked)
    output = block(*given[:3], mask=mask)
    budget(lambda *x: both(*x)[0], given, FORWARD).assert_holds(output)
    weights = block.matrix(*given[:2], mask=mask).dense().transpose(0, 1)
    budget(lambda *x: both(*x)[1], given, FORWARD).assert_holds(weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_inputs_and_parameters(dtype: torch.dtype) -> None:
    block, given = loaded(dtype), [*inputs(dtype), *checkpoint(dtype).values()]
    direction = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)

    def flat(out: Tensor, leaves: list[Tensor]) -> Tensor:
        grads = torch.autograd.grad(out, leaves, direction.to(out.dtype))
        return torch.cat([grad.flatten() for grad in grads])

    def theirs(*x: Tensor) -> Tensor:
        leaves = [t.detach().requires_grad_() for t in x]
        return flat(written_out(*leaves, blocked=hidden())[0], leaves)

    x = [t.requires_grad_() for t in given[:3]]
    ours = flat(block(*x, mask=mask_of(hidden())), [*x, *block.parameters()])
    budget(theirs, given, BACKWARD).assert_holds(ours)


def test_a_seed_gives_the_pages_numbers() -> None:
    torch.manual_seed(5)
    theirs = [nn.Linear(EMBED, HEADS * width) for width in (HEAD_DIM, HEAD_DIM, VALUE_DIM)]
    for linear, width in zip(theirs, (HEAD_DIM, HEAD_DIM, VALUE_DIM), strict=True):
        nn.init.normal_(linear.weight, std=(2 / (EMBED + width)) ** 0.5)
    theirs.append(nn.Linear(HEADS * VALUE_DIM, EMBED))
    nn.init.xavier_normal_(theirs[-1].weight)
    block = EinopsPostNormBlock(EMBED, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, device="meta")
    block = block.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(5)
    block.reset_parameters()
    expected = [p for linear in theirs for p in linear.parameters()]
    expected += [torch.ones(EMBED), torch.zeros(EMBED)]
    assert all(map(torch.equal, block.parameters(), expected))


# ---- dropout, and rows without keys ------------------------------------------------------------


def test_dropout_is_of_the_output_alone() -> None:
    block, (q, k, v) = loaded(dropout=0.4), inputs(torch.float32)
    attended: list[Tensor] = []
    block.fc.register_forward_hook(lambda module, args, out: attended.append(out))
    evaluated = block(q, k, v)
    weights = block.matrix(q, k).dense()
    block.train()
    torch.manual_seed(7)
    found = block(q, k, v)
    torch.manual_seed(7)
    dropped = F.dropout(attended[1], 0.4)
    assert torch.equal(attended[0], attended[1])  # nothing before it was dropped
    assert torch.equal(found, block.layer_norm(dropped + q))
    assert not torch.equal(found, evaluated)
    assert torch.equal(block.matrix(q, k).dense(), weights)


def test_training_without_dropout_is_evaluation() -> None:
    block, given = loaded(dropout=0.0), inputs(torch.float32)
    evaluated = block(*given)
    assert torch.equal(block.train()(*given), evaluated)


def test_a_query_without_keys_keeps_its_residual() -> None:
    block, (q, k, v) = loaded(torch.float64), inputs(torch.float64)
    blocked = hidden()
    blocked[1, 5], blocked[2] = True, True
    mask = mask_of(blocked)
    theirs, weights = written_out(q, k, v, *checkpoint(torch.float64).values(), blocked=blocked)
    assert theirs[1, 5].isnan().all()
    assert weights[:, 2].isnan().all()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = block(*leaves, mask=mask)
    alone = block.layer_norm(block.fc.bias + q)
    assert torch.equal(found[1, 5], alone[1, 5])
    assert torch.equal(found[2], alone[2])
    assert not block.matrix(q, k, mask=mask).dense()[2].any()
    grads = torch.autograd.grad(found.square().sum(), [*leaves, *block.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][2].any()
    assert not grads[2][2].any()


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "saw"),
    [
        ({"num_heads": 0}, "num_heads=0"),
        ({"head_dim": -2}, "head_dim=-2"),
        ({"value_dim": 0}, "value_dim=0"),
        ({"dropout": 1.5}, "but got 1.5"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], saw: str) -> None:
    right = {"num_heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    with pytest.raises(OptionError, match=saw):
        EinopsPostNormBlock(EMBED, **(right | wrong))


@pytest.mark.parametrize(
    ("change", "error", "saw"),
    [
        ({"q": torch.randn(QUERIES, EMBED)}, ShapeError, r"q of shape \(24, 40\)"),
        ({"k": torch.randn(BATCH, KEYS, 33)}, ShapeError, r"k of shape \(3, 29, 33\)"),
        ({"v": torch.randn(BATCH, KEYS, 33)}, ShapeError, r"v of shape \(3, 29, 33\)"),
        ({"v": torch.randn(BATCH, 28, EMBED)}, ShapeError, "keys 29"),
        ({"k": torch.randn(2, KEYS, EMBED)}, ShapeError, "batch 3.*batch 2"),
        ({"q": torch.randn(BATCH, QUERIES, EMBED).double()}, DTypeError, "q of dtype"),
        ({"mask": hidden()}, MaskError, r"mask=a torch.bool tensor of shape \(3, 24, 29\)"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], error: type[HeadwiseError], saw: str
) -> None:
    given = dict(zip("qkv", inputs(torch.float32), strict=True))
    with pytest.raises(error, match=saw):
        loaded()(**(given | change))
