"""The attention function alone: transformers' rules, option by option."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from headwise.errors import DTypeError, MaskError, OptionError
from headwise.function.budget import Budget
from headwise.huggingface.attention import UNSUPPORTED, attend
from headwise.huggingface.masks import LazyMask
from headwise.layers.hooks import attention_hook
from headwise.masks.clauses.dense import Dense
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from tests.honest import normal, ordinary
from tests.huggingface.models import watched

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 6, 2, 24, 29
# In float64 the reference would be its own judge.
DTYPES = (torch.float32, torch.bfloat16)


class Layer(nn.Module):
    def __init__(self, *, is_causal: bool | None = None, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // KV_HEADS
        if is_causal is not None:
            self.is_causal = is_causal
        if sinks is not None:
            self.sinks = sinks


def same_as(
    theirs: Any, layer: Layer, *inputs: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Our output, within the budget of what transformers' own function computes."""
    q, k, v = inputs

    def their_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cast = {n: x.to(q.dtype) if _is_float(x) else x for n, x in options.items()}
        given = mask.to(q.dtype) if _is_float(mask) else mask
        out: Tensor = theirs(layer, q, k, v, given, **cast)[0]
        return out

    budget = Budget.for_function(their_output, q, k, v, name="head outputs")
    out, weights = attend(layer, q, k, v, mask, **options)
    assert weights is None
    assert out.is_contiguous()
    assert out.shape == (BATCH, q.shape[2], HEADS, v.shape[3])
    budget.assert_holds(out)
    return out


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def lower(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [QUERIES, 1])
@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("said", [None, True, False])
def test_without_a_mask_is_causal_decides(
    dtype: torch.dtype, queries: int, own: bool | None, said: bool | None
) -> None:
    q, k, v = ordinary(dtype)
    layer = Layer(is_causal=own)
    # More keys than queries: transformers counts from the first key, as in a static cache.
    out = same_as(sdpa_attention_forward, layer, q[:, :, :queries], k, v, is_causal=said)
    causal = queries > 1 and (said if said is not None else own in (None, True))
    first_key = v[:, :, 0].repeat_interleave(HEADS // KV_HEADS, dim=1)
    assert torch.allclose(out[:, 0], first_key) == causal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(BATCH, 1, QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS), (1, 1, 1, KEYS), (QUERIES, KEYS)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_any_shape(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    q, k, v = ordinary(dtype)
    mask = normal(*shape, seed=5).to(dtype)
    if kind == "bool":
        mask = mask > 0
        mask[..., 0] = True
    same_as(sdpa_attention_forward, Layer(), q, k, v, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [True, False])
def test_position_bias(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = ordinary(dtype)
    bias = normal(1, HEADS, QUERIES, KEYS, seed=5).to(dtype)
    mask = lower(QUERIES, KEYS)[None, None] if masked else None
    layer = Layer(is_causal=False)
    out = same_as(sdpa_attention_forward, layer, q, k, v, mask=mask, position_bias=bias)
    assert not torch.allclose(out, attend(layer, q, k, v, mask)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_and_softcap(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=dtype)
    same_as(softcapped, Layer(), q, k, v, mask=mask, scaling=0.7, softcap=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    sinks = normal(HEADS, seed=5).to(dtype)
    layer = Layer(sinks=sinks)
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=dtype)

    def theirs(layer: Layer, q: Tensor, *rest: Any, s_aux: Tensor, **options: Any) -> Any:
        layer.sinks = s_aux
        return with_sinks(layer, q, *rest, **options)

    out = same_as(theirs, layer, q, k, v, mask=mask, scaling=0.3, s_aux=sinks)
    assert not torch.allclose(out, attend(layer, q, k, v, mask, scaling=0.3)[0])


def test_a_window_without_a_mask_is_honoured() -> None:
    q, k, v = ordinary(torch.float64)
    k, v = k[:, :, :QUERIES], v[:, :, :QUERIES]
    distance = torch.arange(QUERIES) - torch.arange(QUERIES)[:, None]
    for causal, allowed in ((True, (distance <= 0) & (distance > -5)), (False, distance.abs() < 5)):
        layer = Layer(is_causal=causal)
        windowed, _ = attend(layer, q, k, v, None, sliding_window=5)
        assert torch.equal(windowed, attend(layer, q, k, v, allowed)[0])
        # A model's mask holds its window already.
        assert torch.equal(attend(layer, q, k, v, allowed, sliding_window=2)[0], windowed)
    last, _ = attend(layer, q[:, :, -1:], k, v, None, sliding_window=5)
    budget = Budget.for_head_outputs(q[:, :, -1:], k[:, :, -5:], v[:, :, -5:])
    budget.assert_holds(last.transpose(1, 2))


def test_sequences_packed_by_their_ends() -> None:
    q, k, v = (x[:1, :, :QUERIES] for x in ordinary(torch.float64))
    ends = torch.tensor([0, 7, 8, QUERIES], dtype=torch.int32)
    packed, _ = attend(Layer(), q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    alone = [
        attend(Layer(), *(x[:, :, a:b] for x in (q, k, v)), None)[0]
        for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    budget = Budget.for_head_outputs(
        q, k, v, mask=Mask.causal() & Mask.segments(torch.tensor([[0] * 7 + [1] + [2] * 16]))
    )
    budget.assert_holds(packed.transpose(1, 2))
    budget.assert_holds(torch.cat(alone, 1).transpose(1, 2))
    with pytest.raises(OptionError, match="packed sequences in a batch"):
        attend(Layer(), *ordinary(torch.float64), None, cu_seq_lens_q=ends)


def test_learned_queries_are_shared_by_the_batch() -> None:
    q, k, v = ordinary(torch.float64)
    layer = Layer(is_causal=False)
    shared = q[:1].expand_as(q)
    assert torch.equal(attend(layer, q[:1], k, v, None)[0], attend(layer, shared, k, v, None)[0])


@pytest.mark.parametrize("train", [True, False])
def test_weights_are_given_when_asked_for(train: bool) -> None:
    q, k, v = ordinary(torch.float64)
    layer = Layer(is_causal=True).train(train)
    options = {"softcap": 1.5, "output_attentions": True, "dropout": 0.5 if train else 0.0}
    mask = lower(QUERIES, KEYS)
    _, weights = attend(layer, q, k, v, mask, **options)
    assert weights is not None
    given = Budget.for_weights(q, k, mask=Mask.causal(align="bottom-right"), softcap=1.5)
    given.assert_holds(weights)  # before dropout, in training too


@pytest.mark.parametrize("mask", [None, lower(QUERIES, QUERIES)], ids=["no mask", "mask"])
def test_dropout_drops_what_torch_drops(mask: Tensor | None) -> None:
    q, k, v = (x[:, :, :QUERIES] for x in ordinary(torch.float64))
    layer = Layer()
    torch.manual_seed(3)
    theirs, _ = sdpa_attention_forward(layer, q, k, v, mask, dropout=0.4)
    torch.manual_seed(3)
    ours, _ = attend(layer, q, k, v, mask, dropout=0.4)
    # The two may group the heads differently, and so round differently.
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, attend(layer, q, k, v, mask)[0])


def test_autocast_settles_the_dtypes() -> None:
    q, k, v = ordinary(torch.float32)
    v = v.bfloat16()  # the projection is rounded, what rotated queries and keys is not
    with pytest.raises(DTypeError):
        attend(Layer(), q, k, v, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attend(Layer(), q, k, v, None)
        theirs, _ = sdpa_attention_forward(Layer(), q, k, v, None)
    assert out.dtype == theirs.dtype == torch.bfloat16
    Budget.for_head_outputs(
        *(x.bfloat16() for x in (q, k, v)), mask=Mask.causal(align="top-left")
    ).assert_holds(out.transpose(1, 2))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    q, k, v = ordinary(torch.float32)
    with pytest.raises(OptionError, match=f"{name} from Layer") as error:
        attend(Layer(), q, k, v, None, **{name: torch.zeros(1)})
    assert error.value.do == 'load this model with attn_implementation="eager" or "sdpa"'
    attend(Layer(), q, k, v, None, **{name: None})


# keyword, value, whether its layer has blocks -> what the error says
REFUSED_CHOICES = [
    ("indices", torch.zeros(1), True, r"a torch.float32 tensor of shape \(1,\)"),
    ("indices", torch.zeros(BATCH, QUERIES - 1, 4).long(), True, r"queries 24, K\)"),
    ("indices", torch.zeros(BATCH, QUERIES, 4), True, "integers"),
    ("indices", torch.zeros(BATCH, QUERIES, 4).bool(), True, "integers"),
    ("block_indices", torch.zeros(BATCH, QUERIES, 4).int(), True, "a divisor of 6 heads"),
    ("block_indices", torch.zeros(BATCH, 4, QUERIES, 2).int(), True, "a divisor of 6 heads"),
    ("block_indices", torch.zeros(BATCH, 2, QUERIES, 2).int(), False, "block_size, which is None"),
]


@pytest.mark.parametrize(("name", "value", "has_blocks", "words"), REFUSED_CHOICES)
def test_a_choice_of_other_sizes_is_refused(
    name: str, value: Tensor, has_blocks: bool, words: str
) -> None:
    q, k, v = ordinary(torch.float32)
    layer = Layer()
    if has_blocks:
        layer.indexer = nn.Module()
        layer.indexer.block_size = 4  # type: ignore[assignment]
    with pytest.raises(OptionError, match=words):
        attend(layer, q, k, v, None, **{name: value})


@pytest.mark.usefixtures("shapes_unchecked")
def test_masks_that_are_none_are_refused() -> None:
    q, k, v = ordinary(torch.float32)
    with pytest.raises(MaskError, match=r"torch\.int64"):
        attend(Layer(), q, k, v, lower(QUERIES, KEYS).long())
    with pytest.raises(MaskError, match="keys 28"):
        attend(Layer(), q, k, v, lower(QUERIES, KEYS - 1))
    with pytest.raises(OptionError, match="a str instead of a tensor"):
        attend(Layer(), q, k, v, "causal")  # type: ignore[arg-type]


def test_other_keywords_are_ignored() -> None:
    q, k, v = ordinary(torch.float32)
    plain, _ = attend(Layer(), q, k, v, None)
    options = {"position_ids": torch.arange(KEYS), "use_cache": True, "deterministic": True}
    assert torch.equal(attend(Layer(), q, k, v, None, **options)[0], plain)


def test_a_lazy_mask_is_read_lazily() -> None:
    q, k, v = ordinary(torch.float64)
    mask = Mask.causal(align="bottom-right") & Mask.lengths(keys=torch.tensor([29, 3, 0]))
    lazy = LazyMask(mask, batch=BATCH, queries=QUERIES, keys=KEYS, device=q.device)
    out, _ = attend(Layer(), q, k, v, lazy)
    assert lazy.written is None
    Budget.for_head_outputs(q, k, v, mask=mask).assert_holds(out.transpose(1, 2))
    budget = Budget.for_head_outputs(q, k, v, mask=Mask.from_sdpa(lazy.materialise()))
    with watched() as seen:
        budget.assert_holds(attend(Layer(), q, k, v, lazy)[0].transpose(1, 2))
        lazy[:, :, 0] = True
        attend(Layer(), q, k, v, lazy)
    # A tensor that was only read still says what its mask says.
    assert [str(matrix.mask) for matrix in seen] == [str(mask), f"may_attend{tuple(lazy.shape)}"]


# ---- float masks, which hide by the lowest number ----------------------------------------------


def hiding(shape: tuple[int, ...], dtype: torch.dtype, *, adds: bool) -> tuple[Tensor, Tensor]:
    """A float mask, and where it hides: some keys of each query, all of query 5 of sample 1."""
    added = normal(*shape, seed=5)
    hidden = added > 0.4
    hidden[..., 3] = False
    if shape[0] == BATCH and shape[2] == QUERIES:
        hidden[1, :, 5] = True
    added = (added if adds else torch.zeros_like(added)).to(dtype)
    return added.masked_fill(hidden, torch.finfo(dtype).min), hidden


SHAPES = [(BATCH, 1, 1, KEYS), (BATCH, 1, QUERIES, KEYS), (1, HEADS, QUERIES, KEYS)]


def what_is_shown(*inputs: Tensor | None) -> tuple[AttentionMatrix, Tensor]:
    seen: list[AttentionMatrix] = []

    def watcher(matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
        seen.append(matrix)
        return outputs

    with attention_hook(watcher):
        out, _ = attend(Layer(), *inputs)  # type: ignore[arg-type]
    return seen[0], out


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("adds", [True, False], ids=["adds", "only hides"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lowest_number_hides(shape: tuple[int, ...], adds: bool, dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    mask, hidden = hiding(shape, dtype, adds=adds)
    matrix, out = what_is_shown(q, k, v, mask)
    weights = matrix.dense()
    nowhere = hidden.expand(BATCH, HEADS, QUERIES, KEYS)
    assert bool((weights[nowhere] == 0).all())
    empty = nowhere.all(-1)
    # Where the lowest number is no more than added, such a query sees all keys alike.
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    assert bool((matrix.logsumexp()[empty] == -torch.inf).all())
    exact = torch.where(hidden, -torch.inf, mask.double())
    k64, v64 = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q.double() @ k64.mT * q.shape[-1] ** -0.5 + exact
    assert torch.equal(scores.softmax(-1).isnan().all(-1), empty)
    theirs = (scores.softmax(-1).nan_to_num(0.0) @ v64).transpose(1, 2)
    # A product of head_dim terms, and one of as many terms as there are keys, of mean values.
    bound = (KEYS + q.shape[-1]) * torch.finfo(dtype).eps * float(v64.abs().amax())
    assert float((out.double() - theirs).abs().amax()) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [True, False], ids=["adds", "only hides"])
def test_where_a_key_is_left_outputs_are_those_of_transformers(
    adds: bool, dtype: torch.dtype
) -> None:
    q, k, v = ordinary(dtype)
    mask, _ = hiding((1, HEADS, QUERIES, KEYS), dtype, adds=adds)
    same_as(sdpa_attention_forward, Layer(), q, k, v, mask=mask)


def test_numbers_that_are_not_the_lowest_are_added() -> None:
    q, k, v = ordinary(torch.float32)
    mask = torch.zeros(1, 1, 1, KEYS)
    mask[..., 4] = -1e4
    matrix, _ = what_is_shown(q, k, v, mask)
    assert str(matrix.mask) == "everything"
    assert len(matrix.score_bias.tensors) == 1


def test_a_float_mask_keeps_its_gradient() -> None:
    q, k, v = ordinary(torch.float64)
    mask, hidden = hiding((1, HEADS, QUERIES, KEYS), torch.float64, adds=False)
    mask.requires_grad_()
    attend(Layer(), q, k, v, mask)[0].square().sum().backward()
    assert mask.grad is not None
    assert bool((mask.grad[hidden] == 0).all())
    assert bool((mask.grad[~hidden] != 0).all())


@pytest.mark.usefixtures("shapes_unchecked")
def test_nan_in_a_float_mask_hides_nothing() -> None:
    q, k, v = ordinary(torch.float32)
    mask, _ = hiding((BATCH, 1, QUERIES, KEYS), torch.float32, adds=False)
    mask[2, 0, 0, 0] = torch.nan
    with pytest.raises(MaskError, match="nan"):
        attend(Layer(), q, k, v, mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_of_the_lowest_number_hides_and_no_less(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    half = torch.tensor(torch.finfo(dtype).min, dtype=dtype) / 2
    mask = torch.zeros(1, 1, 1, KEYS, dtype=dtype)
    mask[..., 4], mask[..., 5] = half, torch.nextafter(half, torch.zeros_like(half))
    matrix, _ = what_is_shown(q, k, v, mask)
    (clause,) = matrix.mask.clauses_of_kind(Dense)
    assert (~clause.allowed).flatten().nonzero().flatten().tolist() == [4]
