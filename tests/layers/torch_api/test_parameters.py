"""The parameters are torch's, and out_proj is really called."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from headwise import MultiheadAttention
from headwise.function.budget import Budget
from headwise.function.rounding import BACKWARD
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, pair

Q, K = torch.randn(QUERIES, BATCH, EMBED), torch.randn(KEYS, BATCH, EMBED)


def both(change: object, **options: object) -> tuple[Tensor, Tensor]:
    """The outputs of both layers after the same change to each."""
    layers = pair(dtype=torch.float32, **options)
    for layer in layers:
        torch.manual_seed(5)
        change(layer)  # type: ignore[operator]
    theirs, ours = (layer.eval()(Q, K, K)[0] for layer in layers)
    return ours, theirs


def test_code_that_initialises_the_packed_weight() -> None:
    def initialise(layer: nn.MultiheadAttention) -> None:
        nn.init.normal_(layer.in_proj_weight, std=0.1)
        nn.init.constant_(layer.in_proj_bias, 0.5)
        layer.in_proj_weight.data[:EMBED] *= 2

    torch.testing.assert_close(*both(initialise))


@pytest.mark.parametrize("new", [None, "vector"])
@pytest.mark.parametrize("options", [{}, {"kdim": EMBED, "vdim": 7}])
def test_code_that_replaces_the_bias(new: str | None, options: dict[str, int]) -> None:
    layers = pair(dtype=torch.float32, **options)
    for layer in layers:
        torch.manual_seed(5)
        layer.in_proj_bias = None if new is None else nn.Parameter(torch.randn(3 * EMBED))
    inputs = (Q, K, K[..., : layers[0].vdim])
    theirs, ours = (layer(*inputs)[0] for layer in layers)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float64, torch.float16),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_bias_and_slots_of_another_dtype(
    dtype: torch.dtype, other: torch.dtype, same: bool, need_weights: bool
) -> None:
    """torch adds a bias of any dtype, and takes slots of a narrower one: so does this layer."""
    names = ["in_proj_bias"]
    if torch.promote_types(dtype, other) == dtype:
        names += ["bias_k", "bias_v"]
    theirs, ours = pair(dtype=dtype, add_bias_kv=True, batch_first=True)
    torch.manual_seed(5)
    biases = [torch.randn(getattr(ours, name).shape).to(other) for name in names]
    for name, bias in zip(names, biases, strict=True):
        for layer in (theirs, ours):
            setattr(layer, name, nn.Parameter(bias.clone()))
    q, k = (x.transpose(0, 1).to(dtype).contiguous() for x in (Q, K))
    given = (q, q, q) if same else (q, k, k)
    output, weights = ours(*given, need_weights=need_weights)
    expected = theirs(*given, need_weights=need_weights)
    torch.testing.assert_close((output, weights), expected)
    with torch.no_grad():
        inferred = ours.eval()(*given, need_weights=need_weights)[0]
    torch.testing.assert_close(inferred, expected[0])

    def plain(index: int, *inputs: Tensor) -> Tensor:
        """The gradient of one bias by torch's layer, with all parameters in one dtype."""
        layer = copy.deepcopy(theirs).to(inputs[0].dtype)
        for name, bias in zip(names, inputs[2:], strict=True):
            setattr(layer, name, nn.Parameter(bias))
        key = inputs[0] if same else inputs[1]
        loss = layer(inputs[0], key, key)[0].square().sum()
        return torch.autograd.grad(loss, getattr(layer, names[index]))[0]

    # torch sums the gradient of a narrow bias in that dtype; ours is rounded to it once.
    gradients = torch.autograd.grad(output.square().sum(), [getattr(ours, n) for n in names])
    for index, gradient in enumerate(gradients):
        assert gradient.dtype == other
        inputs = (q, k, *(bias.to(dtype) for bias in biases))
        Budget.for_function(partial(plain, index), *inputs, factor=BACKWARD).assert_holds(gradient)


def test_pruned_and_parametrized_projections() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    def change(layer: nn.MultiheadAttention) -> None:
        prune.l1_unstructured(layer, "in_proj_weight", amount=0.3)
        parametrize.register_parametrization(layer.out_proj, "weight", Halved())

    torch.testing.assert_close(*both(change))

    def parametrize_both(layer: nn.MultiheadAttention) -> None:
        parametrize.register_parametrization(layer, "in_proj_weight", Halved())

    torch.testing.assert_close(*both(parametrize_both))


def test_out_proj_may_be_any_module() -> None:
    _, ours = pair(dtype=torch.float32)
    ours.out_proj = nn.Sequential(nn.Linear(EMBED, 11), nn.Tanh())
    output, weights = ours(Q, K, K)
    assert output.shape == (QUERIES, BATCH, 11)
    assert weights.shape == (BATCH, QUERIES, KEYS)
    output.sum().backward()
    assert ours.out_proj[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("inputs", "shape"),
    [((Q, K, K), (QUERIES, BATCH, EMBED)), ((Q[:, 0], K[:, 0], K[:, 0]), (QUERIES, EMBED))],
)
@pytest.mark.parametrize("training", [True, False])
def test_hooks_on_out_proj_see_the_heads_and_may_change_the_output(
    inputs: tuple[Tensor, ...], shape: tuple[int, ...], training: bool
) -> None:
    _, ours = pair(dtype=torch.float32)
    seen: list[torch.Size] = []

    def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append(arguments[0].shape)
        return output + 1

    with torch.no_grad():
        expected = ours.train(training)(*inputs)[0] + 1
        ours.out_proj.register_forward_hook(hook)
        actual = ours(*inputs)[0]
    assert torch.equal(actual, expected)
    assert seen == [shape]


def test_forward_hooks_of_the_layer() -> None:
    _, ours = pair(dtype=torch.float32)
    calls: list[int] = []
    ours.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments)))
    ours(Q, K, K)
    assert calls == [3]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate: object) -> None:
    _, ours = pair(dtype=torch.float32, kdim=EMBED, vdim=7, add_bias_kv=True)
    twin = duplicate(ours)  # type: ignore[operator]
    assert type(twin) is MultiheadAttention
    assert torch.equal(twin(Q, K, K[..., :7])[0], ours(Q, K, K[..., :7])[0])


def test_an_old_pickle_without_the_flag_still_loads() -> None:
    # torch 1.1 knew no separate weights: its pickles have no _qkv_same_embed_dim.
    ours = MultiheadAttention(EMBED, HEADS)
    state = ours.__dict__.copy()
    del state["_qkv_same_embed_dim"]
    old = MultiheadAttention.__new__(MultiheadAttention)
    old.__setstate__(state)
    assert torch.equal(old(Q, K, K)[0], ours(Q, K, K)[0])


def test_mixed_parameter_dtypes_fail_as_in_torch() -> None:
    for layer in pair(dtype=torch.float32):
        layer.out_proj.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(Q, K, K)
    for layer in pair(dtype=torch.float32):
        layer.in_proj_weight = nn.Parameter(layer.in_proj_weight.to(torch.bfloat16))
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            layer(Q, K, K)
