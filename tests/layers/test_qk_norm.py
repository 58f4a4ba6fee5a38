"""QK-norm: closed forms, and the norms of the models that have one, by their own modules."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, Gemma3TextConfig, Olmo2Config, Qwen3Config
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from headwise import Rotary
from headwise.errors import OptionError
from headwise.function.budget import Budget
from headwise.layers.norm import Norm, QKNorm
from tests.honest import HALVES, accumulation, normal
from tests.refusals import refusals

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 6, 2, 10, 24
SIZES = {
    "hidden_size": 54,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
}
DTYPES = (torch.float64, torch.float32, *HALVES)


def formula(options: QKNorm, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, in the dtype of ``x``."""
    if options.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + options.eps).sqrt()
    normed = normed * (1 + weight if options.one_plus else weight)
    return normed if bias is None else normed + bias


def rounding(options: QKNorm, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """How far rounding may move the result; twice as far in float64, whose reference rounds too."""
    width, u = x.shape[-1], torch.finfo(x.dtype).eps * (1.0 if x.dtype == torch.float64 else 0.5)
    x, weight = x.double(), weight.double()
    out = formula(options, x, weight, None if bias is None else bias.double())
    factor = formula(options, x, weight).abs()
    # A sum of squares, its root, a quotient, and the weight; then the bias and the result.
    bound = (width + 8) * factor + 2 * out.abs()
    if options.kind == "layer":
        # The mean, a sum, is off by a share of the magnitudes, not of the difference.
        deviation = (x.var(-1, correction=0, keepdim=True) + options.eps).sqrt()
        weight = 1 + weight if options.one_plus else weight
        bound = bound + (width + 1) * x.abs().mean(-1, keepdim=True) / deviation * weight.abs()
    return u * bound


def learned(options: QKNorm, width: int, dtype: torch.dtype = torch.float32) -> Norm:
    """A norm whose parameters are none of the values that they start with."""
    norm = options.module(width).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(normal(width, seed=number + 5))
    return norm


ALL = [
    QKNorm(kind=kind, one_plus=one_plus, eps=eps)
    for kind in ("rms", "layer")
    for one_plus in (False, True)
    for eps in (1e-6, 0.5)
]


# ---- closed forms ------------------------------------------------------------------------------


def test_by_hand() -> None:
    # The mean square of 3 and 4 is 12.5; about their mean, -1/2 and 1/2, the variance is 1/4.
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    rms = QKNorm(eps=0.5).module(2).double()(x)
    assert rms.tolist() == [3 * 13**-0.5, 4 * 13**-0.5]
    layer = QKNorm(kind="layer", eps=0.75).module(2).double()
    layer.bias.data.copy_(torch.tensor([10.0, 20.0]))
    assert layer(x).tolist() == [9.5, 20.5]


@pytest.mark.parametrize("options", ALL, ids=str)
def test_at_the_start_the_weight_changes_nothing(options: QKNorm) -> None:
    norm, x = options.module(HEAD_DIM), normal(3, HEADS, LENGTH, HEAD_DIM).float()
    plain = QKNorm(kind=options.kind, eps=options.eps).module(HEAD_DIM)
    assert torch.equal(norm(x), plain(x))
    assert norm.weight.tolist() == [0.0 if options.one_plus else 1.0] * HEAD_DIM
    assert (norm.bias is None) == (options.kind == "rms")
    changed = learned(options, HEAD_DIM)
    assert not torch.equal(changed(x), plain(x))
    changed.reset_parameters()
    assert torch.equal(changed(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_it_is_its_formula(options: QKNorm, dtype: torch.dtype) -> None:
    norm = learned(options, HEAD_DIM, dtype)
    x = normal(3, HEADS, LENGTH, HEAD_DIM).to(dtype)
    parameters = [parameter.detach() for parameter in norm.parameters()]

    def function(*inputs: Tensor) -> Tensor:
        return formula(options, *inputs)

    # Float32 inside: the half types have one rounding to spare, which check adds.
    wide = [t.to(accumulation(dtype)) for t in (x, *parameters)]
    floor = rounding(options, *wide)
    Budget.for_function(function, *wide, floor=floor, factor=0.0, name="norm").assert_holds(norm(x))
    assert norm(x).dtype == dtype


@pytest.mark.parametrize("options", ALL, ids=str)
def test_gradients_against_float64(options: QKNorm) -> None:
    width = HEAD_DIM
    x, weight, bias, grad_output = (
        normal(*shape, seed=number).float()
        for number, shape in enumerate([(3, width), (width,), (width,), (3, width)])
    )
    leaves = [x, weight, bias][: 3 if options.kind == "layer" else 2]

    def gradient(which: int) -> Callable[..., Tensor]:
        def of(grad_output: Tensor, *leaves: Tensor) -> Tensor:
            leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
            out = formula(options, *leaves)
            return torch.autograd.grad(out, leaves[which], grad_output)[0]

        return of

    norm = options.module(width)
    for parameter, given in zip(norm.parameters(), leaves[1:], strict=True):
        parameter.data.copy_(given)
    ours = [x.clone().requires_grad_(), *norm.parameters()]
    found = torch.autograd.grad(norm(ours[0]), ours, grad_output)
    for which, one in enumerate(found):
        Budget.for_function(gradient(which), grad_output, *leaves, factor=3.0).assert_holds(one)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_double_backward(kind: Any) -> None:
    norm = learned(QKNorm(kind=kind), HEAD_DIM, torch.float64)
    x = normal(3, HEAD_DIM).requires_grad_()
    assert torch.autograd.gradgradcheck(norm, x)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_half_inputs_with_wide_weights_and_autocast(options: QKNorm, dtype: torch.dtype) -> None:
    norm = learned(options, HEAD_DIM)
    x = normal(3, HEADS, LENGTH, HEAD_DIM).to(dtype)
    expected = norm(x.float()).to(dtype)
    assert torch.equal(norm(x), expected)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(norm(x), expected)


def test_a_vector_of_zeros_stays_finite() -> None:
    for options in ALL:
        x = torch.zeros(2, HEAD_DIM, requires_grad=True)
        out = learned(options, HEAD_DIM)(x)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_made_in_a_dtype_and_on_a_device() -> None:
    norm = QKNorm(kind="layer").module(HEAD_DIM, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in norm.parameters())
    assert repr(norm) == f"Norm(10, {QKNorm(kind='layer')})"


# ---- the models' own norms ---------------------------------------------------------------------


def qwen3() -> tuple[Any, QKNorm]:
    config = Qwen3Config(**SIZES, head_dim=HEAD_DIM, rms_norm_eps=1e-5)
    return Qwen3Attention(config, layer_idx=0), QKNorm(eps=1e-5)


def olmo2() -> tuple[Any, QKNorm]:
    config = Olmo2Config(**(SIZES | {"hidden_size": HEADS * HEAD_DIM}))
    return Olmo2Attention(config, layer_idx=0), QKNorm(over="width", eps=config.rms_norm_eps)


def gemma3() -> tuple[Any, QKNorm]:
    config = Gemma3TextConfig(**SIZES, head_dim=HEAD_DIM)
    return Gemma3Attention(config, layer_idx=0), QKNorm(one_plus=True, eps=config.rms_norm_eps)


MODELS = {"Qwen3": qwen3, "OLMo 2": olmo2, "Gemma 3": gemma3}


def norms(name: str, heads: int, dtype: torch.dtype) -> tuple[Any, Norm, Tensor]:
    """The model's norm of the queries (6 heads) or keys (2), ours with its weights, and vectors."""
    layer, options = MODELS[name]()
    theirs = layer.q_norm if heads == HEADS else layer.k_norm
    width = HEAD_DIM if options.over == "head" else heads * HEAD_DIM
    theirs.weight.data.copy_(normal(width, seed=5))
    ours = options.module(width)
    ours.load_state_dict(theirs.state_dict())
    x = normal(3, LENGTH, heads, HEAD_DIM) * 3
    return theirs.to(dtype), ours.to(dtype), (x if width == HEAD_DIM else x.flatten(2)).to(dtype)


@pytest.mark.parametrize("heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize("name", MODELS)
def test_as_the_model_has_it(name: str, heads: int) -> None:
    theirs, ours, x = norms(name, heads, torch.float32)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["OLMo 2", "Gemma 3"])
def test_as_the_model_has_it_in_half_precision(name: str, dtype: torch.dtype) -> None:
    theirs, ours, x = norms(name, HEADS, dtype)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", HALVES)
def test_qwen3_rounds_once_more(dtype: torch.dtype) -> None:
    theirs, ours, x = norms("Qwen3", HEADS, dtype)
    wide = formula(QKNorm(eps=1e-5), x.double(), torch.ones(HEAD_DIM, dtype=torch.float64))
    exact = wide * ours.weight.double()
    once = torch.finfo(dtype).eps / 2 * (1 + torch.finfo(dtype).eps) * exact.abs()
    once += torch.finfo(torch.float32).eps * HEAD_DIM * exact.abs()
    assert ((ours(x).double() - exact).abs() <= once).all()
    assert ((theirs(x).double() - exact).abs() <= 2 * once).all()
    assert not ((theirs(x).double() - exact).abs() <= once).all()


def test_coheres_norm_where_its_rows_are_equal() -> None:
    config = CohereConfig(**SIZES, use_qk_norm=True)
    layer = CohereAttention(config, layer_idx=0)
    head_dim = config.hidden_size // HEADS
    x, weight = normal(3, LENGTH, HEADS, head_dim).float() * 3, normal(head_dim, seed=5).float()
    assert layer.q_norm.weight.shape == (HEADS, head_dim)  # the shape that does not fit
    layer.q_norm.weight.data.copy_(weight)
    options = QKNorm(kind="layer", eps=config.layer_norm_eps)
    ours = options.module(head_dim)
    ours.weight.data.copy_(weight)
    budget = Budget.for_function(lambda x, weight: formula(options, x, weight), x, weight)
    budget.assert_holds(ours(x))
    budget.assert_holds(layer.q_norm(x))


# ---- before or after the rotation --------------------------------------------------------------


def test_only_the_weight_tells_before_from_after() -> None:
    x, positions = normal(3, HEADS, LENGTH, HEAD_DIM), torch.arange(LENGTH)
    rotate = Rotary().rotate
    plain, weighted = QKNorm().module(HEAD_DIM), learned(QKNorm(), HEAD_DIM)
    plain, weighted = plain.double(), weighted.double()
    rms = (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    # A rotation keeps lengths. torchtune's order: rotated, divided, then weighted.
    after = weighted.weight * rotate(x, positions) / rms
    torch.testing.assert_close(weighted(rotate(x, positions)), after)
    torch.testing.assert_close(plain(rotate(x, positions)), rotate(plain(x), positions))
    before = rotate(weighted.weight * x / rms, positions)
    torch.testing.assert_close(rotate(weighted(x), positions), before)
    assert not torch.allclose(before, after)


def test_what_the_older_exporter_to_onnx_traces_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, norm = normal(3, HEADS, LENGTH, HEAD_DIM), learned(QKNorm(), HEAD_DIM).double()
    expected = norm(x)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr("headwise.function.norm.is_jit_tracing", lambda: True)
    torch.testing.assert_close(norm(x), expected)


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "kind": (lambda: QKNorm(kind="l2"), ["kind='l2'", '"rms" or "layer"']),  # type: ignore[arg-type]
    "over": (lambda: QKNorm(over="heads"), ["over='heads'", '"head" or "width"']),  # type: ignore[arg-type]
    "place": (lambda: QKNorm(place="both"), ["place='both'", '"before" or "after"']),  # type: ignore[arg-type]
    "eps 0": (lambda: QKNorm(eps=0.0), ["eps=0.0", "positive"]),
    "eps negative": (lambda: QKNorm(eps=-1e-6), ["eps=-1e-06"]),
    "eps nan": (lambda: QKNorm(eps=math.nan), ["eps=nan"]),
    "width after": (
        lambda: QKNorm(over="width", place="after"),
        ['over="width", place="after"', "after the width is split", 'place="before"'],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED, kind=OptionError)
