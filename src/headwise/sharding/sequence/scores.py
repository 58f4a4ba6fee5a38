"""Scores of a sequence over ranks: layouts, sizes, and the options of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError, ShapeError
from headwise.masks import score_bias as biases
from headwise.masks.bound import BoundMask
from headwise.masks.clause import MatrixPart, MatrixSizes, Span
from headwise.masks.mask import NO_MASK, Mask, require_mask_type
from headwise.masks.score_bias import ScoreBias
from headwise.matrix import checks
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding import agreement
from headwise.sharding.agreement import Agreement, Check, checksum
from headwise.sharding.sequence.layout import SequenceLayout, SharedTokens
from headwise.support import private_torch
from headwise.support.arguments import require_tensors
from headwise.support.text import describe_value
from headwise.support.tracing import is_autocast_enabled


@dataclass(frozen=True, eq=False)
class SequenceOptions:
    """Layouts, and options of an attention matrix for the whole sequence; see `attend`."""

    layout: SequenceLayout | None
    key_layout: SequenceLayout | None
    mask: Mask
    score_bias: ScoreBias
    scale: float | None
    softcap: float | None
    sink: Tensor | None

    @classmethod
    def given(
        cls,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> SequenceOptions:
        """Return the options that a caller gives; nothing is checked.

        They are written out: Dynamo compiles no ``fields`` of a class.
        """
        mask = NO_MASK if mask is None else mask
        score_bias = biases.NO_BIAS if score_bias is None else score_bias
        return cls(layout, key_layout, mask, score_bias, scale, softcap, sink)


@dataclass(frozen=True, eq=False)
class SequenceScores:
    """The scores of a sequence whose tokens are divided over ranks."""

    sizes: MatrixSizes  # of the whole matrix
    queries: SharedTokens
    keys: SharedTokens
    options: SequenceOptions
    mask: BoundMask = field(repr=False)  # bound to the whole matrix

    def visible_key_span(self, run: Span) -> Span:
        """Return the keys outside of which the mask hides all from a run of queries."""
        first, stop = self.mask.key_range(*run)
        return Span(first, min(stop, self.sizes.keys))

    def matrix_part_of_all_sequences(self, queries: Span, keys: Span) -> MatrixPart:
        return MatrixPart(Span(0, self.sizes.batch), queries, keys)

    def matrix_of_query_and_key_run(
        self, q: Tensor, k: Tensor, *, queries: Span, keys: Span
    ) -> AttentionMatrix:
        place, options = self.matrix_part_of_all_sequences(queries, keys), self.options
        clauses = self.mask.cut_to_part(place).clauses if queries.size else ()
        return AttentionMatrix(
            q,
            k,
            mask=Mask(clauses),
            score_bias=biases.cut_score_bias_to_part(options.score_bias, place, self.sizes),
            scale=options.scale,
            softcap=options.softcap,
            sink=options.sink,
        )


def agree_on_scores(
    call: str,
    operands: tuple[Tensor, ...],
    mesh: DeviceMesh,
    options: SequenceOptions,
    further: Callable[[], tuple[Any, ...]] = tuple,
    check: Check = "always",
) -> SequenceScores:
    """Check the operands of all ranks, and return the scores that they share: a collective.

    Nothing is sent with ``check="never"``, and while torch.compile traces. ``further`` checks other
    arguments, and returns plain values that are the same on every rank.
    """
    agreement.require_mesh(mesh, call)

    def check_arguments() -> tuple[Any, ...]:
        _check_operands(operands, options)
        _check_layouts(options, mesh.size())
        return further()

    def numbers(contents: bool) -> dict[str, float]:
        return _numbers_to_compare(operands, options, check_arguments(), contents=contents)

    if check == "never" or torch.compiler.is_compiling():
        check_arguments()
        lengths = _assume_lengths(operands, options, mesh)
    else:
        lengths = agreement.require_agreement_of_ranks(call, mesh, numbers, check=check)
    layout, key_layout = options.layout, options.key_layout
    if key_layout is None and lengths.keys == lengths.queries:
        key_layout = layout
    queries = _share_tokens("layout", layout, lengths.queries, mesh, call)
    keys = _share_tokens("key_layout", key_layout, lengths.keys, mesh, call)
    q = operands[0]
    sizes = MatrixSizes(q.shape[0], q.shape[1], queries.total_tokens, keys.total_tokens)
    options.score_bias.check(**sizes._asdict(), device=q.device)
    mask = options.mask.bind(**sizes._asdict(), device=q.device)
    return SequenceScores(sizes, queries, keys, options, mask)


def _check_operands(operands: tuple[Tensor, ...], options: SequenceOptions) -> None:
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
    checks.check_scale_softcap_and_sink(q, options.scale, options.softcap, options.sink)
    for v in values:
        if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
            raise ShapeError(
                saw=f"v of shape {tuple(v.shape)} beside k of shape {tuple(k.shape)}",
                needed="v (batch, kv_heads, local keys, value_dim) for the same keys as k",
                do="split keys and values by the same layout",
            )
        checks.check_operand_dtype_and_device("v", v, q)
    require_mask_type(options.mask, "mask=")
    biases.require_score_bias_type(options.score_bias, "score_bias=")


def _check_layouts(options: SequenceOptions, ranks: int) -> None:
    for name in ("layout", "key_layout"):
        layout = getattr(options, name)
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
    operands: tuple[Tensor, ...], options: SequenceOptions, mesh: DeviceMesh
) -> Agreement:
    """Return the lengths that the layouts state; without one all ranks hold as many tokens."""
    queries, keys = (x.shape[2] for x in operands[:2])
    layout, key_layout = options.layout, options.key_layout
    if key_layout is None and keys == queries:
        key_layout = layout
    lengths = []
    for stated, length in ((layout, queries), (key_layout, keys)):
        each = list(stated.lengths) if stated else [length] * mesh.size()
        each[mesh.get_local_rank()] = length
        lengths.append(tuple(each))
    return Agreement(*lengths)


def _numbers_to_compare(
    operands: tuple[Tensor, ...],
    options: SequenceOptions,
    further: tuple[Any, ...],
    *,
    contents: bool,
) -> dict[str, float]:
    q, k, *values = operands
    gradients = [torch.is_grad_enabled() and x.requires_grad for x in operands]
    layouts = (options.layout, options.key_layout)
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


def _share_tokens(
    name: str, layout: SequenceLayout | None, lengths: tuple[int, ...], mesh: DeviceMesh, call: str
) -> SharedTokens:
    if layout is None:
        layout = SequenceLayout.of_lengths(lengths)
    elif layout.lengths != lengths:
        axis = "queries" if name == "layout" else "keys"
        raise ShapeError(
            saw=f"{call}: ranks hold {list(lengths)} {axis}",
            needed=f"{list(layout.lengths)}, as {name} says: {layout}",
            do=f"x = {name}.split(x, mesh.get_local_rank()), or {name}=None for the tokens as "
            "they are",
        )
    return SharedTokens(mesh.get_group(), layout.lengths, layout)
