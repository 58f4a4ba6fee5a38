"""Attention as others wrote it: filled as given, and the same function."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.errors import MissingExtraError, OptionError
from headwise.function.budget import Budget
from headwise.study.implementations import PEERS, Implementation, SharedWeights
from headwise.support import lazy

pytest.importorskip("transformers")
pytest.importorskip("x_transformers")

BATCH, NUM_HEADS, HEAD_DIM, LENGTH = 3, 6, 10, 29
EMBED_DIM = NUM_HEADS * HEAD_DIM
each = pytest.mark.parametrize("key", PEERS)


def peer(key: str, *, given: SharedWeights | None = None, **options: Any) -> Implementation:
    made = PEERS[key](EMBED_DIM, NUM_HEADS, **options)
    return made.load_weights(given).eval() if given else made.eval()


def given(key: str) -> SharedWeights:
    return SharedWeights.random(EMBED_DIM, biased=PEERS[key].biased)


def written_out(x: Tensor, *tensors: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output, and the weights (batch, heads, queries, keys), one head after the other."""
    wq, wk, wv, wo, *biases = tensors
    bq, bk, bv, bo = biases or [x.new_zeros(EMBED_DIM)] * 4
    weights, output = [], bo
    for head in range(NUM_HEADS):
        own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        q, k, v = (x @ w[own].mT + b[own] for w, b in ((wq, bq), (wk, bk), (wv, bv)))
        scores = q @ k.mT * HEAD_DIM**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        weights.append(scores.softmax(-1))
        output = output + weights[-1] @ v @ wo[:, own].mT
    return output, torch.stack(weights, dim=1)


def may_attend() -> Tensor:
    allowed = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed[1, :, 20:] = False
    return allowed


# ---- filled ------------------------------------------------------------------------------------


@each
def test_what_is_filled_is_held(key: str) -> None:
    weights = given(key)
    held = peer(key, given=weights).as_shared_weights()
    assert len(held.tensors) == len(weights.tensors)
    for mine, theirs in zip(held.tensors, weights.tensors, strict=True):
        assert torch.equal(mine, theirs)


@each
def test_what_is_held_is_what_computes(key: str) -> None:
    x, layer = torch.randn(BATCH, LENGTH, EMBED_DIM), peer(key, given=given(key))
    with torch.no_grad():
        for tensor in layer.as_shared_weights().tensors:
            before = layer(x)
            tensor.mul_(1.5)  # a view: the parameter itself
            # A bias of the keys moves all scores of a query alike.
            inert = tensor.dim() == 1 and torch.equal(
                tensor, (layer.as_shared_weights().biases or ())[1]
            )
            assert inert or not torch.allclose(layer(x), before, rtol=1e-3, atol=1e-3)


@each
def test_biases_that_are_not_given_are_zero_or_refused(key: str) -> None:
    layer = peer(key)
    if PEERS[key].biased:
        layer.load_weights(SharedWeights.random(EMBED_DIM, biased=True)).load_weights(
            SharedWeights.random(EMBED_DIM)
        )
        assert not any(bias.any() for bias in layer.as_shared_weights().biases or ())
    else:
        with pytest.raises(OptionError, match="its projections have none"):
            layer.load_weights(SharedWeights.random(EMBED_DIM, biased=True))


def test_random_weights_keep_the_width() -> None:
    weights = SharedWeights.random(400, biased=True)
    assert [float(m.std()) * 20 for m in weights.matrices] == pytest.approx([1.0] * 4, rel=0.02)
    assert weights.biases is not None
    assert len(weights.tensors) == 8
    assert SharedWeights.random(4).biases is None


# ---- the same function -------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@each
def test_the_output_is_the_formula(key: str, masked: bool) -> None:
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), given(key)
    hidden = ~may_attend() if masked else None
    budget = Budget.for_function(
        lambda *tensors: written_out(*tensors, hidden=hidden)[0], x, *weights.tensors
    )
    layer = peer(key, given=weights)
    mask = layer.convert_mask(may_attend()) if masked else None
    with torch.no_grad():
        budget.assert_holds(layer(x, mask))
    budget.assert_holds(layer(x, mask))  # with gradients torch takes another path


@each
def test_equal_tokens_give_the_projected_value(key: str) -> None:
    token, weights = torch.randn(EMBED_DIM), SharedWeights.random(EMBED_DIM)
    x = token.expand(BATCH, LENGTH, EMBED_DIM)
    budget = Budget.for_function(
        lambda x, v, out: F.linear(F.linear(x, v), out), x, weights.v, weights.out
    )
    budget.assert_holds(peer(key, given=weights)(x))


@pytest.mark.parametrize("key", [k for k in PEERS if k not in ("paper", "tensor2tensor")])
def test_the_weights_are_those_of_the_formula(key: str) -> None:
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), given(key)
    found = peer(key, given=weights).returned_attention_weights(x)
    assert found is not None

    def read(*tensors: Tensor) -> Tensor:
        exact = written_out(*tensors)[1]
        return {"torch": exact.mean(1), "einops": exact.transpose(0, 1)}.get(key, exact)

    Budget.for_function(read, x, *weights.tensors).assert_holds(found)


@pytest.mark.parametrize("key", ["gpt2", "bert"])
def test_hugging_face_through_torchs_kernel(key: str) -> None:
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), given(key)
    budget = Budget.for_function(
        lambda *tensors: written_out(*tensors, hidden=~may_attend())[0], x, *weights.tensors
    )
    layer = peer(key, given=weights, implementation="sdpa")
    mask = layer.convert_mask(may_attend())
    assert mask.dtype == torch.bool
    budget.assert_holds(layer(x, mask))


@pytest.mark.parametrize("key", ["einops", "bert"])
def test_the_block_adds_the_input_and_norms(key: str) -> None:
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), given(key)

    def block(x: Tensor, *tensors: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x + written_out(x, *tensors)[0], (EMBED_DIM,), eps=eps)

    eps = {"einops": 1e-5, "bert": 1e-12}[key]
    budget = Budget.for_function(partial(block, eps=eps), x, *weights.tensors)
    budget.assert_holds(peer(key, given=weights).compute_block(x))


@pytest.mark.parametrize("key", [k for k in PEERS if k not in ("einops", "bert")])
def test_no_other_block_adds_anything(key: str) -> None:
    x, layer = torch.randn(BATCH, LENGTH, EMBED_DIM), peer(key, given=given(key))
    assert torch.equal(layer.compute_block(x), layer(x))


# ---- masks -------------------------------------------------------------------------------------


@each
def test_a_mask_keeps_its_axes(key: str) -> None:
    layer = peer(key)
    assert layer.convert_mask(may_attend()).shape == (BATCH, LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("key", "may", "may_not"),
    [
        ("paper", 0.0, -torch.inf),
        ("tensor2tensor", 0.0, -1e9),
        ("annotated", True, False),
        ("torch", False, True),
        ("einops", False, True),
        ("gpt2", 0.0, torch.finfo(torch.float32).min),
        ("bert", 0.0, torch.finfo(torch.float32).min),
        ("x_transformers", True, False),
    ],
)
def test_the_values_of_a_mask(key: str, may: float, may_not: float) -> None:
    mask = peer(key).convert_mask(may_attend())
    assert mask[may_attend()].unique().tolist() == [may]
    assert mask[~may_attend()].unique().tolist() == [may_not]


# ---- packages ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, headwise.study.implementations;"
        "print({'transformers', 'x_transformers', 'einops'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("gpt2", "transformers"),
        ("bert", "transformers"),
        ("x_transformers", "x-transformers"),
        ("einops", "einops"),
    ],
)
def test_a_package_that_is_missing(key: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(lazy, "import_module", missing)
    monkeypatch.delitem(sys.modules, package.replace("-", "_"), raising=False)
    with pytest.raises(MissingExtraError, match=rf"^{package} is not installed") as raised:
        peer(key)
    assert raised.value.do == "pip install 'headwise[demo]'"
