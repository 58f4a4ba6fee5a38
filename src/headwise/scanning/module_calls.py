"""Which module of a model is running, and what was given to it: hooks that come off again.

And the weights of modules as plain tensors.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.support.private_torch import is_wrapper

# Given a tensor by one of these names, a module attends to something else than its own state.
SOURCES = (
    "context",
    "cross_attention_states",
    "encoder_hidden_states",
    "key_value_states",
    "memory",
    "source",
)
# Integers by these names are places or kinds of tokens, and no tokens.
NO_TOKENS = ("position_ids", "token_type_ids", "cache_position")


@dataclass(eq=False)
class ModuleCall:
    """One forward pass of one module, while it runs.

    Attributes:
        name: of the module; with a number where the same module runs again in one pass.
        is_block: whether it is one of a list of modules of one class, which pass a state on.
        state: the first floating-point tensor it was given.
        version: of that tensor: it counts changes in place.
        tokens: the integer tensors (batch, length) it was given that may be tokens.
        has_source: whether it was given something else to attend to by its name.
        projected: what the first two matrices inside were given since the last attention call.
        attended: how many attention calls it has seen inside.
        last_keys: the keys of its own last attention call, and whether that was cross attention.
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

    def turn(self, queries: int) -> int:
        """Return the number of the turn that an attention call of so many queries belongs to.

        A module may compute its attention in parts: of some sequences, or of some queries, at a
        time. Those are one turn, until every token that the module was given has had its query.
        What comes then attends once more for the same tokens, as in DiffLlama: another turn. Where
        the number of tokens is not known, each call is a turn of its own.
        """
        if self._covered and self._covered + queries > _length_of(self.state, self.tokens):
            self._turn, self._covered = self._turn + 1, 0
        self._covered += queries
        return self._turn


class ModuleCalls:
    """The running modules of one model, outermost first.

    Args:
        model: whose modules are followed.
        before: told of each module that is about to run.
        after: told of each module that has run, with its output; None where it raised.
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
            module: _name_as_written(name)
            for name, module in model.named_modules()
            if as_written(module) is module
        }
        self._blocks = {id(block) for module in model.modules() for block in _blocks_of(module)}
        self._times: Counter[str] = Counter()
        self._before, self._after = before, after
        self._thread = threading.get_ident()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow every module while the block runs, in this thread."""
        handles = []
        try:
            for module in self._names:
                if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.stack:
            self._times.clear()  # another pass of the whole model begins
        name = self._names[module] or type(module).__name__
        self._times[name] += 1
        again = self._times[name]
        state = next(filter(_is_state, (*args, *kwargs.values())), None)
        running = ModuleCall(
            module=module,
            name=name if again == 1 else f"{name} ({again})",
            is_block=id(module) in self._blocks,
            state=state,
            version=version_of(state),
            tokens=_tokens(args, kwargs),
            has_source=_has_source(module, args, kwargs),
        )
        self._note_projection(running)
        self._before(running)
        self.stack.append(running)

    def _note_projection(self, running: ModuleCall) -> None:
        weight = getattr(running.module, "weight", None)
        if running.state is None or not isinstance(weight, Tensor) or weight.dim() != 2:
            return
        for outer in reversed(self.stack):
            if len(outer.projected) < 2:
                outer.projected.append(running.state)
            if outer.is_block:
                return

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self.stack:
            # A module that raised has not left by itself.
            running = self.stack.pop()
            self._after(running, output if running.module is module else None)
            if running.module is module:
                return


def _length_of(state: Tensor | None, tokens: list[Tensor]) -> int:
    """How many tokens a module was given, in all sequences; 0 where that cannot be told."""
    if state is None:
        return tokens[0].numel() if tokens else 0
    # Of four axes the last but one may be the length, the height of a picture, or heads.
    return 0 if state.is_nested or state.dim() > 3 else state.shape[:-1].numel()


def version_of(state: Tensor | None) -> int:
    """How often a tensor was changed in place; −1 where nobody counts."""
    return -1 if state is None or state.is_inference() else state._version


def _blocks_of(listing: nn.Module) -> list[nn.Module]:
    """The members of a list of modules that are all of one class: layers, one after the other."""
    if not isinstance(listing, (nn.ModuleList, nn.Sequential)):
        return []
    members = [as_written(member) for member in listing]
    return members if len({type(member) for member in members}) == 1 else []


def as_written(model: Any) -> Any:
    """A model or module as it was before torch.compile put another around it."""
    return getattr(model, "_orig_mod", model)


def _name_as_written(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _has_source(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(module, nn.MultiheadAttention):  # its matrices are no modules
        query, key = [*args[:2], *(kwargs[k] for k in ("query", "key") if k in kwargs)][:2]
        return not same(query, key)
    return any(isinstance(kwargs.get(name), Tensor) for name in SOURCES)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    named = [value for name, value in kwargs.items() if name not in NO_TOKENS]
    return [value for value in (*args, *named) if _is_tokens(value)]


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and torch.is_floating_point(value)


def _is_tokens(value: Any) -> bool:
    integers = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in integers and value.dim() == 2


# ---- weights as plain tensors: of quantised layers too, and of what gives the logits -----------


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a weight is made of: itself, or its integers and its scales."""
    if not is_wrapper(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(weight, name))


def as_floats(weight: Tensor) -> Tensor | None:
    """Return a weight as a plain tensor of floating-point numbers; None where it has no such form.

    A quantised weight is dequantised: these are the numbers that its products are made with.
    """
    if is_wrapper(weight):
        if type(weight).dequantize is Tensor.dequantize:  # spread over devices
            return None
        weight = weight.dequantize()
    return weight if weight.is_floating_point() else None


def unembedding_of(model: Any) -> Tensor | None:
    """(vocabulary, embed_dim): what a language model of transformers, or of headwise, ends with."""
    named = getattr(model, "get_output_embeddings", None)
    module = named() if named is not None else getattr(model, "unembedding", None)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    weight = as_floats(weight.detach()) if isinstance(weight, Tensor) else None
    return weight if weight is not None and weight.dim() == 2 else None
