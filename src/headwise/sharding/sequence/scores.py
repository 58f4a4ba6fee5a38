"""Scores of a sequence over ranks: layouts, sizes, and the options of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError, ShapeError
from headwise.masks.bound import BoundMask
from headwise.masks.clause import MatrixPart, MatrixSizes, Span
from headwise.masks.mask import NO_MASK, Mask, require_mask_type
from headwise.masks.score_bias import (
    NO_BIAS,
    ScoreBias,
    cut_score_bias_to_part,
    require_score_bias_type,
)
from headwise.matrix import checks
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding.checks import Check, require_mesh
from headwise.sharding.collectives import TokenGroup
from headwise.sharding.sequence.agreement import Agreement, checksum, require_agreement_of_ranks
from headwise.sharding.sequence.layout import SequenceLayout
from headwise.support import private_torch
from headwise.support.arguments import require_tensors
from headwise.support.text import describe_value
from headwise.support.tracing import is_autocast_enabled


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """Options of an attention matrix, for the whole sequence; see `headwise.AttentionMatrix`."""

    mask: Mask
    score_bias: ScoreBias
    scale: float | None
    softcap: float | None
    sink: Tensor | None


@dataclass(frozen=True, eq=False)
class SequenceArguments:
    """Layouts and options as the caller gives them; see `headwise.sharding.attend`."""

    layout: SequenceLayout | None = None
    key_layout: SequenceLayout | None = None
    mask: Mask | None = None
    score_bias: ScoreBias | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    def options(self) -> ScoreOptions:
        """Return the options with their defaults.

        Raises:
            MaskError: a mask or a score bias that is none.
        """
        mask = NO_MASK if self.mask is None else self.mask
        bias = NO_BIAS if self.score_bias is None else self.score_bias
        require_mask_type(mask, "mask=")
        require_score_bias_type(bias, "score_bias=")
        return ScoreOptions(mask, bias, self.scale, self.softcap, self.sink)


@dataclass(frozen=True, eq=False)
class SequenceScores:
    """The scores of a sequence whose tokens are divided over ranks.

    Attributes:
        sizes: of the whole matrix.
        queries: the ranks and their numbers of queries.
        keys: the ranks and their numbers of keys.
        query_layout: the positions of the queries.
        key_layout: the positions of the keys.
        options: mask, score bias and so on, of the whole matrix.
        mask: the mask, bound to the whole matrix.
    """

    sizes: MatrixSizes
    queries: TokenGroup
    keys: TokenGroup
    query_layout: SequenceLayout
    key_layout: SequenceLayout
    options: ScoreOptions
    mask: BoundMask = field(repr=False)

    @property
    def query_runs(self) -> tuple[Span, ...]:
        """The positions of this rank's queries, run by run."""
        return self.query_layout.spans[self.queries.rank]

    def visible_key_span(self, run: Span) -> Span:
        """Return the keys outside of which the mask hides all from a run of queries."""
        first, stop = self.mask.key_range(*run)
        return Span(first, min(stop, self.sizes.keys))

    def matrix_part_of_all_sequences(self, queries: Span, keys: Span) -> MatrixPart:
        """Return these queries and keys of all sequences of the batch."""
        return MatrixPart(Span(0, self.sizes.batch), queries, keys)

    def matrix_of_query_and_key_run(
        self, q: Tensor, k: Tensor, *, queries: Span, keys: Span
    ) -> AttentionMatrix:
        """Return the matrix of a run of queries and a run of keys, with its part of the mask.

        Args:
            q: the queries of the run, (batch, heads, run, head_dim).
            k: the keys of the run.
            queries: the positions of the queries.
            keys: the positions of the keys.
        """
        place, options = self.matrix_part_of_all_sequences(queries, keys), self.options
        clauses = self.mask.cut_to_part(place).clauses if queries.size else ()
        return AttentionMatrix(
            q,
            k,
            mask=Mask(clauses),
            score_bias=cut_score_bias_to_part(options.score_bias, place, self.sizes),
            scale=options.scale,
            softcap=options.softcap,
            sink=options.sink,
        )


def agree_on_score_settings(
    call: str,
    operands: tuple[Tensor, ...],
    mesh: DeviceMesh,
    arguments: SequenceArguments,
    further: Callable[[], tuple[Any, ...]] = tuple,
    check: Check = "always",
) -> SequenceScores:
    """Check the operands of all ranks, and return the scores that they share: a collective.

    Nothing is sent with ``check="never"``, and while torch.compile traces.

    Args:
        call: the call, for messages.
        operands: q and k of this rank, and v where the call has values.
        mesh: of one dimension.
        arguments: the other arguments of the call.
        further: checks other options, and returns plain values that are the same on every rank.
        check: the calls in which contents are compared; see `require_agreement_of_ranks`.
    """
    require_mesh(mesh, call)

    def numbers(contents: bool) -> dict[str, float]:
        _check_operands(operands, arguments)
        _check_layouts(arguments, mesh.size())
        return _numbers_to_compare(operands, arguments, further(), contents=contents)

    if check == "never" or torch.compiler.is_compiling():
        lengths = _assume_lengths(operands, arguments, mesh, further)
    else:
        lengths = require_agreement_of_ranks(call, mesh, numbers, check=check)
    layout, key_layout = arguments.layout, arguments.key_layout
    if key_layout is None and lengths.keys == lengths.queries:
        key_layout = layout
    layout = _resolve_layout("layout", layout, lengths.queries, call)
    key_layout = _resolve_layout("key_layout", key_layout, lengths.keys, call)
    q, group, options = operands[0], mesh.get_group(), arguments.options()
    sizes = MatrixSizes(q.shape[0], q.shape[1], layout.length, key_layout.length)
    options.score_bias.check(**sizes._asdict(), device=q.device)
    return SequenceScores(
        sizes=sizes,
        queries=TokenGroup(group, layout.lengths),
        keys=TokenGroup(group, key_layout.lengths),
        query_layout=layout,
        key_layout=key_layout,
        options=options,
        mask=options.mask.bind(**sizes._asdict(), device=q.device),
    )


def _check_operands(operands: tuple[Tensor, ...], arguments: SequenceArguments) -> None:
    tensors = dict(zip("qkv", operands, strict=False))
    require_tensors(**tensors)
    for name, tensor in tensors.items():
        if private_torch.is_wrapper(tensor):
            raise OptionError(
                saw=f"{name} of type {type(tensor).__name__}",
                needed="the plain tensor of this rank's tokens",
                do=f"{name}.to_local() of a DTensor with Shard(2)",
            )
    q, k, *values = operands
    checks.check_queries_and_keys(q, k)
    checks.check_scale_softcap_and_sink(q, arguments.scale, arguments.softcap, arguments.sink)
    for v in values:
        if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
            raise ShapeError(
                saw=f"v of shape {tuple(v.shape)} beside k of shape {tuple(k.shape)}",
                needed="v (batch, kv_heads, local keys, value_dim) for the same keys as k",
                do="split keys and values by the same layout",
            )
        checks.check_operand_dtype_and_device("v", v, q)


def _check_layouts(arguments: SequenceArguments, ranks: int) -> None:
    for name in ("layout", "key_layout"):
        layout = getattr(arguments, name)
        if layout is not None and not isinstance(layout, SequenceLayout):
            raise OptionError(
                saw=f"{name}={describe_value(layout)}",
                needed="a SequenceLayout, or None for one run of tokens on each rank",
                do=f"{name}=SequenceLayout.zigzag(length, {ranks})",
            )
        if layout is not None and layout.ranks != ranks:
            raise OptionError(
                saw=f"{name} over {layout.ranks} ranks with a mesh of {ranks}",
                needed="as many ranks in both",
                do=f"make the layout for {ranks} ranks",
            )


def _assume_lengths(
    operands: tuple[Tensor, ...],
    arguments: SequenceArguments,
    mesh: DeviceMesh,
    further: Callable[[], tuple[Any, ...]],
) -> Agreement:
    """Return the lengths that the layouts state; without one all ranks hold as many tokens."""
    _check_operands(operands, arguments)
    _check_layouts(arguments, mesh.size())
    further()
    queries, keys = (x.shape[2] for x in operands[:2])
    layouts = (arguments.layout, arguments.key_layout)
    if layouts[1] is None and keys == queries:
        layouts = (layouts[0], layouts[0])
    lengths = []
    for layout, length in zip(layouts, (queries, keys), strict=True):
        each = list(layout.lengths) if layout else [length] * mesh.size()
        each[mesh.get_local_rank()] = length
        lengths.append(tuple(each))
    return Agreement(*lengths)


def _numbers_to_compare(
    operands: tuple[Tensor, ...],
    arguments: SequenceArguments,
    further: tuple[Any, ...],
    *,
    contents: bool,
) -> dict[str, float]:
    """Return the numbers that ranks compare; see `agreement`."""
    q, k, *values = operands
    options = arguments.options()
    gradients = [torch.is_grad_enabled() and x.requires_grad for x in operands]
    layouts = (arguments.layout, arguments.key_layout)
    return {
        "queries": q.shape[2],
        "keys": k.shape[2],
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3],
        "value_dim": sum(v.shape[3] for v in values),
        "dtype": checksum(q.dtype, is_autocast_enabled(q.device.type)),
        "requires_grad": checksum(gradients),
        "mask": checksum(options.mask, contents=contents),
        "score_bias": checksum(options.score_bias, contents=contents),
        "sink": checksum(options.sink, contents=contents),
        "options": checksum(options.scale, options.softcap, further),
        "layout": checksum(*(layout and layout.spans for layout in layouts)),
    }


def _resolve_layout(
    name: str, layout: SequenceLayout | None, lengths: tuple[int, ...], call: str
) -> SequenceLayout:
    """Return the layout, or one run on each rank; raise ShapeError where lengths differ."""
    if layout is None:
        return SequenceLayout.of_lengths(lengths)
    if layout.lengths != lengths:
        axis = "queries" if name == "layout" else "keys"
        raise ShapeError(
            saw=f"{call}: ranks hold {list(lengths)} {axis}",
            needed=f"{list(layout.lengths)}, as {name} says: {layout}",
            do=f"x = {name}.split(x, mesh.get_local_rank()), or {name}=None for the tokens as "
            "they are",
        )
    return layout
