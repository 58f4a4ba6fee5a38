"""Kernels: what they take, what they return, and their base class.

A new kernel is one class in one file, and one entry in `dispatch.KERNELS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.function import stages
from headwise.masks.bound import BoundMask, zero_padding
from headwise.masks.clauses.lengths import KEYS, QUERIES
from headwise.masks.score_bias import BoundBias

HALF = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and sums: float32 for bfloat16 and float16, else the dtype."""
    return torch.float32 if dtype in HALF else dtype


@dataclass(frozen=True, eq=False)
class KernelInput:
    """One attention matrix at known sizes; shapes as in `headwise.AttentionMatrix`."""

    q: Tensor
    k: Tensor
    mask: BoundMask
    bias: BoundBias
    scale: float
    softcap: float | None
    sink: Tensor | None
    is_zeroed: bool = False  # True if padding of queries, keys and values is finite already

    def zeroed(self) -> KernelInput:
        """Return the input with zeros at the padding that the mask states."""
        if self.is_zeroed:
            return self
        q = zero_padding(self.q, self.mask.stated_tokens(QUERIES))
        k = zero_padding(self.k, self.mask.stated_tokens(KEYS))
        return replace(self, q=q, k=k, is_zeroed=True)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def accumulation_dtype(self) -> torch.dtype:  # read often, so it calls no function
        return torch.float32 if self.q.dtype in HALF else self.q.dtype

    def scores_of_queries(self, rows: Tensor | None = None) -> Tensor:
        """Return the scores of some queries, or of all, in queries x keys memory."""
        q, exact = self.q, self.accumulation_dtype
        options: dict[str, Any] = {"mask": self.mask, "score_bias": self.bias}
        options |= {"scale": self.scale, "softcap": self.softcap}
        if rows is None:
            rows = torch.arange(q.shape[2], device=q.device)
        else:
            q = q.index_select(2, rows)
        return stages.scores_at_rows(q.to(exact), self.k.to(exact), rows, **options)


class Requested(NamedTuple):
    """Statistics to compute besides peak and log_sum, which every pass computes."""

    entropy: bool = False
    received: bool = False
    average: bool = False
    query_blocks: int = 0  # `cells` if both are above 0
    key_blocks: int = 0


class KernelResult(NamedTuple):
    """Results of one pass; those that were not requested have no elements."""

    out: Tensor  # (batch, heads, queries, value_dim)
    transposed: Tensor  # (batch, heads, keys, y_dim)
    peak: Tensor  # (batch, heads, queries): largest score, -inf without keys
    log_sum: Tensor  # (batch, heads, queries): log Z, 0 without keys and sink
    entropy: Tensor  # (batch, heads, queries), nats
    received: Tensor  # (batch, heads, keys)
    average: Tensor  # (batch, queries, keys)
    cells: Tensor  # (batch, heads, blocks of queries, blocks of keys)


def result_of_outputs_only(out: Tensor) -> KernelResult:
    return KernelResult(out, *[out.new_empty(0)] * (len(KernelResult._fields) - 1))


@dataclass(frozen=True, eq=False)
class Task:
    """Products and statistics to compute of one attention matrix."""

    problem: KernelInput
    v: Tensor | None = None  # of ``A @ v``, (batch, kv_heads, keys, value_dim)
    y: Tensor | None = None  # of ``A.mT @ y``, (batch, heads, queries, y_dim)
    statistics: Requested | None = None  # the results besides these products
    dropout_p: float = 0.0  # probability of dropping each weight before the product with ``v``
    cache: dict[str, Any] = field(default_factory=dict, init=False)  # of a kernel, for this task

    def zeroed(self) -> Task:
        """Return the task with zeros at the padding that the mask states, also of v and y."""
        if self.problem.is_zeroed or not self.problem.mask.clauses:
            return self
        v, y = (
            x if x is None else zero_padding(x, self.problem.mask.stated_tokens(axis))
            for x, axis in ((self.v, KEYS), (self.y, QUERIES))
        )
        return replace(self, problem=self.problem.zeroed(), v=v, y=y)

    @property
    def values_if_only_product(self) -> Tensor | None:
        """``v`` if its product is the whole task, else None."""
        return self.v if self.y is None and self.statistics is None else None

    @property
    def requested_statistics(self) -> Requested:
        return self.statistics or Requested()  # no field default: a compiler cannot make one


class Cost(NamedTuple):
    """Floating-point operations, and memory besides the result in bytes."""

    operations: int
    memory: int


class Kernel(ABC):
    """Implementation of tasks on an attention matrix."""

    name: ClassVar[str]
    reads_padding: ClassVar[bool] = True  # False if it passes over what the mask states as padding

    @abstractmethod
    def refusal_reason(self, task: Task) -> str | None:
        """Return the reason for not taking this task in one line, or None to take it."""

    @abstractmethod
    def run(self, task: Task) -> KernelResult:
        """Return the requested results; others may have no elements."""

    @abstractmethod
    def cost(self, task: Task) -> Cost:
        """Return the operations and the memory of a run."""

    def choice_reason(self, task: Task) -> str | None:  # noqa: ARG002
        """Return the reason for choosing this kernel; None for the last kernel's refusal."""
        return None
