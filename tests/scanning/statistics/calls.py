"""Attention calls of every kind, for the tests of the head statistics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.function import stages
from headwise.function.rounding import ELEMENTARY, Roundoff, sum_error_bound
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from tests.honest import normal
from tests.scanning.statistics.dense_statistics import Seen

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 6, 2, 24, 29
HEAD_DIM, VALUE_DIM, EMBED_DIM, VOCABULARY = 10, 7, 40, 9
LENGTHS = torch.tensor([17, 24, 3])


@dataclass(frozen=True)
class Call:
    """Tensors that may be rounded, in ``inputs``, and everything else."""

    inputs: tuple[Tensor, ...]  # q, k, values, outputs, out_proj, residual, unembedding
    options: dict[str, Any]
    sequences: CapturedCall
    samples: int = 64

    def observation(self) -> CapturedCall:
        q, k, values, outputs, out_proj, residual, unembedding = self.inputs
        options = {
            name: value.to(q.dtype) if name == "sink" else value
            for name, value in self.options.items()
        }
        return replace(
            self.sequences,
            matrix=AttentionMatrix(q, k, **options),
            values=values,
            outputs=outputs,
            out_proj=out_proj,
            residual=residual,
            unembedding=unembedding,
        )

    def seen(self, *inputs: Tensor) -> Seen:
        """The same written down, in the dtype of the inputs."""
        q, k, values, outputs, out_proj, residual, unembedding = inputs
        known, options = self.sequences, dict(self.options)
        sink = options.pop("sink", None)
        s = stages.scores(q, k, **options)
        sink = None if sink is None else sink.to(self.inputs[0].dtype).to(q.dtype)
        assert known.tokens is not None
        assert known.separators is not None
        assert known.specials is not None
        return Seen(
            scores=s,
            weights=stages.weights_from_scores(s, sink),
            sink_logit=sink,
            real_queries=known.real_queries,
            real=known.real_keys,
            own_key=known.own_key,
            tokens=known.tokens,
            separators=known.separators,
            specials=known.specials,
            values=values,
            outputs=outputs,
            out_proj=out_proj,
            residual=residual,
            unembedding=unembedding,
            samples=self.samples,
        )


@dataclass(frozen=True)
class Kind:
    """How a call differs from plain self-attention."""

    options: Callable[[], dict[str, Any]] = dict
    real: Callable[[], Tensor | None] = lambda: None
    keys: int = QUERIES
    own_key: int | None = 0
    dtype: torch.dtype = torch.float32
    samples: int = 64
    unknown: float = 0.0  # the share of keys whose token is not known
    rows: int = VOCABULARY  # of the unembedding

    def call(self, *, batch: slice = slice(None)) -> Call:
        """Draw it; ``batch`` keeps some of the sequences, where the mask is the same for all."""
        q = normal(BATCH, HEADS, QUERIES, HEAD_DIM, seed=1) * 2
        k = normal(BATCH, KV_HEADS, self.keys, HEAD_DIM, seed=2)
        v = normal(BATCH, KV_HEADS, self.keys, VALUE_DIM, seed=3)
        q, k, v = (x[batch].to(self.dtype) for x in (q, k, v))
        options = self.options()
        sink = {"sink": options["sink"].to(self.dtype)} if "sink" in options else {}
        matrix = AttentionMatrix(q, k, **(options | sink))
        rest = (
            normal(HEADS, VALUE_DIM, EMBED_DIM, seed=4),
            normal(BATCH, QUERIES, EMBED_DIM, seed=5)[batch],
            normal(VOCABULARY, EMBED_DIM, seed=6)[: self.rows],
        )
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(0, VOCABULARY, (BATCH, self.keys), generator=generator)
        tokens = tokens.masked_fill(scattered(BATCH, self.keys, share=self.unknown), -1)[batch]
        real = self.real()
        sequences = CapturedCall.for_self_attention(
            matrix,
            real=None if real is None else real[batch],
            own_key=self.own_key,
            tokens=tokens,
            separators=tokens == 1,
            specials=tokens == 2,
        )
        inputs = (q, k, v, matrix @ v, *(x.to(self.dtype) for x in rest))
        return Call(inputs, options, sequences, self.samples)


def first_ones(lengths: Tensor, size: int = QUERIES) -> Tensor:
    return torch.arange(size) < lengths[:, None]


def last_ones(lengths: Tensor, size: int = QUERIES) -> Tensor:
    return torch.arange(size) >= size - lengths[:, None]


def scattered(*sizes: int, share: float = 0.6) -> Tensor:
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(8)) < share


def with_hidden_rows() -> Tensor:
    """Some queries see nothing, other ones for each head; so does a whole sequence for head 5."""
    allowed = scattered(BATCH, HEADS, QUERIES, QUERIES)
    for head in range(HEADS):
        allowed[0, head, [head, 11]] = False
    allowed[2, 5] = False
    return allowed


def packed() -> Tensor:
    ids = torch.zeros(BATCH, QUERIES, dtype=torch.long)
    ids[0, 9:], ids[1, 3:14], ids[1, 14:], ids[2, 20:] = 1, 1, 2, -1
    return ids


def everything() -> dict[str, Any]:
    return {
        "mask": Mask.window(6, 2) & Mask.lengths(keys=LENGTHS, queries=LENGTHS),
        "score_bias": ScoreBias.alibi(normal(HEADS, seed=9).abs()),
        "softcap": 5.0,
        "sink": normal(HEADS, seed=10),
    }


def hiding_bias() -> dict[str, Any]:
    bias = normal(HEADS, QUERIES, QUERIES, seed=11, dtype=torch.float32)
    bias = bias.masked_fill(~scattered(HEADS, QUERIES, QUERIES), -torch.inf)
    return {"score_bias": ScoreBias.dense(bias, axes="heads queries keys")}


KINDS: dict[str, Kind] = {
    "none": Kind(),
    "causal": Kind(lambda: {"mask": Mask.causal()}),
    "window": Kind(lambda: {"mask": Mask.window(4, 2)}),
    "one side": Kind(lambda: {"mask": Mask.window(None, 3)}),
    "lengths": Kind(lambda: {"mask": Mask.lengths(keys=LENGTHS)}, real=lambda: first_ones(LENGTHS)),
    "padding in sight": Kind(real=lambda: first_ones(LENGTHS)),
    "both lengths": Kind(
        lambda: {"mask": Mask.causal() & Mask.lengths(keys=LENGTHS, queries=LENGTHS)},
        real=lambda: first_ones(LENGTHS),
    ),
    "left padding": Kind(
        lambda: {"mask": Mask.causal() & Mask.may_attend(last_ones(LENGTHS), axes="batch keys")},
        real=lambda: last_ones(LENGTHS),
    ),
    "segments": Kind(
        lambda: {"mask": Mask.segments(packed(), packed())}, real=lambda: packed() >= 0
    ),
    "dense": Kind(
        lambda: {
            "mask": Mask.may_attend(scattered(HEADS, QUERIES, QUERIES), axes="heads queries keys")
        }
    ),
    "hidden rows": Kind(
        lambda: {"mask": Mask.may_attend(with_hidden_rows(), axes="batch heads queries keys")}
    ),
    "alibi": Kind(
        lambda: {
            "mask": Mask.causal(),
            "score_bias": ScoreBias.alibi(normal(HEADS, seed=9).abs()),
        }
    ),
    "hiding bias": Kind(hiding_bias),
    "sink": Kind(lambda: {"mask": Mask.causal(), "sink": normal(HEADS, seed=10)}),
    "large sinks": Kind(
        lambda: {"mask": Mask.causal(), "sink": torch.tensor([0.0, 12, 17, 20, 24, 30])}
    ),
    "unknown tokens": Kind(lambda: {"mask": Mask.causal()}, unknown=0.4),
    "few rows": Kind(lambda: {"mask": Mask.causal()}, rows=5),
    "softcap": Kind(lambda: {"softcap": 3.0}),
    "cross": Kind(keys=KEYS, own_key=None),
    "cached": Kind(
        lambda: {"mask": Mask.causal(align="bottom-right")}, keys=KEYS, own_key=KEYS - QUERIES
    ),
    "bfloat16": Kind(
        lambda: {"mask": Mask.causal(), "sink": normal(HEADS, seed=10)}, dtype=torch.bfloat16
    ),
    "float64": Kind(lambda: {"mask": Mask.causal()}, dtype=torch.float64),
    "few samples": Kind(
        lambda: {"mask": Mask.lengths(keys=LENGTHS)}, real=lambda: first_ones(LENGTHS), samples=5
    ),
    "everything": Kind(everything, real=lambda: first_ones(LENGTHS)),
}


def roundoff(terms: int, dtype: torch.dtype) -> float:
    """Relative error of a statistic of so many weights, beyond what errors of the scores do."""
    return Roundoff.of(dtype).u * (2 * sum_error_bound(terms) + 2 * ELEMENTARY + 2)


def assert_is(found: Tensor, expected: Tensor | float, *, terms: int = 128) -> None:
    """Equal up to rounding in float64; NaN where, and only where, NaN is expected.

    It may be off by u * (2 growth(n) + 2 f + 2) of its size, or of 1, after n ``terms``: derived in
    `tests.scanning.statistics.test_standard_statistics`.
    """
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(found)
    size = expected.abs().clamp(min=1.0)
    allowed = roundoff(terms, torch.float64) * size
    assert torch.equal(found.isnan(), expected.isnan())
    assert ((found - expected).abs().nan_to_num(0.0) <= allowed.nan_to_num(1.0)).all()
