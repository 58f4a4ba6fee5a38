"""Mask function of `register_huggingface`, which makes the masks of a model's layers.

A `LazyMask`, which needs no queries x keys memory, represents causal masks, sliding windows on one
or both sides, chunks, and sequences packed by their position ids. Padding on either side and any
key/value cache are supported. A bidirectional mask that hides nothing is None, if the model allows
it. A causal mask is never None, so causality does not depend on the layer's ``is_causal``.

For a model without an sdpa form, the mask is a float as in eager mode. Such models add the mask to
the scores, pad it with zeros, or treat None as a mask that hides nothing.

A dense tensor, from transformers' ``sdpa_mask`` or ``eager_mask``, is used in three cases: for
mask functions of a model's own code (image blocks, prefixes), while compiling, tracing or exporting
and under torch.func, and for a decoding step with a static cache, whose row a compiled step takes
as input. If the mask is only causal, a compiled graph stores this meaning beside the tensor and
drops the tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel, masking_utils

from headwise.errors import MaskError, OptionError
from headwise.masks.clauses.band import Band
from headwise.masks.mask import Mask
from headwise.support import private_torch
from headwise.support.tensors import map_leaves
from headwise.support.text import MATRIX_AXES
from headwise.support.tracing import is_jit_tracing

MEANING = "headwise_mask"  # attribute of a dense mask that holds its `Mask`

_aten = torch.ops.aten
_ALIASES = (_aten.detach, _aten.alias)
_SUMS = (_aten.add, _aten.add_)


class LazyMask(Tensor):
    """A `Mask` in the form of a tensor (batch, 1, queries, keys): bool, True = may attend.

    For models that add their masks, the dtype is a float: 0 if a query may attend, else the
    smallest number.

    The tensor has no memory while a model only passes it to its layers. The first operator that
    reads or changes the tensor makes it dense, once. A dense tensor that was changed is the mask
    from then on, so edits and slices in a model's code work as with a plain tensor. A move to
    another device keeps the mask lazy.

    Adding the bool form to floating-point scores raises an error, because such a model computes
    attention in its own code.
    """

    mask: Mask
    written: Tensor | None

    __torch_function__ = private_torch.no_torch_function

    @staticmethod
    def __new__(
        cls,
        mask: Mask,
        *,
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
        dtype: torch.dtype = torch.bool,
    ) -> LazyMask:
        """Make the lazy mask of these sizes, with its tensors on ``device``."""
        shape = (batch, 1, queries, keys)
        self: LazyMask = private_torch.make_wrapper(cls, shape, dtype=dtype, device=device)
        self.mask, self.written = mask, None
        return self

    def materialise(self) -> Tensor:
        """Return the dense tensor, which takes queries x keys memory."""
        if self.written is None:
            self.written = self._evaluate()
        return self.written

    def is_edited(self) -> bool:
        """True if the model's code changed the dense tensor, or may have changed it."""
        if self.written is None:
            return False
        can_compare = not self.is_meta and _can_read_values(self.written)
        return not can_compare or not torch.equal(self._evaluate(), self.written)

    def _evaluate(self) -> Tensor:
        sizes = dict(zip(MATRIX_AXES, self.shape, strict=True))
        bound = self.mask.bind(**sizes, device=self.device)
        rows = torch.arange(sizes["queries"], device=self.device)
        allowed = bound.evaluate_rows(rows).expand(self.shape)
        if self.dtype == torch.bool:
            return allowed.contiguous()
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(~allowed, torch.finfo(self.dtype).min)  # is added to scores

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        batch, _, queries, keys = self.shape
        meaning = self.mask if self.written is None else "written"
        return f"LazyMask(batch={batch}, queries={queries}, keys={keys}, {meaning})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet in _ALIASES or (
            func.name() == private_torch.TO_COPY and _copy_only_moves(kwargs, args[0].dtype)
        ):
            return args[0]._move_to_device(kwargs.get("device", args[0].device))
        if packet in _SUMS:  # a bool mask plus floating-point scores; a float mask may be added
            kinds = {term.dtype for term in args[:2] if isinstance(term, Tensor)}
            if torch.bool in kinds and any(kind.is_floating_point for kind in kinds):
                raise MaskError(
                    saw='a mask of attn_implementation="headwise", added to scores by a model\'s '
                    "own code",
                    needed="a model that uses transformers' attention interface",
                    do='load this model with attn_implementation="eager"',
                )
        operands = (args, kwargs or {})
        args, kwargs = map_leaves(lambda x: x.materialise() if isinstance(x, cls) else x, operands)
        return func(*args, **kwargs)

    def _move_to_device(self, device: torch.device) -> LazyMask:
        batch, _, queries, keys = self.shape
        sizes = {"batch": batch, "queries": queries, "keys": keys}
        moved = LazyMask(self.mask.to(device), **sizes, device=device, dtype=self.dtype)
        moved.written = None if self.written is None else self.written.to(device)
        return moved


def _copy_only_moves(options: dict[str, Any], dtype: torch.dtype) -> bool:
    unchanged = {"dtype": dtype, "layout": torch.strided, "memory_format": torch.preserve_format}
    changed = {name for name, value in options.items() if value not in (None, unchanged.get(name))}
    return changed <= {"device", "non_blocking"}


def make_transformers_mask(**call: Any) -> Tensor | None:
    """Make the mask of a forward pass, (batch, 1, queries, keys), True = may attend.

    ``call`` holds transformers' arguments of a mask function. This function uses ``batch_size``,
    ``q_length`` and ``q_offset`` (``cache_position`` in 5.0), ``kv_length``, ``kv_offset``,
    ``mask_function``, ``attention_mask`` (batch, positions), ``use_vmap``, ``device`` and
    ``allow_is_bidirectional_skip``.

    Raises:
        OptionError: the model computes attention in its own code, which cannot use this mask.
    """
    tokens, device = _token_positions(call), _find_device(call)
    if tokens is not None:
        kind: Any = type(call.get("config"))
        _require_model_supports_attention_interface(kind)
    mask = None if tokens is None else _find_equivalent_mask(call, tokens)
    if tokens is None or mask is None:
        return _make_dense_mask(call)
    if call.get("allow_is_bidirectional_skip") and all(isinstance(c, Band) for c in mask.clauses):
        bound = mask.bind(**_mask_sizes(tokens), batch=1, device=device)
        if not bound.hiding_clauses:
            return None
    sizes = {"batch": call["batch_size"], "queries": tokens.queries, "keys": tokens.keys}
    is_float = _needs_float_mask(type(call.get("config")))
    dtype = call.get("dtype", torch.float32) if is_float else torch.bool
    return LazyMask(mask, **sizes, device=device, dtype=dtype)


# Without functools.cache, because a compiler would trace into a cached function.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def file_has_no_sdpa(layer: type) -> bool:
    """Check that no model in this layer's file has an sdpa form."""
    return _file_has_no_sdpa(layer)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _needs_float_mask(config: type) -> bool:
    return any(not model._supports_sdpa for model in _models_of_config(config))


@cache
def _file_has_no_sdpa(layer: type) -> bool:
    members = vars(sys.modules[layer.__module__]).values()
    models = [m for m in members if isinstance(m, type) and issubclass(m, PreTrainedModel)]
    defined = [m for m in models if m.__module__ == layer.__module__]
    return bool(defined) and not any(model._supports_sdpa for model in defined)


def _make_dense_mask(call: dict[str, Any]) -> Tensor | None:
    if _needs_float_mask(type(call.get("config"))):
        float_mask: Tensor | None = masking_utils.eager_mask(**call)
        return float_mask
    # Never None for a causal mask, because a layer without ``is_causal`` would attend to all keys.
    mask: Tensor | None = masking_utils.sdpa_mask(**{**call, "allow_is_causal_skip": False})
    # Only if transformers would omit the mask for sdpa, so that no model can edit the tensor, may a
    # compiled graph drop it: a causal mask from the first key on.
    is_causal_alone = (
        torch.compiler.is_compiling()
        and call.get("allow_is_causal_skip")
        and call.get("mask_function") is masking_utils.causal_mask_function
        and call.get("attention_mask") is None
        and not isinstance(call.get("q_offset"), Tensor)
        and (call.get("q_offset"), call.get("kv_offset")) == (0, 0)
    )
    if mask is not None and is_causal_alone:
        setattr(mask, MEANING, Mask.causal(align="top-left"))
    return mask


def _token_positions(call: dict[str, Any]) -> TokenPositions | None:
    positions = call.get("cache_position")
    queries = call["q_length"] if positions is None else positions.shape[0]
    first: Any = call.get("q_offset", 0) if positions is None else positions[0]
    if call.get("use_vmap") or not _is_neither_traced_nor_compiled(_find_device(call)):
        return None
    if isinstance(first, Tensor):
        # The offset of a static cache is a tensor, and its decoding step may be compiled.
        if (positions is None and queries == 1) or not _can_read_values(first):
            return None
        first = int(first)
    return TokenPositions(queries, call["kv_length"], first, call.get("kv_offset", 0))


@cache
def _require_model_supports_attention_interface(config: type) -> None:
    """Raise an error if a model does not use the interface, by transformers' own test."""
    for model in _models_of_config(config):
        if not model._can_set_attn_implementation():
            raise OptionError(
                saw=f'attn_implementation="headwise" for {model.__name__}',
                needed="a model that uses transformers' attention interface",
                do='load this model with attn_implementation="eager"',
            )


def _models_of_config(config: type) -> list[Any]:
    models: Any = MODEL_MAPPING.get(config, ()) if issubclass(config, PreTrainedConfig) else ()
    return list(models) if isinstance(models, (list, tuple)) else [models]


def _find_device(call: dict[str, Any]) -> torch.device:
    positions = call.get("cache_position")
    return torch.device(call.get("device", "cpu") if positions is None else positions.device)


def _is_neither_traced_nor_compiled(device: torch.device) -> bool:
    """Check that new tensors are plain, Python runs at every call, and torch has wrappers."""
    return (
        private_torch.HAS_WRAPPERS
        and not torch.compiler.is_compiling()
        and device.type != "meta"
        and type(torch.empty(0, device=device)) is Tensor
        and not is_jit_tracing()
        and not private_torch.is_in_functorch(unknown=True)
    )


def _can_read_values(tensor: Tensor) -> bool:
    """Check that a tensor's values are readable, which they are not in a CUDA graph capture."""
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return type(tensor) is Tensor and not capturing


def _find_equivalent_mask(call: dict[str, Any], tokens: TokenPositions) -> Mask | None:
    function = call.get("mask_function", masking_utils.causal_mask_function)
    mask = read_mask_function(function, tokens)
    padding = call.get("attention_mask")
    if mask is None or padding is None:
        return mask
    return mask & _real_keys_mask(padding, mask, tokens) if padding.dim() == 2 else None


def _real_keys_mask(padding: Tensor, mask: Mask, tokens: TokenPositions) -> Mask:
    """Return the mask of keys without padding: by lengths, by starts, or one bool for each key."""
    end = tokens.first_key + tokens.keys
    padding = pad(padding.bool(), (0, max(0, end - padding.shape[1])))
    real = padding[:, tokens.first_key : end]
    by_key = Mask.may_attend(real, axes="batch keys")
    if not _can_read_values(real):
        return by_key
    # Causality already hides the empty rest of a static cache.
    bound = mask.bind(**_mask_sizes(tokens), batch=len(real), device=real.device)
    start, stop = bound.key_range(0, tokens.queries)
    if bool(real[:, start:stop].all()):
        return Mask()
    lengths = real.sum(-1)
    in_length = torch.arange(tokens.keys, device=real.device) < lengths[:, None]
    if torch.equal(real, in_length):
        return Mask.lengths(keys=lengths)
    starts = stop - real[:, start:stop].sum(-1)
    after_start = torch.arange(start, stop, device=real.device) >= starts[:, None]
    return Mask.starts(keys=starts) if torch.equal(real[:, start:stop], after_start) else by_key


def _mask_sizes(tokens: TokenPositions) -> dict[str, int]:
    return {"heads": 1, "queries": tokens.queries, "keys": tokens.keys}


# ---- readers of transformers' mask functions -----------------------------------------------------
# transformers describes a mask by a function of (batch, head, query, key), built from a few kinds
# of closures. The code object of a closure identifies its kind, and the cells hold its parameters.
# Each reader is checked once against the installed version's function. If a version lacks a
# function, or its function differs, the reader is not used, and the mask becomes a dense tensor.

MaskFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class TokenPositions:
    """Positions of the queries and keys of a call, as a mask function counts them.

    ``packed`` is True if several sequences share a row; ``position_ids`` (batch, queries) may then
    hold the positions within each sequence.
    """

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    packed: bool = False
    position_ids: Tensor | None = None

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, each (1 or batch, length)."""
        rows = torch.arange(self.first_query, self.first_query + self.queries, device=device)
        columns = torch.arange(self.first_key, self.first_key + self.keys, device=device)
        if self.position_ids is not None:
            return self.position_ids[:, rows], self.position_ids[:, columns]
        return rows[None], columns[None]

    def band(self, left: int | None, right: int | None) -> Mask | None:
        """Return a mask of keys from ``left`` before to ``right`` after the query, or None.

        Within a packed sequence, position differences equal differences in the row.
        """
        ahead = self.first_query - self.first_key  # index of the key at query 0's position
        over = self.keys - self.queries - ahead  # keys after the last query's position
        mask = Mask()
        sides = (("left", left, -ahead, over), ("right", right, ahead, -over))
        for side, reach, from_first, from_last in sides:
            if reach is None:
                continue
            if max(reach + from_first, reach + from_last) < 0:
                return None
            limits: dict[str, Any] = {"left": None, "right": None, "align": "bottom-right"}
            limits[side] = reach + from_last
            if reach + from_first >= 0:
                limits |= {side: reach + from_first, "align": "top-left"}
            mask &= Mask.window(**limits)
        return mask


@cache
def select_trusted_readers() -> dict[CodeType, Reader]:
    """Return the readers that agree with the installed transformers, by code object."""
    readers: dict[CodeType, Reader] = {}
    for kind in _KINDS:
        example = kind.example()
        if example is not None:
            candidates = {**readers, example.__code__: kind.reader}
            if all(_reader_agrees(*case, candidates) for case in kind.cases(example)):
                readers = candidates
    return readers


class _Node(NamedTuple):
    """The closure cells of a mask function, and the positions of the call."""

    cells: dict[str, Any]
    tokens: TokenPositions
    readers: dict[CodeType, Reader]


Reader = Callable[[_Node], Mask | None]


def read_mask_function(
    function: MaskFunction, tokens: TokenPositions, readers: dict[CodeType, Reader] | None = None
) -> Mask | None:
    """Return the mask that a mask function describes, or None for an unknown function."""
    readers = select_trusted_readers() if readers is None else readers
    if not isinstance(function, FunctionType) or function.__code__ not in readers:
        return None
    names, closure = function.__code__.co_freevars, function.__closure__ or ()
    cells = {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}
    return readers[function.__code__](_Node(cells, tokens, readers))


def _read_window(node: _Node) -> Mask | None:
    return node.tokens.band(node.cells["sliding_window"] - 1, None)


def _read_symmetric_window(node: _Node) -> Mask | None:
    return node.tokens.band(node.cells["sliding_window"], node.cells["sliding_window"])


def _read_chunk_segments(node: _Node) -> Mask | None:
    size, start = node.cells["chunk_size"], node.cells["left_padding"][:, None]
    # Chunks in the padding have negative numbers, and segment ids must not be negative.
    positions = node.tokens.positions(start.device)
    return Mask.segments(*((each - start) // size + start // size + 1 for each in positions))


def _read_packed_segments(node: _Node) -> Mask | None:
    ids = node.cells["packed_sequence_mask"]
    rows, columns = node.tokens.positions(ids.device)
    return Mask.segments(ids[:, rows[0]], ids[:, columns[0]])


def _read_remapped_positions(node: _Node) -> Mask | None:
    tokens = node.tokens
    if not tokens.packed or (tokens.first_query, tokens.keys) != (tokens.first_key, tokens.queries):
        return None
    tokens = replace(tokens, position_ids=node.cells["position_ids"])
    return read_mask_function(node.cells["mask_function"], tokens, node.readers)


def _read_conjunction(node: _Node) -> Mask | None:
    functions = node.cells["mask_functions"]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    packed = any(node.readers.get(code) is _read_packed_segments for code in codes)
    tokens = replace(node.tokens, packed=node.tokens.packed or packed)
    mask = Mask()
    for function in functions:
        if (part := read_mask_function(function, tokens, node.readers)) is None:
            return None
        mask &= part
    return mask


def _make_cpu_tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, device="cpu")  # independent of the default device


_SEQUENCE_IDS = _make_cpu_tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 9 + [2]])
_POSITIONS = _make_cpu_tensor([[*range(5), *range(3, 7), *range(3)], [*range(2), *range(9), 0]])
_PADDING = _make_cpu_tensor([0, 3])
_CACHED, _FULL = TokenPositions(7, 9, first_query=5, first_key=3), TokenPositions(12, 12)


class _KnownMaskFunction(NamedTuple):
    """A function of `transformers.masking_utils`, and arguments that make an example of it."""

    name: str
    arguments: tuple[Any, ...] | None
    reader: Reader

    def example(self) -> FunctionType | None:
        function = getattr(masking_utils, self.name, None)
        if function is not None and self.arguments is not None:
            try:
                function = function(*self.arguments)
            except TypeError:  # another version has another signature
                return None
        return function if isinstance(function, FunctionType) else None

    def cases(self, example: MaskFunction) -> Iterator[tuple[MaskFunction, TokenPositions]]:
        if self.reader is _read_remapped_positions:  # valid only within packed sequences
            packed = masking_utils.packed_sequence_mask_function(_SEQUENCE_IDS)
            yield masking_utils.and_masks(packed, example), _FULL
        else:
            yield example, _CACHED
            yield example, _FULL


_KINDS = (
    _KnownMaskFunction("causal_mask_function", None, lambda node: node.tokens.band(None, 0)),
    _KnownMaskFunction("bidirectional_mask_function", None, lambda _: Mask()),
    _KnownMaskFunction("sliding_window_overlay", (4,), _read_window),
    _KnownMaskFunction("sliding_window_bidirectional_overlay", (3,), _read_symmetric_window),
    _KnownMaskFunction("chunked_overlay", (5, _PADDING), _read_chunk_segments),
    _KnownMaskFunction("packed_sequence_mask_function", (_SEQUENCE_IDS,), _read_packed_segments),
    _KnownMaskFunction(
        "and_masks",
        (masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function),
        _read_conjunction,
    ),
    _KnownMaskFunction(
        "remap_positions_for_packed_sequence",
        (masking_utils.causal_mask_function, _POSITIONS),
        _read_remapped_positions,
    ),
)


def _reader_agrees(
    function: MaskFunction, tokens: TokenPositions, readers: dict[CodeType, Reader]
) -> bool:
    if (mask := read_mask_function(function, tokens, readers)) is None:
        return False
    batch, device = len(_PADDING), _PADDING.device
    rows, columns = tokens.positions(device)
    sequence = torch.arange(batch, device=device)[:, None, None, None]
    described = function(sequence, sequence[:1], rows[0][:, None], columns[0])
    bound = mask.bind(batch=batch, heads=1, queries=tokens.queries, keys=tokens.keys, device=device)
    shape = (batch, 1, tokens.queries, tokens.keys)
    allowed = bound.evaluate_rows(torch.arange(tokens.queries, device=device))
    return torch.equal(allowed.expand(shape), described.expand(shape))
