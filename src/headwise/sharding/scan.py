"""Scans of a model that is divided over ranks, and head statistics of a sequence that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from headwise.errors import OptionError
from headwise.scanning._scan import scan
from headwise.scanning.call import CapturedCall
from headwise.scanning.file import hash_nested_content
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import STANDARD, find_standard_statistics
from headwise.scanning.statistics.maps import Map, OffsetProfile
from headwise.scanning.statistics.outputs import EffectiveRank, OutputCosine
from headwise.scanning.statistics.statistic import RowMean, TileStatistic, compute_summaries
from headwise.scanning.weights import use_head_joiner
from headwise.sharding.agreement import require_process_group
from headwise.sharding.sequence.matrix import SequenceMatrix

# Statistics that are sums over queries, so that those of some queries add up to those of all. The
# others choose queries or keys from the whole sequence: samples, the last query, the most received.
SUMS_OVER_QUERIES = (RowMean, OffsetProfile, Map, EffectiveRank, OutputCosine)


def scan_sharded(model: nn.Module, inputs: Any, **options: Any) -> HeadScan:
    """Scan a model that is divided over the ranks of the default process group.

    The model may be divided by FSDP2, by transformers' tensor-parallel plan, by `heads_plan`, or
    by FSDP2 and one of these. All ranks make the call, with the same inputs. Where a rank computes
    some heads of a layer, these are joined before they are read: each rank gets the scan of the
    whole model, with its own numbers of heads. The scan gathers no weights but the unembedding, for
    the statistic "copying"; FSDP2 gathers those of the module that runs.

    Args:
        model: the model, divided.
        inputs: as for `headwise.scan`.
        options: other arguments of `headwise.scan`.

    Raises:
        OptionError: no process group, other inputs on other ranks, heads that are divided and
            have masks or score biases of their own, or as `headwise.scan`.
    """
    require_process_group("scan_sharded(...)")
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hash_nested_content(inputs))
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise OptionError(
            saw=f"inputs of rank {others[0]}, which differs from inputs of rank 0",
            needed=f"the same inputs on all {len(digests)} ranks",
            do="start every process with the same arguments, and load the same files",
        )
    with use_head_joiner(_gather_tensor_heads_from_ranks):
        return scan(model, inputs, **options)


def _gather_tensor_heads_from_ranks(part: Tensor, weight: DTensor) -> Tensor:
    """Join heads on axis 1, in the order of the inputs of the output projection's ``weight``."""
    dims = [
        dim
        for dim, placement in enumerate(weight.placements)
        if isinstance(placement, Shard) and placement.dim in (1, -1)
    ]
    if len(dims) != 1:
        raise OptionError(
            saw=f"an output projection with the placements {tuple(weight.placements)}",
            needed="inputs that are divided along one dimension of the mesh",
            do="divide the heads over one dimension of the mesh",
        )
    group = weight.device_mesh.get_group(dims[0])
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 1)


# ---- a sequence over ranks ---------------------------------------------------------------------


@torch.no_grad()
def head_statistics(
    matrix: SequenceMatrix,
    statistics: Iterable[str | TileStatistic] | None = None,
    *,
    real: Bool[Tensor, "batch keys"] | None = None,
    tokens: Integer[Tensor, "batch keys"] | None = None,
    separators: Bool[Tensor, "batch keys"] | None = None,
    specials: Bool[Tensor, "batch keys"] | None = None,
    values: Float[Tensor, "batch kv_heads local value_dim"] | None = None,
    outputs: Float[Tensor, "batch heads local value_dim"] | None = None,
    out_proj: Float[Tensor, "heads value_dim embed_dim"] | None = None,
    residual: Float[Tensor, "batch local embed_dim"] | None = None,
) -> dict[str, Tensor]:
    """Compute statistics of `headwise.scan` over all queries of a sequence: a collective.

    Every rank gets the results of the whole sequence, as one process would compute them. Only
    statistics that are sums over queries exist here, which most are.

    Args:
        matrix: self-attention: queries are keys, in one layout.
        statistics: names of the standard set, or statistics; None for all that are possible.
        real: False where a token is padding, for the whole sequence, like all that follow but
            ``values``, ``outputs`` and ``residual``.
        tokens: the token of each position.
        separators: True at separators.
        specials: True at special tokens.
        values: the values of this rank's keys.
        outputs: the head outputs of this rank's queries.
        out_proj: each head's part of the output projection.
        residual: the input state of the block, at this rank's queries.

    Returns:
        The result of each statistic by its name, (heads, ...), float64.

    Raises:
        OptionError: cross attention, a statistic that is no sum over queries, or one that needs
            what is not there.
    """
    if matrix.scores.queries.layout != matrix.scores.keys.layout:
        raise OptionError(
            saw=f"head_statistics({matrix!r})",
            needed="self-attention: queries and keys of the same tokens on each rank",
            do="leave out key_layout, or read the matrix by its own methods",
        )
    values = None if values is None else matrix.scores.keys.gather(values)
    attributes = {"tokens": tokens, "separators": separators, "specials": specials}
    attributes |= {"values": values, "out_proj": out_proj}
    calls = list(_make_captured_calls(matrix, real, outputs, residual, attributes))
    return _merge_over_ranks(matrix, calls, _choose_statistics(statistics, calls[0]))


def _merge_over_ranks(
    matrix: SequenceMatrix, calls: list[CapturedCall], statistics: list[TileStatistic]
) -> dict[str, Tensor]:
    local = [compute_summaries(call, statistics) for call in calls if call.matrix.shape[2]]
    everyone: list[Any] = [None] * matrix.scores.queries.size
    dist.all_gather_object(everyone, local, group=matrix.scores.queries.group)
    summaries = [part for parts in everyone for part in parts]
    results = {}
    for statistic in statistics:
        name = statistic.definition.name
        merged = statistic.merge([summary[name] for summary in summaries])
        results[name] = statistic.result(merged)
    return results


def _make_captured_calls(
    matrix: SequenceMatrix,
    real: Tensor | None,
    outputs: Tensor | None,
    residual: Tensor | None,
    attributes: dict[str, Any],
) -> Iterator[CapturedCall]:
    """Yield one call for each run of this rank's queries: as a cache leaves earlier keys."""
    first = 0
    for run, part in matrix.parts:
        rows = slice(first, first + run.size)
        yield CapturedCall.for_self_attention(
            part,
            real=real,
            own_key=run.first,
            outputs=None if outputs is None else outputs[:, :, rows],
            residual=None if residual is None else residual[:, rows],
            **attributes,
        )
        first += run.size


def _choose_statistics(
    statistics: Iterable[str | TileStatistic] | None, call: CapturedCall
) -> list[TileStatistic]:
    if statistics is None:
        return [
            s
            for s in STANDARD
            if isinstance(s, SUMS_OVER_QUERIES) and not s.reason_not_computable(call)
        ]
    chosen: list[TileStatistic] = []
    for entry in statistics:
        statistic = find_standard_statistics([entry])[0] if isinstance(entry, str) else entry
        if not isinstance(statistic, SUMS_OVER_QUERIES):
            names = (s.definition.name for s in STANDARD if isinstance(s, SUMS_OVER_QUERIES))
            raise OptionError(
                saw=f"the statistic {statistic.definition.name!r} of a sequence over ranks",
                needed="a sum over queries, whose parts add up: a RowMean, or one of "
                f"{', '.join(names)}",
                do="scan documents, each on one rank, for the others",
            )
        chosen.append(statistic)
    return chosen
