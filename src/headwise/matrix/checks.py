"""Checks of the operands of an attention matrix, and their messages."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, LimitError, OptionError, ShapeError
from headwise.support.arguments import ArgumentAdvice, is_number, require_tensors
from headwise.support.tensors import convert_to_int64, convert_to_int_or_none, has_integer_dtype
from headwise.support.text import describe_sizes, describe_value, human_bytes
from headwise.support.tracing import may_check_values

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Advice for the argument names of scaled_dot_product_attention.
SDPA_ADVICE = {
    "attn_mask": ArgumentAdvice(
        "a Mask for a bool mask (True = may attend there), a ScoreBias for a float one",
        'mask=Mask.from_sdpa(m), or score_bias=ScoreBias.dense(m, axes="queries keys")',
    ),
    "is_causal": ArgumentAdvice("a mask", "mask=Mask.causal()"),
    "dropout_p": ArgumentAdvice("a matrix before dropout", "A.dropped(v, dropout_p={value})"),
    "enable_gqa": ArgumentAdvice(
        "any number of kv_heads that divides that of heads", "leave it out"
    ),
}
ROWS_ADVICE = {
    "rows": ArgumentAdvice("queries=, the name of this argument", "A.topk(k, queries=index)")
}


def check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k)):
        if type(tensor) is not Tensor:
            require_tensors(**{name: tensor})
            _refuse_dtensor(name, tensor)
    if q.dim() != 4 or k.dim() != 4:
        raise ShapeError(
            saw=f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)}",
            needed="q (batch, heads, queries, head_dim) and k (batch, kv_heads, keys, head_dim)",
            do="split the heads first, e.g. x.unflatten(-1, (heads, head_dim)).transpose(1, 2)",
        )
    (batch, heads, _, head_dim), (k_batch, kv_heads, _, k_head_dim) = q.shape, k.shape
    if batch != k_batch or head_dim != k_head_dim:
        raise ShapeError(
            saw=f"q {describe_sizes(q, ('batch', 'heads', 'queries', 'head_dim'))} "
            f"and k {describe_sizes(k, ('batch', 'kv_heads', 'keys', 'head_dim'))}",
            needed="the same batch and the same head_dim",
            do="check the projections' widths and the order of the axes",
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            saw=f"{heads} heads and {kv_heads} kv_heads",
            needed="heads divisible by kv_heads: each kv head serves a group of query heads",
            do=f"use a number of kv_heads that divides {heads}, and check the order of the axes: "
            "(batch, heads, length, width)",
        )
    check_operand_dtype_and_device("k", k, q)


def _refuse_dtensor(name: str, tensor: Tensor) -> None:
    """Raise OptionError for a tensor that is divided over processes, as torch's DTensor is."""
    if hasattr(tensor, "to_local"):
        raise OptionError(
            saw=f"{name} is a {type(tensor).__name__}, a tensor divided over processes",
            needed="a plain tensor: the heads and tokens that this process computes",
            do=f"{name}.to_local() where the tensor is divided by batch or heads alone",
        )


def check_operand_dtype_and_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if type(tensor) is not Tensor:
        _refuse_dtensor(name, tensor)
    if tensor.dtype != q.dtype or q.dtype not in DTYPES:
        raise DTypeError(
            saw=f"q of dtype {q.dtype} and {name} of dtype {tensor.dtype}",
            needed="one dtype for both: float64, float32, bfloat16 or float16",
            do=f"{name}.to({q.dtype})" if q.dtype in DTYPES else "e.g. q.float()",
        )
    if tensor.device != q.device:
        saw = f"q on {q.device} and {name} on {tensor.device}"
        raise DeviceError(saw=saw, needed="one device", do=f'{name}.to("{q.device}")')


def check_scale_softcap_and_sink(
    q: Tensor, scale: float | None, softcap: float | None, sink: Tensor | None
) -> None:
    check_scale_and_softcap(scale, softcap, dtype=q.dtype)
    if sink is None:
        return
    is_real = isinstance(sink, Tensor) and sink.is_floating_point()
    if not is_real or sink.shape != q.shape[1:2]:
        saw = f"sink={describe_value(sink)}"
        needed = f"one logit, a float, for each head: (heads {q.shape[1]},)"
        raise ShapeError(saw=saw, needed=needed, do="e.g. torch.zeros(heads)")
    if sink.device != q.device:
        check_operand_dtype_and_device("sink", sink.to(q.dtype), q)
    limit = _score_range(q.dtype).max
    largest = float(sink.detach().max()) if may_check_values(sink) and sink.numel() else 0.0
    if not largest <= limit:  # NaN included
        raise OptionError(
            saw=f"a sink that holds {largest}, with queries of dtype {q.dtype}",
            needed=f"numbers up to {limit:.2g}, or -inf for a head without a sink",
            do="replace NaN and +inf, or use q.double() and k.double()",
        )


def check_scale_and_softcap(
    scale: float | None, softcap: float | None, *, dtype: torch.dtype
) -> None:
    """Check that scale and softcap are in the range of scores, for queries of ``dtype``."""
    limits = _score_range(dtype)
    # Comparisons, not math.isfinite: they also hold for the symbolic floats of a compiled graph.
    if scale is not None and not (is_number(scale) and abs(scale) <= limits.max):
        raise OptionError(
            saw=f"scale={describe_value(scale)} with queries of dtype {dtype}",
            needed=f"a finite number from {limits.min:.2g} to {limits.max:.2g}",
            do=_advise_plain_number("scale", scale) or "1/sqrt(head_dim) is the default",
        )
    if softcap is not None and not (is_number(softcap) and limits.tiny <= softcap <= limits.max):
        raise OptionError(
            saw=f"softcap={describe_value(softcap)} with queries of dtype {dtype}",
            needed=f"a number from {limits.tiny:.2g} to {limits.max:.2g}, or None for no softcap",
            do=_advise_plain_number("softcap", softcap) or "e.g. softcap=50.0",
        )


def _advise_plain_number(name: str, value: object) -> str | None:
    if not isinstance(value, Tensor):
        return None
    learned = "; multiply the queries by a learned factor: q * factor"
    return f"{name}=float(t) of one number" + (learned if name == "scale" else "")


def _score_range(dtype: torch.dtype) -> torch.finfo:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)


def raise_operand_error(product: str, operand: Tensor, needed: str) -> None:
    saw = f"{product} with an operand of shape {tuple(operand.shape)}"
    do = "check the length and the number of heads of the operand"
    raise ShapeError(saw=saw, needed=needed, do=do)


def require_query_positions(index: Tensor, queries: int, *, call: str) -> Tensor:
    wrong: str | None = None
    if not isinstance(index, Tensor) or index.dim() != 1 or not has_integer_dtype(index):
        wrong = describe_value(index)
    elif (
        may_check_values(index := convert_to_int64(index, "rows"))
        and index.numel()
        and not 0 <= int(index.min()) <= int(index.max()) < queries
    ):
        wrong = f"{int(index.min())} to {int(index.max())}"
    if wrong is not None:
        saw = f"A.{call} with index {wrong}, of a matrix with {queries} queries"
        needed = f"a 1-D integer tensor of queries from 0 to {queries - 1}"
        raise OptionError(saw=saw, needed=needed, do="e.g. index = torch.tensor([0])")
    return index


def check_dense_memory_limit(limit: int | None, size: int, matrix: object) -> None:
    if limit is not None and not is_number(limit):
        saw = f"dense(limit={describe_value(limit)})"
        needed = "a number of bytes, or None for no limit"
        raise OptionError(saw=saw, needed=needed, do="e.g. dense(limit=2**34)")
    if limit is not None and size > limit:
        saw = f"dense() of {matrix!r}"
        do = "use products, rows, diagonals or pool, or raise dense(limit=...)"
        raise LimitError(saw=saw, needed=f"at most {human_bytes(limit)}", do=do)


def check_probability(dropout_p: float, error: type[OptionError] = OptionError) -> None:
    if not (is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise error(
            saw="dropout probability has to be between 0 and 1, but got "
            f"{describe_value(dropout_p)}",
            needed="0 <= dropout <= 1",
            do="set layer.dropout, e.g. 0.1",
        )


def require_diagonal_offset(offset: SupportsIndex, queries: int, keys: int) -> int:
    count = convert_to_int_or_none(offset)  # NumPy's integers wrap
    if count is None:
        saw = f"A.diagonal({describe_value(offset)})"
        needed = "a whole number: key - query"
        raise OptionError(saw=saw, needed=needed, do="e.g. A.diagonal(-1), the previous token")
    return max(-queries, min(keys, count))  # diagonals outside the matrix are empty


def require_top_key_count(k: SupportsIndex, keys: int) -> int:
    count = convert_to_int_or_none(k)
    if count is None or not 0 <= count <= keys:
        saw = f"topk({describe_value(k)}) over {keys} keys"
        raise OptionError(saw=saw, needed=f"k from 0 to {keys}", do=f"topk({min(5, keys)})")
    return count


def require_block_count(axis: str, blocks: SupportsIndex, size: int) -> int:
    count = convert_to_int_or_none(blocks)
    if count is None or not 1 <= count <= max(1, size):
        saw = f"pool to {describe_value(blocks)} {axis} of a matrix with {size} {axis}"
        needed = f"a whole number from 1 to {size}"
        raise OptionError(saw=saw, needed=needed, do=f"pool to 1 to {max(1, size)} blocks")
    return count


def check_seen_by(queries: Tensor, *, batch: int, length: int) -> None:
    is_bool = isinstance(queries, Tensor) and queries.dtype == torch.bool
    if not is_bool or queries.shape != (batch, length):
        needed = f"a bool tensor of shape (batch {batch}, queries {length})"
        do = f"torch.ones({batch}, {length}, dtype=torch.bool) for all queries"
        raise ShapeError(saw=f"seen_by({describe_value(queries)})", needed=needed, do=do)
