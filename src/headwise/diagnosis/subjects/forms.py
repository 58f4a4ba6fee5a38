"""Forms of the inputs and outputs of functions: most take (batch, tokens, width) in float32."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.support.text import list_some

NamedCall: TypeAlias = Callable[[Mapping[str, Any]], Any]  # of arguments by name
LAYOUTS = {
    "": "",
    "one": "one sequence a call",
    "bare": "one sequence a call, as (tokens, width)",
    "list": "a list of sequences",
    "channels": "(batch, width, tokens)",
}
DTYPES = (None, torch.float64, torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of outputs
SOURCES = {"context", "cond", "encoder_hidden_states", "kv", "key_value", "key_value_states"}
SOURCES |= {"memory", "source", "y"}


@dataclass(frozen=True)
class Form:
    """The axes, type and dtype of tokens that a function takes.

    Attributes:
        layout: a key of ``LAYOUTS``.
        is_array: True for NumPy arrays.
        dtype: of the tokens; None for that which they have.
    """

    layout: str = ""
    is_array: bool = False
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f"{str(self.dtype).removeprefix('torch.')} tokens"
        return ", ".join(filter(None, (LAYOUTS[self.layout], dtype)))

    def run(self, given: Mapping[str, Tensor], call: NamedCall) -> Any:
        """Return the result of a call for inputs of the usual form; of other ones the output."""
        batch = len(given["x"])
        if self.layout in ("one", "bare"):
            each = [self._take(given, n, batch) for n in range(batch)]
            outputs = [self._ask(arguments, call) for arguments in each]
            return torch.cat([y[None] if y.dim() == 2 else y for y in outputs])
        if self.layout == "list":
            arguments = dict(self._convert(given))
            outputs = call({**arguments, "x": [*arguments["x"]]})
            return torch.stack([read_output(y) for y in outputs])
        if self.layout == "channels":
            turned = {name: x if name == "mask" else x.mT for name, x in given.items()}
            return self._ask(turned, call).mT
        return call(self._convert(given))

    def _take(self, given: Mapping[str, Tensor], n: int, batch: int) -> dict[str, Tensor]:
        single = {name: x[n : n + 1] if len(x) == batch else x for name, x in given.items()}
        if self.layout == "one":
            return single
        return {name: x[0, 0] if name == "mask" else x[0] for name, x in single.items()}

    def _ask(self, arguments: Mapping[str, Tensor], call: NamedCall) -> Tensor:
        return read_output(call(self._convert(arguments)))

    def _convert(self, arguments: Mapping[str, Tensor]) -> Mapping[str, Any]:
        cast = {
            name: x.to(self.dtype) if self.dtype and x.is_floating_point() else x
            for name, x in arguments.items()
        }
        return {name: x.detach().numpy() for name, x in cast.items()} if self.is_array else cast


def list_forms() -> Iterator[Form]:
    """Yield the forms to try, the usual one and that of NumPy arrays first."""
    yield Form()
    yield Form(is_array=True)
    for layout, dtype, is_array in product(LAYOUTS, DTYPES, (False, True)):
        if (layout or dtype) and not (is_array and dtype == torch.bfloat16):
            yield Form(layout, is_array, dtype)


def read_output(result: Any) -> Tensor:
    """Return the output of a function as a plain tensor of the CPU; of a tuple the first.

    Raises:
        OptionError: neither a tensor nor an array, or one that does not hold real floats.
    """
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor | np.ndarray):
        result = result[0]
    if isinstance(result, np.ndarray) and result.dtype.kind == "f":
        # Tensors take no negative strides, other byte order or more than 8 bytes.
        return torch.from_numpy(np.array(result, f"f{min(result.itemsize, 8)}", order="C"))
    if isinstance(result, Tensor) and _holds_floats(result):
        return result.as_subclass(Tensor).cpu().clone()  # a later call may fill it again
    if isinstance(result, Tensor | np.ndarray):
        kind = " (sparse, nested or on meta)" if result.dtype in FLOATS else ""
        raise OptionError(
            saw=f"an output of {result.dtype}{kind}",
            needed="a dense tensor or array of float64, float32, bfloat16 or float16",
            do="give the numbers before they are converted, or compare(lambda x: "
            f"function(x).{'real' if 'complex' in str(result.dtype) else 'float()'}, ...)",
        )
    raise OptionError(
        saw=f"an output of type {type(result).__name__}{_describe_fields(result)}",
        needed="a tensor or a NumPy array of (batch, queries, out_dim)",
        do=f"compare(lambda x: function(x){_select_tensor(result)}, ...) selects one output of "
        "several",
    )


def _holds_floats(x: Tensor) -> bool:
    is_dense = x.layout == torch.strided and not x.is_nested and not x.is_meta
    return is_dense and x.dtype in FLOATS


MOST_FIELDS = 6


def _fields(result: object) -> Mapping[str, Any]:
    """Return the tensors of a result by the code that selects each."""
    if isinstance(result, Mapping):
        pairs = {f"[{key!r}]": value for key, value in result.items()}
    elif isinstance(result, list | tuple):
        pairs = {f"[{n}]": value for n, value in enumerate(result)}
    else:
        pairs = {f".{name}": value for name, value in getattr(result, "__dict__", {}).items()}
    return {code: x for code, x in pairs.items() if isinstance(x, Tensor | np.ndarray)}


def _describe_fields(result: object) -> str:
    fields = [f"{code} of shape {tuple(x.shape)}" for code, x in _fields(result).items()]
    return f" with {list_some(fields, MOST_FIELDS)}" if fields else ""


def _select_tensor(result: object) -> str:
    return next(iter(_fields(result)), "[0]")


def _read_arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(called).parameters
    except (TypeError, ValueError):  # of a function that is not written in Python
        return {}


def name_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments; ``**kwargs``, which may ignore them, is none."""
    return frozenset(_read_arguments(function))


def read_required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without a default, in order."""
    parameters = _read_arguments(function).values()
    varied = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in varied]


def name_keys(required: list[str]) -> tuple[str, ...]:
    """Return the required arguments that get the tokens of keys: of (q, k, v), or of (x, context).

    Raises:
        OptionError: a required argument that is none of these, nor a mask.
    """
    rest = [name for name in required[1:] if name not in ("mask", "source")]
    if not rest or (len(rest) == 1 and rest[0] in SOURCES) or _are_keys_and_values(rest):
        return tuple(rest)
    is_mask = "mask" in rest[0].lower()
    raise OptionError(
        saw=f"a function with a required argument {rest[0]}",
        needed="a function of x, or of x and mask, or of query, key and value",
        do=f"compare(lambda x, mask: function(x, {rest[0]}=mask), ...): mask is boolean, True "
        "attends; give ~mask where True hides, torch.where(mask, 0.0, -torch.inf) where it is "
        "added, mask[:, 0, 0] for (batch, keys)"
        if is_mask
        else f"compare(lambda x: function({', '.join(required)}), ...), with your values beside x",
    )


def _are_keys_and_values(rest: list[str]) -> bool:
    return len(rest) == 2 and [name[0].lower() for name in rest] == ["k", "v"]
