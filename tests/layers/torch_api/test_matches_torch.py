"""The layer against torch's own, in float64, wherever torch's has a defined answer."""

import copy
import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise import MultiheadAttention
from headwise.testing import Budget
from tests.layers.torch_api.cases import BATCH, HEADS, KEYS, QUERIES, Case, masks, pair, tensors

SLOTS = {"add_bias_kv": True, "add_zero_attn": True}
NARROW = {"kdim": 12, "vdim": 7}
CASES = [
    Case("plain"),
    Case("batch first", layer={"batch_first": True}),
    Case("self", inputs="self"),
    Case("self, batch first", layer={"batch_first": True}, inputs="self"),
    Case("key is value", inputs="memory"),
    Case("no bias", layer={"bias": False}),
    Case("kdim, vdim", layer=NARROW),
    Case("kdim, vdim, batch first, no bias", layer=NARROW | {"batch_first": True, "bias": False}),
    Case("vdim alone", layer={"vdim": 7}),
    Case("bias_kv", layer={"add_bias_kv": True}),
    Case("zero_attn", layer={"add_zero_attn": True}),
    Case("bias_kv, zero_attn, both masks", layer=SLOTS, attn_mask="bool 3d", padding="bool"),
    Case("bias_kv, zero_attn, float masks", layer=SLOTS | {"batch_first": True},
         attn_mask="float 2d", padding="float"),
    Case("bool mask", attn_mask="bool 2d"),
    Case("float mask", attn_mask="float 2d"),
    Case("bool mask per head", attn_mask="bool 3d", layer={"batch_first": True}),
    Case("float mask per head", attn_mask="float 3d"),
    Case("padding", padding="bool"),
    Case("float padding", padding="float", layer={"batch_first": True}),
    Case("both masks", attn_mask="bool 2d", padding="bool"),
    Case("both float masks", attn_mask="float 2d", padding="float"),
    Case("causal", inputs="self", attn_mask="causal"),
    Case("causal hinted", inputs="self", attn_mask="causal", call={"is_causal": True}),
    Case("causal and padding", inputs="self", attn_mask="causal", padding="bool"),
    Case("unbatched", unbatched=True),
    Case("unbatched, batch first", unbatched=True, layer={"batch_first": True}, inputs="self"),
    Case("unbatched, masks", unbatched=True, attn_mask="bool 3d", padding="bool"),
    Case("unbatched, kdim, slots", unbatched=True, layer={"kdim": 12, "add_bias_kv": True}),
]  # fmt: skip


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_weights_and_gradients(case: Case, need_weights: bool, average: bool) -> None:
    theirs, ours = pair(**case.layer)
    inputs, options = tensors(case), masks(case) | case.call
    options |= {"need_weights": need_weights, "average_attn_weights": average}
    expected = run(theirs, inputs, options)
    actual = run(ours, inputs, options)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inference_is_the_same_function(case: Case) -> None:
    theirs, ours = (layer.eval() for layer in pair(**case.layer))
    inputs, options = tensors(case), masks(case) | case.call
    with torch.no_grad():
        expected, actual = theirs(*inputs, **options), ours(*inputs, **options)
        alone = ours(*inputs, **options, need_weights=False)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert alone[1] is None
    torch.testing.assert_close(alone[0], actual[0], rtol=1e-12, atol=1e-13)


def run(
    layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], options: dict[str, object]
) -> dict[str, Tensor]:
    """Output, weights, and the gradient of every input and parameter."""
    leaves: dict[int, Tensor] = {id(x): x.clone().requires_grad_() for x in inputs}
    output, weights = layer(*(leaves[id(x)] for x in inputs), **options)
    generator = torch.Generator().manual_seed(1)
    found = {"output": output}
    wanted = [torch.randn(output.shape, generator=generator, dtype=output.dtype)]
    if weights is not None:
        found["weights"] = weights
        wanted.append(torch.randn(weights.shape, generator=generator, dtype=output.dtype))
    layer.zero_grad()
    sum((x * w).sum() for x, w in zip(found.values(), wanted, strict=True)).backward()  # type: ignore[union-attr]
    for number, leaf in enumerate(leaves.values()):
        found[f"gradient of input {number}"] = leaf.grad
    for name, parameter in layer.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    return found


@settings(max_examples=60)
@given(
    batch_first=st.booleans(),
    bias=st.booleans(),
    slots=st.tuples(st.booleans(), st.booleans()),
    widths=st.sampled_from([{}, {"kdim": 12}, {"vdim": 7}, {"kdim": 7, "vdim": 12}]),
    attn_mask=st.sampled_from(["none", "bool 2d", "bool 3d", "float 2d", "float 3d"]),
    padding=st.sampled_from(["none", "bool", "float"]),
    unbatched=st.booleans(),
    need_weights=st.booleans(),
    average=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_combination(
    batch_first, bias, slots, widths, attn_mask, padding, unbatched, need_weights, average, seed
) -> None:
    torch.manual_seed(seed)
    options = {"batch_first": batch_first, "bias": bias, **widths}
    options |= {"add_bias_kv": slots[0], "add_zero_attn": slots[1]}
    case = Case("any", layer=options, attn_mask=attn_mask, padding=padding, unbatched=unbatched)
    theirs, ours = pair(**options)
    call = masks(case) | {"need_weights": need_weights, "average_attn_weights": average}
    if {t.dtype for t in masks(case).values()} == {torch.bool, torch.float64}:
        # torch deprecates mixed kinds and warns; here each has its own meaning. One kind for torch.
        call |= {k: as_float(t) for k, t in masks(case).items()}
    inputs = tensors(case)
    torch.testing.assert_close(
        ours(*inputs, **call), theirs(*inputs, **call), rtol=1e-9, atol=1e-11
    )


def as_float(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_every_path_is_within_the_error_budget(case: Case, dtype: torch.dtype) -> None:
    # Clause 4: at most twice the largest error of plain torch, which is torch's own slow path.
    theirs, ours = pair(dtype=dtype, **case.layer)
    inputs = tensors(case, dtype=dtype)
    distinct = list({id(x): x for x in inputs}.values())
    order = [next(n for n, y in enumerate(distinct) if y is x) for x in inputs]
    call = masks(case, dtype=dtype) | case.call

    def plain(*given: Tensor) -> tuple[Tensor, Tensor]:
        layer = copy.deepcopy(theirs).to(given[0].dtype)
        options = {k: t.to(given[0].dtype) if t.is_floating_point() else t for k, t in call.items()}
        return layer(*(given[n] for n in order), **options)

    output = Budget.for_function(lambda *x: plain(*x)[0], *distinct, name="output")
    weights = Budget.for_function(lambda *x: plain(*x)[1], *distinct, name="weights")
    for need_weights, grad, training in itertools.product([False, True], repeat=3):
        with torch.set_grad_enabled(grad):
            found = ours.train(training)(*inputs, need_weights=need_weights, **call)
        output.assert_holds(found[0])
        if need_weights:
            weights.assert_holds(found[1])


def test_shapes_of_what_returns() -> None:
    _, ours = pair(batch_first=True)
    query, key = torch.randn(BATCH, QUERIES, 60).double(), torch.randn(BATCH, KEYS, 60).double()
    output, weights = ours(query, key, key)
    assert output.shape == (BATCH, QUERIES, 60)
    assert output.is_contiguous()
    assert weights.shape == (BATCH, QUERIES, KEYS)
    assert ours(query, key, key, average_attn_weights=False)[1].shape == (
        BATCH,
        HEADS,
        QUERIES,
        KEYS,
    )
    assert ours(query, key, key, need_weights=False)[1] is None


def test_sequence_first_output_can_be_viewed() -> None:
    _, ours = pair()
    x = torch.randn(QUERIES, BATCH, 60).double()
    assert ours(x, x, x)[0].view(QUERIES * BATCH, 60).shape == (72, 60)


def test_signatures_are_torchs() -> None:
    for method in ("__init__", "forward"):
        ours = inspect.signature(getattr(MultiheadAttention, method)).parameters
        theirs = inspect.signature(getattr(nn.MultiheadAttention, method)).parameters
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]


@pytest.mark.parametrize("options", [{}, {"kdim": 12}, {"bias": False, "add_bias_kv": True}])
def test_construction_is_torchs(options: dict[str, object]) -> None:
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(60, 6, **options)
    torch.manual_seed(7)
    ours = MultiheadAttention(60, 6, **options)
    assert isinstance(ours, nn.MultiheadAttention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert vars(ours).keys() == vars(theirs).keys()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
