"""AttentionMatrix: what does not fit together is refused, with its numbers."""

import math
from typing import Any

import torch

from headwise.errors import (
    ArgumentError,
    DTypeError,
    LimitError,
    MaskError,
    OptionError,
    ShapeError,
)
from headwise.matrix.operator import AttentionMatrix
from tests.refusals import refusals

Q, K = torch.zeros(3, 6, 24, 10), torch.zeros(3, 2, 29, 10)
NAN = torch.full((6,), math.nan, dtype=torch.float64)
REFUSED: dict[str, tuple[Any, ...]] = {
    "rank": (lambda: AttentionMatrix(Q[0], K), ShapeError, ["(6, 24, 10)", "(batch, heads"]),
    "batch": (lambda: AttentionMatrix(Q, K[:2]), ShapeError, ["batch 3", "batch 2"]),
    "head_dim": (lambda: AttentionMatrix(Q, K[..., :9]), ShapeError, ["head_dim 10", "head_dim 9"]),
    "groups": (lambda: AttentionMatrix(Q[:, :5], K), ShapeError, ["5 heads and 2 kv_heads"]),
    "dtype": (lambda: AttentionMatrix(Q, K.double()), DTypeError, ["float32", "float64"]),
    "integers": (lambda: AttentionMatrix(Q.int(), K.int()), DTypeError, ["torch.int32"]),
    "bare mask": (
        lambda: AttentionMatrix(Q, K, mask=Q > 0),
        MaskError,
        ["from_sdpa", "from_torch"],
    ),
    "scale": (lambda: AttentionMatrix(Q, K, scale=math.nan), OptionError, ["scale=nan"]),
    "softcap": (lambda: AttentionMatrix(Q, K, softcap=0.0), OptionError, ["softcap=0.0"]),
    "scale overflows": (lambda: AttentionMatrix(Q, K, scale=-1e39), OptionError, ["scale=-1e+39"]),
    "softcap overflows": (
        lambda: AttentionMatrix(Q.half(), K.half(), softcap=1e39),
        OptionError,
        ["softcap=1e+39", "torch.float16", "from 1.2e-38 to 3.4e+38"],
    ),
    "sink overflows": (
        lambda: AttentionMatrix(Q, K, sink=torch.full((6,), 1e39, dtype=torch.float64)),
        OptionError,
        ["1e+39", "up to 3.4e+38"],
    ),
    "a sink of NaN": (lambda: AttentionMatrix(Q, K, sink=NAN), OptionError, ["holds nan"]),
    "lists": (lambda: AttentionMatrix([1, 2], [3, 4]), DTypeError, ["q of type list", "tensor"]),
    "no keys": (lambda: AttentionMatrix(Q, None), DTypeError, ["k of type NoneType"]),
    "a list of values": (lambda: AttentionMatrix(Q, K) @ [1], DTypeError, ["v of type list"]),
    "a list of y": (lambda: AttentionMatrix(Q, K).mT @ [1], DTypeError, ["y of type list"]),
    "a number as sink": (lambda: AttentionMatrix(Q, K, sink=1.0), ShapeError, ["sink=1.0"]),
    "sink": (lambda: AttentionMatrix(Q, K, sink=torch.zeros(5)), ShapeError, ["(5,)", "heads 6"]),
    "values": (
        lambda: AttentionMatrix(Q, K) @ K[:, :, :28],
        ShapeError,
        ["(3, 2, 28, 10)", "keys 29"],
    ),
    "value heads": (
        lambda: AttentionMatrix(Q, K) @ K.repeat(1, 2, 1, 1),
        ShapeError,
        ["kv_heads 2"],
    ),
    "value dtype": (lambda: AttentionMatrix(Q, K) @ K.double(), DTypeError, ["v of dtype"]),
    "transposed": (
        lambda: AttentionMatrix(Q, K).mT @ K,
        ShapeError,
        ["(3, 2, 29, 10)", "queries 24"],
    ),
    "pool": (lambda: AttentionMatrix(Q, K).pool(25, 3), OptionError, ["25 queries", "24 queries"]),
    "topk": (lambda: AttentionMatrix(Q, K).topk(30), OptionError, ["topk(30)", "29 keys"]),
    "topk of text": (lambda: AttentionMatrix(Q, K).topk("a"), OptionError, ["topk('a')"]),
    "topk of a half": (lambda: AttentionMatrix(Q, K).topk(1.5), OptionError, ["topk(1.5)"]),
    "topk's former argument": (
        lambda: AttentionMatrix(Q, K).topk(2, rows=None),
        ArgumentError,
        ["no argument 'rows'", "A.topk(k, queries=index)"],
    ),
    "pool of a half": (lambda: AttentionMatrix(Q, K).pool(1.5, 1), OptionError, ["1.5 queries"]),
    "a scale of text": (lambda: AttentionMatrix(Q, K, scale="a"), OptionError, ["scale='a'"]),
    "a softcap of text": (lambda: AttentionMatrix(Q, K, softcap="a"), OptionError, ["softcap='a'"]),
    "a scale in a tensor": (
        lambda: AttentionMatrix(Q, K, scale=torch.tensor(0.5)),
        OptionError,
        ["a torch.float32 tensor of shape ()", "float(t)", "q * factor"],
    ),
    "a softcap that is learned": (
        lambda: AttentionMatrix(Q, K, softcap=torch.nn.Parameter(torch.tensor(5.0))),
        OptionError,
        ["softcap=float(t)"],
    ),
    "a complex sink": (
        lambda: AttentionMatrix(Q, K, sink=torch.zeros(6, dtype=torch.complex64)),
        ShapeError,
        ["torch.complex64", "a float"],
    ),
    "diagonal": (lambda: AttentionMatrix(Q, K).diagonal(1.0), OptionError, ["diagonal(1.0)"]),
    "limit": (lambda: AttentionMatrix(Q, K).dense(limit="a"), OptionError, ["limit='a'", "bytes"]),
    "dropout of text": (
        lambda: AttentionMatrix(Q, K).dropped(K, dropout_p="a"),
        OptionError,
        ["got 'a'"],
    ),
    "values of an average": (
        lambda: AttentionMatrix(Q, K).outputs_and_average([1]),
        DTypeError,
        ["v of type list"],
    ),
    "seen_by": (
        lambda: AttentionMatrix(Q, K).seen_by([True]),
        ShapeError,
        ["[True]", "queries 24"],
    ),
    "seen_by of numbers": (
        lambda: AttentionMatrix(Q, K).seen_by(torch.ones(3, 24)),
        ShapeError,
        ["torch.float32", "bool"],
    ),
    "causal": (
        lambda: AttentionMatrix(Q, K, is_causal=True),
        ArgumentError,
        ["is_causal", "mask=Mask.causal()"],
    ),
    "attn_mask": (
        lambda: AttentionMatrix(Q, K, attn_mask=Q > 0),
        ArgumentError,
        ["Mask.from_sdpa(m)", "ScoreBias.dense(m"],
    ),
    "dropout_p": (
        lambda: AttentionMatrix(Q, K, dropout_p=0.5),
        ArgumentError,
        ["A.dropped(v, dropout_p=0.5)"],
    ),
    "gqa": (lambda: AttentionMatrix(Q, K, enable_gqa=True), ArgumentError, ["leave it out"]),
    "dense": (lambda: AttentionMatrix(Q, K).dense(limit=1000), LimitError, ["50 kB", "1.0 kB"]),
}

test_what_does_not_fit_is_refused_with_its_numbers = refusals(REFUSED)
