"""The running modules of a model with their inputs, and weights of modules as plain tensors."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from headwise.support.private_torch import is_wrapper

# A module with a tensor argument of one of these names attends to another source than its state.
SOURCES = (
    "context",
    "cross_attention_states",
    "encoder_hidden_states",
    "key_value_states",
    "memory",
    "source",
)
DISTRIBUTED = "torch.distributed."  # begins the module of a class that FSDP2 puts in front
# Integer arguments of these names are positions or segment ids, and no tokens.
NO_TOKENS = ("position_ids", "token_type_ids", "cache_position")


@dataclass(eq=False)
class ModuleCall:
    """One forward pass of one module, while the module runs.

    Attributes:
        name: the module's name; with a number where the same module runs again in one pass.
        is_block: True for a member of a list of modules of one class, which pass a state on.
        state: the first floating-point input.
        version: the version of ``state``, which counts changes in place.
        tokens: the integer inputs (batch, length) that may be tokens.
        has_source: True if an argument names another source to attend to.
        projected: inputs of the first two matrices inside since the last attention call.
        attended: number of attention calls inside.
        last_keys: keys of the module's last attention call, and True if that was cross attention.
    """

    module: nn.Module
    name: str
    is_block: bool
    state: Tensor | None
    version: int
    tokens: list[Tensor]
    has_source: bool
    projected: list[Tensor] = field(default_factory=list)
    attended: int = 0
    last_keys: tuple[Tensor, bool] | None = None
    _turn: int = 1
    _covered: int = 0  # tokens whose queries this turn has had

    def turn_of_attention_call(self, queries: int) -> int:
        """Return the number of the turn that an attention call of so many queries belongs to.

        A module may split its attention over sequences or queries. Such calls are one turn until
        every input token has had its query. A later call attends once more for the same tokens, as
        in DiffLlama, and starts another turn. If the number of tokens is unknown, each call is a
        turn.
        """
        if self._covered and self._covered + queries > _token_count(self.state, self.tokens):
            self._turn, self._covered = self._turn + 1, 0
        self._covered += queries
        return self._turn


class ModuleCalls:
    """The running modules of one model, outermost first.

    Args:
        model: the model whose modules are followed.
        before: called with each module that is about to run.
        after: called with each module that has run and its output; None where the module raised.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        before: Callable[[ModuleCall], None],
        after: Callable[[ModuleCall, Any], None],
    ) -> None:
        self.stack: list[ModuleCall] = []
        self._names = {
            module: _name_without_wrappers(name)
            for name, module in model.named_modules()
            if unwrap_compiled(module) is module
        }
        self._blocks = {
            id(block) for module in model.modules() for block in _members_if_same_class(module)
        }
        self._times: Counter[str] = Counter()
        self._before, self._after = before, after
        self._thread = threading.get_ident()

    @contextmanager
    def attach_hooks(self) -> Iterator[None]:
        """Follow every module while the block runs, in this thread."""
        handles = []
        try:
            for module in self._names:
                if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                    handles.append(
                        module.register_forward_pre_hook(self._on_module_start, with_kwargs=True)
                    )
                    handles.append(
                        module.register_forward_hook(self._on_module_end, always_call=True)
                    )
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _on_module_start(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.stack:
            self._times.clear()  # another pass of the whole model begins
        name = self._names[module] or type(module).__name__
        self._times[name] += 1
        again = self._times[name]
        state = next(filter(_is_float_tensor, (*args, *kwargs.values())), None)
        module_call = ModuleCall(
            module=module,
            name=name if again == 1 else f"{name} ({again})",
            is_block=id(module) in self._blocks,
            state=state,
            version=version_counter(state),
            tokens=_token_tensors(args, kwargs),
            has_source=_has_cross_attention_source(module, args, kwargs),
        )
        self._record_projection_input(module_call)
        self._before(module_call)
        self.stack.append(module_call)

    def _record_projection_input(self, module_call: ModuleCall) -> None:
        weight = getattr(module_call.module, "weight", None)
        if module_call.state is None or not isinstance(weight, Tensor) or weight.dim() != 2:
            return
        for outer in reversed(self.stack):
            if len(outer.projected) < 2:
                outer.projected.append(module_call.state)
            if outer.is_block:
                return

    def _on_module_end(self, module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self.stack:
            # The hook of an inner module that raised may not have run.
            module_call = self.stack.pop()
            self._after(module_call, output if module_call.module is module else None)
            if module_call.module is module:
                return


def _token_count(state: Tensor | None, tokens: list[Tensor]) -> int:
    """Return the number of input tokens of a module in all sequences; 0 if it is unknown."""
    if state is None:
        return tokens[0].numel() if tokens else 0
    # With four axes, the last but one may be the length, the height of a picture, or heads.
    return 0 if state.is_nested or state.dim() > 3 else state.shape[:-1].numel()


def version_counter(state: Tensor | None) -> int:
    """Return how often a tensor was changed in place; −1 where torch does not count."""
    return -1 if state is None or state.is_inference() else state._version


def _members_if_same_class(listing: nn.Module) -> list[nn.Module]:
    """Return the members of a list of modules if all are of one class, such as layers."""
    if not isinstance(listing, (nn.ModuleList, nn.Sequential)):
        return []
    members = [unwrap_compiled(member) for member in listing]
    return members if len({type(member) for member in members}) == 1 else []


def unwrap_compiled(model: Any) -> Any:
    """Return the model or module inside the wrapper of torch.compile, if there is one."""
    return getattr(model, "_orig_mod", model)


def _name_without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _has_cross_attention_source(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if isinstance(module, nn.MultiheadAttention):  # its projections are no modules
        query, key = [*args[:2], *(kwargs[k] for k in ("query", "key") if k in kwargs)][:2]
        return not tensors_equal(query, key)
    return any(isinstance(kwargs.get(name), Tensor) for name in SOURCES)


def tensors_equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors hold the same numbers."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))


def _token_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    named = [value for name, value in kwargs.items() if name not in NO_TOKENS]
    return [value for value in (*args, *named) if _looks_like_token_ids(value)]


def _is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and torch.is_floating_point(value)


def _looks_like_token_ids(value: Any) -> bool:
    integers = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in integers and value.dim() == 2


# ---- weights as plain tensors, also of quantised layers -----------------------------------------


def plain_tensors_of_weight(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a weight: the weight, or its integers and scales."""
    if not is_wrapper(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        part = getattr(weight, name)
        if isinstance(part, Tensor):  # the parts of a sharded weight include its mesh
            yield from plain_tensors_of_weight(part)


def is_divided_over_devices(weight: Tensor) -> TypeGuard[Any]:
    """True if a weight is divided over devices, and each process holds a part."""
    return is_wrapper(weight) and hasattr(weight, "full_tensor")


def class_name_without_fsdp(module: nn.Module | None) -> str:
    """Return the name of a module's class, without the class that FSDP2 puts in front of it."""
    kind = type(module)
    is_derived = len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith(DISTRIBUTED)
    return kind.__bases__[1].__name__ if is_derived else kind.__name__


def dequantize_weight(weight: Tensor) -> Tensor | None:
    """Return a weight as a plain floating-point tensor, dequantised if necessary; else None.

    The dequantised numbers are those that the layer's products use. A weight that is divided over
    devices is gathered, which every process has to do at the same time.
    """
    if is_divided_over_devices(weight):
        weight = weight.full_tensor()
    if is_wrapper(weight):
        if type(weight).dequantize is Tensor.dequantize:
            return None
        weight = weight.dequantize()
    return weight if weight.is_floating_point() else None


def find_unembedding_module(model: Any) -> Any:
    """Return the last layer of a language model, or its weight; None if there is none."""
    getter = getattr(model, "get_output_embeddings", None)
    return unwrap_compiled(getter() if getter is not None else getattr(model, "unembedding", None))


def find_unembedding_weight(model: Any) -> Tensor | None:
    """Return the (vocabulary, embed_dim) weight of the last layer of a language model, if any."""
    module = find_unembedding_module(model)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    weight = dequantize_weight(weight.detach()) if isinstance(weight, Tensor) else None
    return weight if weight is not None and weight.dim() == 2 else None
