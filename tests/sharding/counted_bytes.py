"""Count of the bytes that this rank sends in collective calls.

A dispatch mode sees every collective before its backend does: those of torch.distributed, the
functional ones of DTensor, FSDP2 and compiled graphs, and point-to-point calls; in the forward pass
and in a backward pass that runs inside the context. The count is that of the payload, computed from
the arguments of the call, for n ranks:

| kind | bytes sent by a rank, of x bytes that it gives to the call |
| --- | --- |
| all_gather | (n - 1) x |
| reduce_scatter | x (n - 1) / n |
| all_reduce | 2 x (n - 1) / n: a reduce_scatter and an all_gather |
| all_to_all | x without the rank's own part |
| broadcast, scatter | at the source: (n - 1) x, or x without the source's own part |
| gather, reduce | x, and nothing at the destination |
| send | x |

A backend may send more or less on the wire: gloo's reduce_scatter sends as much as an all_reduce.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.support.text import human_bytes


@dataclass
class SentBytes:
    """Bytes that this rank sent, by kind of collective.

    Attributes:
        by_kind: bytes of each kind, such as "all_to_all" or "send".
        calls: number of calls of each kind.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.by_kind.total()

    def __str__(self) -> str:
        kinds = [(kind, self.calls[kind], self.by_kind[kind]) for kind in sorted(self.calls)]
        rows = [*kinds, ("total", self.calls.total(), self.total)]
        return "\n".join(f"{k:<15} {calls:>5} calls {human_bytes(n):>8}" for k, calls, n in rows)


@contextmanager
def counted_bytes() -> Iterator[SentBytes]:
    """Count the bytes that this rank sends inside the context.

    Each rank counts its own calls:

        with counted_bytes() as sent:
            attend(q, k, v, mesh).sum().backward()
        sent.total, sent.by_kind["all_to_all"]

    Operators run one by one under a dispatch mode, so that a kernel that reads values (sequences
    of a padded batch, one by one) is replaced by one that does not. Bytes are the same.
    """
    sent = SentBytes()
    with _CollectiveCounter(sent):
        yield sent


class _CollectiveCounter(TorchDispatchMode):
    def __init__(self, sent: SentBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent = sent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        operator = name.split(".")[0].rstrip("_")
        if namespace in NAMESPACES and operator not in SILENT:
            names = [argument.name for argument in func._schema.arguments]
            self._count_call(operator, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _count_call(self, operator: str, arguments: dict[str, Any]) -> None:
        if operator not in KINDS:
            raise NotImplementedError(f"the collective {operator} inside counted_bytes()")
        kind = KINDS[operator]
        self._sent.by_kind[kind] += FORMULAS[kind](_CollectiveCall(arguments))
        self._sent.calls[kind] += 1


class _CollectiveCall:
    """Arguments of one collective.

    Attributes:
        arguments: by name.
        given: the tensors that this rank gives to the call.
        size: number of ranks.
        rank: number of this rank in the group of the call.
    """

    # Names of `given` in the operators' schemas.
    GIVEN = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.given = next(arguments[name] for name in self.GIVEN if name in arguments)

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group: Any = self.arguments.get("process_group", self.arguments.get("group_name"))
        if isinstance(group, str):
            group = _resolve_process_group(group)  # type: ignore[arg-type]
        return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)

    @property
    def ranks(self) -> int:
        return int(self._group.size())

    @property
    def is_root(self) -> bool:
        """True if this rank is the source or the destination of the call."""
        root = self.arguments.get("root_rank", self.arguments.get("src"))
        return bool(root == self._group.rank())

    @property
    def given_bytes(self) -> int:
        return _count_tensor_bytes(self.given)

    @property
    def bytes_for_others(self) -> int:
        """Bytes without this rank's own part."""
        parts, rank = self.given, self._group.rank()
        if self.arguments.get("input_split_sizes"):
            parts = parts.split(self.arguments["input_split_sizes"])
        if isinstance(parts, Tensor):
            return self.given_bytes * (self.ranks - 1) // self.ranks
        if len(parts) == 1 and isinstance(parts[0], list):  # one list for each device of a rank
            parts = parts[0]
        return sum(_count_tensor_bytes(part) for index, part in enumerate(parts) if index != rank)


def _count_tensor_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor, or of lists of tensors."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_count_tensor_bytes, tensors))


def _point_to_point_bytes_sent(call: _CollectiveCall) -> int:
    kinds = call.arguments.get("op_list")
    if kinds is None:
        return call.given_bytes
    return sum(
        _count_tensor_bytes(t) for t, kind in zip(call.given, kinds, strict=True) if kind == "isend"
    )


FORMULAS: dict[str, Callable[[_CollectiveCall], int]] = {
    "all_gather": lambda call: call.given_bytes * (call.ranks - 1),
    "reduce_scatter": lambda call: call.given_bytes * (call.ranks - 1) // call.ranks,
    "all_reduce": lambda call: 2 * call.given_bytes * (call.ranks - 1) // call.ranks,
    "all_to_all": lambda call: call.bytes_for_others,
    "broadcast": lambda call: call.given_bytes * (call.ranks - 1) if call.is_root else 0,
    "scatter": lambda call: call.bytes_for_others if call.is_root else 0,
    "gather": lambda call: 0 if call.is_root else call.given_bytes,
    "reduce": lambda call: 0 if call.is_root else call.given_bytes,
    "send": _point_to_point_bytes_sent,
}
_OPERATORS = {
    "all_gather": "_allgather_base allgather allgather_coalesced allgather_into_tensor_coalesced "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce_scatter": "_reduce_scatter_base reduce_scatter reduce_scatter_tensor_coalesced "
    "reduce_scatter_tensor reduce_scatter_tensor_out",
    "all_reduce": "allreduce allreduce_coalesced all_reduce all_reduce_coalesced",
    "all_to_all": "alltoall alltoall_base all_to_all_single shard_dim_alltoall",
    "send": "send isend batch_p2p_ops",
    **{kind: kind for kind in ("broadcast", "scatter", "gather", "reduce")},
}
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
KINDS = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
# Operators that send no payload; a name loses its trailing underscore.
_SILENT = "recv recv_any_source irecv barrier monitored_barrier check_for_nan wait_tensor"
SILENT = frozenset([*_SILENT.split(), "_wrap_tensor_autograd"])
