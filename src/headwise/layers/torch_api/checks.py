"""Arguments of one call of the drop-in, and their checks in torch's order, with its error types."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, MaskError, OptionError, ShapeError
from headwise.matrix.checks import check_probability
from headwise.support.text import describe_move, describe_value, nearest_counts
from headwise.support.tracing import is_autocast_enabled


class AssertedShapeError(ShapeError, AssertionError):
    """Sizes that do not fit, where torch asserts."""


class RuntimeShapeError(ShapeError, RuntimeError):
    """Sizes that do not fit, where torch's operators raise RuntimeError."""


class AssertedMaskError(MaskError, AssertionError):
    """A mask for other sizes or of another rank, where torch asserts."""


class RuntimeMaskError(MaskError, RuntimeError):
    """A mask for other sizes, where torch raises RuntimeError."""


class AssertedMaskDTypeError(DTypeError, MaskError, AssertionError):
    """A mask that is neither bool nor float."""


class AssertedOptionError(OptionError, AssertionError):
    """Options that contradict each other, where torch asserts."""


class RuntimeOptionError(OptionError, RuntimeError):
    """Options that contradict each other, where torch raises RuntimeError."""


class RuntimeDTypeError(DTypeError, RuntimeError):
    """Inputs and parameters of different dtypes."""


class RuntimeDeviceError(DeviceError, RuntimeError):
    """Inputs and parameters on different devices."""


# The first fields of a `Call`.
Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, bool, bool]


class Call(NamedTuple):
    """One call: inputs, masks, options, and the parameters before the output projection."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    need_weights: bool
    average: bool
    dropout_p: float
    batch_first: bool
    embed_dim: int
    width: int  # that of all heads together: of the projected queries, keys and values
    num_heads: int
    weights: tuple[Tensor | None, ...]  # one packed weight, or those of queries, keys and values
    bias: Tensor | None  # those of queries, keys and values, packed
    bias_k: Tensor | None  # the key of a slot that every query may attend to
    bias_v: Tensor | None  # its value
    add_zero_attn: bool  # True for a slot of zeros
    static_k: Tensor | None = None
    static_v: Tensor | None = None


def require_divisible_embed_dim(embed_dim: int, num_heads: int) -> None:
    if embed_dim <= 0 or num_heads <= 0:
        raise OptionError(
            saw="embed_dim and num_heads must be greater than 0,"
            f" got embed_dim={embed_dim} and num_heads={num_heads} instead",
            needed="at least one head, of at least one number",
            do="e.g. MultiheadAttention(embed_dim=512, num_heads=8)",
        )
    if embed_dim % num_heads:
        near = nearest_counts(num_heads, lambda n: embed_dim % n == 0, most=embed_dim)
        raise AssertedOptionError(
            saw="embed_dim must be divisible by num_heads:"
            f" embed_dim {embed_dim} not divisible by num_heads {num_heads}",
            needed="a whole head_dim: embed_dim / num_heads",
            do=f"for embed_dim={embed_dim}, num_heads={near}",
        )


def raise_nested_error(what: str) -> NoReturn:
    raise OptionError(
        saw=f"{what} with nested tensors",
        needed="tensors with one length, since torch's code computes nested ones",
        do="x.to_padded_tensor(0.0) for the input, with key_padding_mask=...",
    )


def require_mask_for_hint(*, is_causal: bool, attn_mask: Tensor | None) -> None:
    """Raise for ``is_causal`` without ``attn_mask``, also on the paths where torch ignores it."""
    if is_causal and attn_mask is None:
        raise RuntimeOptionError(
            saw="is_causal=True without attn_mask. Need attn_mask if specifying the is_causal hint."
            " You may use the Transformer module method `generate_square_subsequent_mask`"
            " to create this mask.",
            needed="attn_mask, since is_causal is only a hint that attn_mask is the causal mask",
            do="attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(length)",
        )


def check_ranks(call: Call) -> bool:
    """Raise unless the inputs are all 3-D or all 2-D with fitting masks; return True for 3-D."""
    query, key, value, padding, attn_mask, *_ = call
    if padding is None and attn_mask is None and query.dim() == key.dim() == value.dim() == 3:
        return True
    for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
        _require_mask_kind(name, mask)
    rank = query.dim()
    if rank not in (2, 3):
        raise AssertedShapeError(
            saw="query should be unbatched 2D or batched 3D tensor but received"
            f" {rank}-D query tensor of shape {tuple(query.shape)}",
            needed="(queries, embed_dim), or three axes with batch",
            do="fold further axes into the batch",
        )
    kind = "For batched (3-D) `query`" if rank == 3 else "For unbatched (2-D) `query`"
    if key.dim() != rank or value.dim() != rank:
        raise AssertedShapeError(
            saw=f"{kind}, expected `key` and `value` to be {rank}-D but found {key.dim()}-D and"
            f" {value.dim()}-D tensors respectively",
            needed="a batch axis in all of query, key and value, or in none",
            do="add the batch axis with unsqueeze, or expand the tensor to the batch",
        )
    if padding is not None and padding.dim() != rank - 1:
        raise AssertedMaskError(
            saw=f"{kind}, expected `key_padding_mask` to be `None` or {rank - 1}-D but found"
            f" {padding.dim()}-D tensor instead, of shape {tuple(padding.shape)}",
            needed="(batch, keys)" if rank == 3 else "(keys,)",
            do="pass a mask over queries and keys as attn_mask",
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise AssertedMaskError(
            saw=f"{kind}, expected `attn_mask` to be `None`, 2-D or 3-D but found"
            f" {attn_mask.dim()}-D tensor instead, of shape {tuple(attn_mask.shape)}",
            needed="(queries, keys) or (batch*heads, queries, keys)",
            do="pass attn_mask.flatten(0, 1) for a mask (batch, heads, queries, keys)",
        )
    return rank == 3


def _require_mask_kind(name: str, mask: Tensor | None) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise AssertedMaskError(
            saw=f"{name}={describe_value(mask)}",
            needed="a tensor in torch's convention: bool (True = may not attend) or float",
            do=f"{name}=torch.as_tensor({name})"
            if hasattr(mask, "__array__")
            else "for a causal mask: torch.nn.Transformer.generate_square_subsequent_mask(length);"
            " a headwise Mask goes to headwise.Attention or AttentionMatrix",
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertedMaskDTypeError(
            saw=f"only bool and floating types of {name} are supported, but got {mask.dtype}",
            needed="bool (True = may not attend) or float (added to the scores);"
            " an integer mask may mean either polarity",
            do="mask.bool() if nonzero means hidden, mask == 0 if nonzero means may attend",
        )


def check_call(call: Call, *, batched: bool) -> None:
    """Raise unless the 3-D inputs, parameters, masks and options of a call fit each other.

    ``batched`` is False for inputs and a padding mask that were given without the batch axis.
    """
    query, key, batch = call.query, call.key, 0 if call.batch_first else 1
    if query.shape[2] != call.embed_dim or not (query is key is call.value):
        _check_input_shapes(call)
    _check_weights(call)
    keys = key.shape[1 - batch]
    if call.static_k is not None or call.static_v is not None:
        keys = _check_static_keys_and_values(call)
    if call.padding is not None or call.attn_mask is not None:
        _check_masks(call, keys, batched=batched)
    if call.bias_k is not None or call.bias_v is not None:
        _check_slots(call)
    if type(call.dropout_p) is not float or not 0.0 <= call.dropout_p <= 1.0:
        check_probability(call.dropout_p, RuntimeOptionError)


def _check_input_shapes(call: Call) -> None:
    query, key, value, batch = call.query, call.key, call.value, 0 if call.batch_first else 1
    axes = "(batch, {}, width)" if call.batch_first else "({}, batch, width)"
    if query.shape[2] != call.embed_dim:
        width = query.shape[2]
        raise AssertedShapeError(
            saw=f"was expecting embedding dimension of {call.embed_dim}, but got {width}:"
            f" query has shape {tuple(query.shape)}",
            needed=f"{axes.format('queries')} with embed_dim {call.embed_dim}",
            do=f"pass queries of width {call.embed_dim}, or make the layer with embed_dim={width}",
        )
    packed = len(call.weights) == 1
    shapes = (key.shape, value.shape) if packed else (key.shape[:2], value.shape[:2])
    if shapes[0] != shapes[1]:
        raise AssertedShapeError(
            saw=f"key shape {shapes[0]} does not match value shape {shapes[1]}"
            if packed
            else f"key's sequence and batch dims {shapes[0]} do not match value's {shapes[1]}",
            needed=f"one value for each key, both {axes.format('keys')}",
            do="pass as many values as keys; other widths need kdim and vdim",
        )
    if key.shape[batch] != query.shape[batch]:
        raise RuntimeShapeError(
            saw=f"batch {query.shape[batch]} of query {tuple(query.shape)} but batch"
            f" {key.shape[batch]} of key {tuple(key.shape)}, read as {axes.format('length')}:"
            f" shape '[{key.shape[1 - batch]}, ...]' is invalid for input of size {key.numel()}",
            needed="one batch for query, key and value",
            do="expand key and value to the batch, or check the order of axes:"
            f" batch_first is {call.batch_first}",
        )


def _check_weights(call: Call) -> None:
    bias, packed, rows = call.bias, len(call.weights) == 1, call.width
    if bias is not None and bias.shape != (3 * rows,):
        raise AssertedShapeError(
            saw=f"expecting query bias shape of {(call.embed_dim,)}, but got in_proj_bias of shape"
            f" {tuple(bias.shape)}",
            needed=f"(3 * embed_dim,) = ({3 * call.embed_dim},)",
            do="torch.cat([q_bias, k_bias, v_bias]), with zeros for a missing one",
        )
    inputs = [("query", call.query)]
    if not packed or call.key is not call.query:
        inputs.append(("key", call.key))
    if not packed or call.value is not call.key:
        inputs.append(("value", call.value))
    rows = 3 * rows if packed else rows
    for index, (name, x) in enumerate(inputs):
        weight = call.weights[0 if packed else index]
        if weight is None:
            missing = "in_proj_weight" if packed else f"{name[0]}_proj_weight"
            raise AssertedOptionError(
                saw=f"use_separate_proj_weight is {not packed} but {missing} is None",
                needed="q_proj_weight, k_proj_weight and v_proj_weight, or in_proj_weight",
                do=f"pass {missing}, or use_separate_proj_weight={packed}",
            )
        if x.shape[-1] != weight.shape[1] or weight.shape[0] != rows:
            kind = RuntimeShapeError if packed else AssertedShapeError
            raise kind(
                saw=f"{name} {tuple(x.shape)} and a packed weight of shape {tuple(weight.shape)}:"
                f" mat1 and mat2 shapes cannot be multiplied"
                f" ({x.shape[:-1].numel()}x{x.shape[-1]} and {weight.shape[1]}x{rows})"
                if packed
                else f"expecting {name} weights shape of {(rows, x.shape[-1])}, but got"
                f" {weight.shape}",
                needed=f"{name}s of width {weight.shape[1]}, and a weight with {rows} rows",
                do=f"pass {name} of that width, or make the layer with kdim and vdim",
            )
        if x.dtype != weight.dtype or x.device != weight.device:
            _refuse_mixed_dtypes_or_devices(name, x, weight)


def _check_static_keys_and_values(call: Call) -> int:
    batch, heads = call.query.shape[0 if call.batch_first else 1], call.num_heads
    head_dim, lengths = call.width // heads, []
    for name, static in (("static_k", call.static_k), ("static_v", call.static_v)):
        if static is None:
            lengths.append(call.key.shape[1 if call.batch_first else 0])
            continue
        for axis, size in ((0, batch * heads), (2, head_dim)):
            if static.dim() != 3 or static.shape[axis] != size:
                actual = static.shape[axis] if static.dim() == 3 else tuple(static.shape)
                raise AssertedShapeError(
                    saw=f"expecting {name}.size({axis}) of {size}, but got {actual}",
                    needed=f"(batch*heads {batch * heads}, keys, head_dim {head_dim})",
                    do=f"{name}.flatten(0, 1) for a tensor (batch, heads, keys, head_dim)",
                )
        lengths.append(static.shape[1])
    if lengths[0] != lengths[1]:
        raise RuntimeShapeError(
            saw=f"static_k and static_v: Expected size for first two dimensions of batch2 tensor"
            f" to be: [{batch * heads}, {lengths[0]}] but got: [{batch * heads}, {lengths[1]}]",
            needed=f"one value for each of {lengths[0]} keys",
            do="pass both static_k and static_v, of one length",
        )
    return lengths[0]


def _check_masks(call: Call, keys: int, *, batched: bool) -> None:
    query, padding, attn_mask = call.query, call.padding, call.attn_mask
    axis, heads = 0 if call.batch_first else 1, call.num_heads
    batch, queries = query.shape[axis], query.shape[1 - axis]
    for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
        if mask is not None and mask.device != query.device:
            _refuse_device(name, mask, query, "query")
    if attn_mask is not None:
        expected = (queries, keys) if attn_mask.dim() == 2 else (batch * heads, queries, keys)
        if attn_mask.shape != expected:
            refuse_attn_mask_shape(attn_mask, expected, batch, heads, batched=batched)
    if padding is not None:
        for axis, (name, size) in enumerate((("batch", batch), ("keys", keys))):
            if padding.shape[axis] != size:
                do = "make one row for each sequence, with True for the keys to hide"
                if padding.shape == (keys, batch):
                    axes = (
                        "(length, batch, width)" if call.batch_first else "(batch, length, width)"
                    )
                    do = f"batch_first={not call.batch_first}, if query is {axes}; "
                    do += "else key_padding_mask.mT"
                raise AssertedMaskError(
                    saw=f"Expected key_padded_mask.shape[{axis}] to be {size}, but got"
                    f" {padding.shape[axis]}: {name} of key_padding_mask {tuple(padding.shape)}",
                    needed=f"(batch {batch}, keys {keys})",
                    do=do,
                )


def _check_slots(call: Call) -> None:
    for name, missing in (("k", "v"), ("v", "k")):
        if getattr(call, f"bias_{missing}") is None:
            raise AssertedOptionError(
                saw=f"bias_{name} is set but bias_{missing} is None",
                needed="a key and a value for the appended slot",
                do="set bias_k and bias_v, or neither",
            )
    for static, name in ((call.static_k, "key"), (call.static_v, "value")):
        if static is not None:
            raise AssertedOptionError(
                saw=f"bias cannot be added to static {name}.",
                needed="bias_k and bias_v, or static_k and static_v",
                do=f"append the bias to the static {name} yourself",
            )


def cast_under_autocast_or_raise(name: str, x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` in the dtype of ``like``; raise for another one without autocast, or device."""
    if x.device != like.device:
        _refuse_device(name, x, like, "the queries")
    if x.dtype == like.dtype:
        return x
    if not is_autocast_enabled(x.device.type):
        raise RuntimeDTypeError(
            saw=f"expected scalar type {like.dtype} but found {x.dtype} for the {name}",
            needed="queries, keys and values of one dtype, or torch.autocast",
            do=f"cast the input of the {name}: .to({like.dtype})",
        )
    return x.to(like.dtype)


def _refuse_device(name: str, x: Tensor, like: Tensor, other: str) -> NoReturn:
    raise RuntimeDeviceError(
        saw=f"Expected all tensors to be on the same device, but {name} is on {x.device}"
        f" and {other} on {like.device}",
        needed="one device",
        do=describe_move(name, x, like.device),
    )


def _refuse_mixed_dtypes_or_devices(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise for a mix of devices or dtypes, unless autocast or a tensor subclass handles it."""
    if not {type(x), type(weight)} <= {Tensor, torch.nn.Parameter}:
        return
    if x.device != weight.device:
        _refuse_device(name, x, weight, "its weight")
    if not is_autocast_enabled(x.device.type):
        raise RuntimeDTypeError(
            saw=f"mat1 and mat2 must have the same dtype, but got {x.dtype} for {name}"
            f" and {weight.dtype} for its weight",
            needed="one dtype, or torch.autocast",
            do=f"{name}.to({weight.dtype}), or layer.to({x.dtype})"
            if x.is_floating_point()
            else f"{name}.to({weight.dtype}); token ids go through an nn.Embedding first",
        )


def refuse_attn_mask_shape(
    mask: Tensor, expected: tuple[int, ...], batch: int, heads: int, *, batched: bool
) -> NoReturn:
    queries, keys = expected[-2:]
    advice = {
        (keys, queries): "attn_mask.mT, if its two axes are swapped",
        (batch, batch): "batch_first=True, if query is (batch, length, width)",
        (batch, keys): "pass a mask (batch, keys) as key_padding_mask",
        (1, queries, keys): "attn_mask[0], for one mask for all heads",
        (batch, queries, keys): f"attn_mask.repeat_interleave({heads}, dim=0), for one mask for"
        " each sequence",
        (heads, queries, keys): f"attn_mask.repeat({batch}, 1, 1), for one mask for each head",
    }
    do = advice.get(tuple(mask.shape), "make a mask for these queries and keys")
    if batched or mask.dim() == 2:
        raise RuntimeMaskError(
            saw=f"The shape of the {mask.dim()}D attn_mask is {mask.shape},"
            f" but should be {expected}.",
            needed=f"(queries {queries}, keys {keys}) or"
            f" (batch*heads {batch * heads}, queries {queries}, keys {keys})",
            do=do,
        )
    raise AssertedMaskError(
        saw=f"Expected `attn_mask` shape to be {expected} but got {mask.shape}",
        needed=f"(queries {queries}, keys {keys}) or (heads {heads}, queries, keys)",
        do=do,
    )
