"""T5's relative bias: its buckets by hand, and T5's own attention."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from headwise.errors import OptionError
from headwise.function.budget import Budget
from headwise.layers.distance import PositionBias, T5Bias, T5BucketTable
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from tests.honest import normal
from tests.memory import LargestTensor
from tests.refusals import refusals

BATCH, HEADS, HEAD_DIM, LENGTH = 3, 6, 10, 24
SIZES = [(32, 128), (8, 20), (12, 33), (4, 7)]


def module_of(options: T5Bias, heads: int = HEADS) -> T5BucketTable:
    """A module that has learned something."""
    module = options.module(heads)
    with torch.no_grad():
        module.relative_attention_bias.weight.copy_(normal(options.buckets, heads, seed=7))
    return module


def t5(options: T5Bias) -> T5Attention:
    """T5's own layer. Its output projection is the identity, so its heads are known exactly."""
    config = T5Config(
        d_model=HEADS * HEAD_DIM,
        num_heads=HEADS,
        d_kv=HEAD_DIM,
        dropout_rate=0.0,
        relative_attention_num_buckets=options.buckets,
        relative_attention_max_distance=options.max_distance,
        is_decoder=not options.bidirectional,
        attn_implementation="eager",
    )
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    nn.init.eye_(layer.o.weight)
    return layer.eval()


def dense(bias: ScoreBias, queries: int, keys: int) -> Tensor:
    cpu = torch.device("cpu")
    bound = bias.bind(batch=1, heads=HEADS, queries=queries, keys=keys, device=cpu)
    (part,) = bound.parts_at_rows(torch.arange(queries))
    return part


# ---- buckets -----------------------------------------------------------------------------------


def test_buckets_by_hand() -> None:
    # Four buckets a side: 0 and 1 alone; 2 and 3; 4 and farther (half of the way by logarithm).
    found = T5Bias(buckets=8, max_distance=8).bucket_of(torch.arange(-9, 10)).tolist()
    before, after = [3, 3, 3, 3, 3, 3, 2, 2, 1], [5, 6, 6, 7, 7, 7, 7, 7, 7]
    assert found == [*before, 0, *after]
    # One side: every later key is at distance 0.
    found = T5Bias(buckets=4, max_distance=8, bidirectional=False).bucket_of(torch.arange(-9, 3))
    assert found.tolist() == [3, 3, 3, 3, 3, 3, 2, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [*SIZES, (32, 17), (320, 800), (64, 1000)])
def test_buckets_of_t5(buckets: int, max_distance: int, bidirectional: bool) -> None:
    options = T5Bias(buckets, max_distance, bidirectional)
    distances = torch.arange(-3 * max_distance, 3 * max_distance)
    theirs = T5Attention._relative_position_bucket(
        distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
    )
    assert torch.equal(options.bucket_of(distances), theirs)
    assert set(theirs.tolist()) <= set(range(buckets))


# ---- the bias ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), SIZES)
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (24, 29), (1, 29), (150, 290)])
def test_the_bias_of_t5(
    buckets: int, max_distance: int, bidirectional: bool, queries: int, keys: int
) -> None:
    options = T5Bias(buckets, max_distance, bidirectional)
    module, layer = module_of(options), t5(options)
    missing = layer.load_state_dict(module.state_dict(), strict=False).missing_keys
    assert sorted(missing) == ["k.weight", "o.weight", "q.weight", "v.weight"]
    # What T5 calls tokens seen in the past is an alignment at the end.
    theirs = layer.compute_bias(queries, keys, past_seen_tokens=keys - queries)
    assert torch.equal(dense(module(align="bottom-right"), queries, keys), theirs)
    from_start = layer.compute_bias(queries, keys)
    assert torch.equal(dense(module(align="top-left"), queries, keys), from_start)


def test_it_starts_without_a_preference_and_learns_one_number_a_bucket() -> None:
    module = T5Bias().module(HEADS)
    assert isinstance(T5Bias(), PositionBias)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "relative_attention_bias.weight": (32, HEADS)
    }
    assert not module.relative_attention_bias.weight.any()
    assert str(T5Bias()) in repr(module)
    module.relative_attention_bias.weight.data.fill_(1.0)
    module.reset_parameters()
    assert not module.relative_attention_bias.weight.any()


def test_it_is_a_table_by_distance_never_a_matrix() -> None:
    module, length = module_of(T5Bias()), 1_000
    with LargestTensor() as seen, torch.no_grad():
        module(align=None).bind(
            batch=BATCH, heads=HEADS, queries=length, keys=length, device=torch.device("cpu")
        )
    assert seen.bytes <= HEADS * 2 * length * 4


CONVERSIONS: dict[str, Callable[[T5BucketTable], T5BucketTable]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "from nothing": lambda m: m.to("meta").to_empty(device="cpu"),
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_conversions_leave_the_buckets(how: str) -> None:
    module = CONVERSIONS[how](module_of(T5Bias()))
    assert torch.equal(module.numbers, T5Bias().bucket_of(torch.arange(-128, 129)))
    assert list(module.state_dict()) == ["relative_attention_bias.weight"]


def test_made_in_a_dtype_and_on_a_device() -> None:
    module = T5Bias().module(HEADS, dtype=torch.bfloat16)
    assert module.relative_attention_bias.weight.dtype == torch.bfloat16
    with torch.device("meta"):
        module = T5Bias().module(HEADS)
    assert module.relative_attention_bias.weight.is_meta
    assert module.numbers.is_meta


# ---- T5's attention ----------------------------------------------------------------------------


def attended(options: T5Bias) -> tuple[T5Attention, Tensor, list[Tensor], Mask | None]:
    """T5's layer, its output by heads, its q, k and v, and the mask that it was given."""
    layer = t5(options)
    with torch.no_grad():
        layer.relative_attention_bias.weight.copy_(
            module_of(options).relative_attention_bias.weight
        )
    x = normal(BATCH, LENGTH, HEADS * HEAD_DIM).float()
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    causal = not options.bidirectional
    output = layer(x, mask=hidden if causal else None)[0]
    heads = output.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    qkv = [
        projection(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2).detach()
        for projection in (layer.q, layer.k, layer.v)
    ]
    return layer, heads, qkv, Mask.causal() if causal else None


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_attention_of_t5(bidirectional: bool) -> None:
    options = T5Bias(8, 20, bidirectional)
    _, theirs, (q, k, v), mask = attended(options)
    module = module_of(options)
    with torch.no_grad():
        shaping: dict[str, Any] = {"mask": mask, "score_bias": module(align=None), "scale": 1.0}
        budget = Budget.for_head_outputs(q, k, v, **shaping)
        budget.assert_holds(AttentionMatrix(q, k, **shaping) @ v)
    budget.assert_holds(theirs)
    other = T5Bias(8, 20, bidirectional).module(HEADS)(align=None)  # zeros
    assert not Budget.for_head_outputs(q, k, v, **(shaping | {"score_bias": other})).check(theirs)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_what_it_learns_is_what_t5_learns(bidirectional: bool) -> None:
    options = T5Bias(8, 20, bidirectional)
    layer, output, (q, k, v), mask = attended(options)
    grad_output = normal(BATCH, HEADS, LENGTH, HEAD_DIM, seed=9).float()
    weight = layer.relative_attention_bias.weight
    (theirs,) = torch.autograd.grad(output, weight, grad_output)
    module = module_of(options)
    bias = module(align=None)
    own = AttentionMatrix(q, k, mask=mask, score_bias=bias, scale=1.0) @ v
    (ours,) = torch.autograd.grad(own, module.relative_attention_bias.weight, grad_output)

    position = torch.arange(LENGTH)
    bucket = options.bucket_of((position - position[:, None]).flatten()).view(LENGTH, LENGTH)
    belongs = nn.functional.one_hot(bucket, options.buckets)

    def by_bucket(gradient: Tensor) -> Tensor:
        return torch.einsum("bhqk,qkn->nh", gradient, belongs.to(gradient.dtype))

    budget = Budget.for_gradients(
        *(q, k, v),
        grad_output=grad_output,
        bias_gradient=by_bucket,
        mask=mask,
        score_bias=module_of(options).requires_grad_(False)(align=None),
        scale=1.0,
    )["score_bias"]
    budget.assert_holds(theirs)
    budget.assert_holds(ours)
    unseen = set(range(options.buckets)) - set(bucket.flatten().tolist())
    assert all(not ours[number].any() for number in unseen)
    assert ours.abs().sum() > 0


def test_buckets_meet_at_every_alignment() -> None:
    module = module_of(T5Bias(8, 20))
    for queries, keys in itertools.product((1, 24), (24, 29)):
        whole = dense(module(align="bottom-right"), keys, keys)
        last = dense(module(align="bottom-right"), queries, keys)
        assert torch.equal(last, whole[:, :, keys - queries :])


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "odd": (lambda: T5Bias(buckets=7), ["buckets=7", "even number from 4"]),
    "few": (lambda: T5Bias(buckets=2), ["buckets=2", "bidirectional=True"]),
    "one": (lambda: T5Bias(buckets=1, bidirectional=False), ["buckets=1", "at least 2"]),
    "near": (lambda: T5Bias(max_distance=8), ["max_distance=8", "more than 8"]),
    "near, one side": (
        lambda: T5Bias(max_distance=16, bidirectional=False),
        ["max_distance=16", "more than 16"],
    ),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED, kind=OptionError)
