"""Every attention call of a running model, whatever it is computed by.

Reached are layers of headwise; models of transformers that go through its attention interface;
`torch.nn.MultiheadAttention` and torch's transformer layers; and whatever calls
`scaled_dot_product_attention`. No layer is rewritten: hooks and settings are put back as they were,
also after an exception. What torch.compile has compiled runs uncompiled meanwhile. Attention that a
module computes by matrix products of its own, or in a graph that was exported or scripted, is not
reached; `Reach.unseen` names the modules that look like it.

What is said around a call is observed, or not said at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.huggingface.switching import switched
from headwise.layers.hooks import watching
from headwise.matrix import AttentionMatrix
from headwise.scanning import projections
from headwise.scanning.calls import LayerCall
from headwise.scanning.modules import Modules, Running, same, version_of
from headwise.scanning.tokens import TokenStreams
from headwise.scanning.torch_calls import TorchCalls

# A module of these names that ran and showed nothing may be attention that was not reached.
LOOKS_LIKE = ("attention", "attn")

Watch = Callable[[LayerCall], Tensor | None]
Settled = Callable[[LayerCall], None]

_one_at_a_time = threading.RLock()  # hooks of two readers of one model would meet


class Reach:
    """What was reached of one model; filled while it runs.

    ``layers`` holds the layers whose attention was seen, in call order: name -> class;
    ``tables`` the shapes of the embeddings that looked up tokens.
    """

    def __init__(self, model: nn.Module | None, watch: Watch, settled: Settled | None) -> None:
        self.layers: dict[str, str] = {}
        self.tables: set[tuple[int, ...]] = set()
        self._watch, self._settled = watch, settled
        self._pending: projections.Pending | None = None
        self._ran: dict[str, str] = {}
        self._heads: dict[str, int] = {}
        self._bare = 0
        self._looks_up = model is not None and any(
            isinstance(module, nn.Embedding) for module in model.modules()
        )
        self._tokens = TokenStreams()
        whole = nn.Module() if model is None else model
        self.modules = Modules(whole, before=self._before, after=self._after)

    @property
    def unseen(self) -> dict[str, str]:
        """Modules that ran, look like attention and showed none: name -> class."""
        seen = [name.partition(" (")[0] for name in self.layers]

        def is_covered(name: str) -> bool:
            return any(
                name == own or own.startswith(name + ".") or name.startswith(own + ".")
                for own in seen
            )

        named = {n: kind for n, kind in self._ran.items() if not is_covered(n)}
        return {
            name: kind
            for name, kind in named.items()
            if not any(other.startswith(name + ".") for other in named)
        }

    def begin(self) -> None:
        """Another input: other sequences, and what runs outside of any module counts anew."""
        self._bare = 0
        self._tokens.begin_input()

    def show(self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
        """A watcher of `headwise.layers.hooks`."""
        self.settle()
        stack = self.modules.stack
        call = LayerCall(
            layer=self._layer_name(matrix),
            module=stack[-1].module if stack else None,
            matrix=matrix,
            values=v,
            outputs=outputs,
            version=version_of(outputs),
            is_cross=_is_cross(stack, matrix),
            block=next((running.name for running in stack if running.is_block), ""),
        )
        self._place(call)
        block = _block_of(stack, matrix)
        if stack:
            stack[-1].last_keys = matrix.k, call.is_cross
        for running in stack:
            running.attended += 1
        self._forget_projected()
        self.layers.setdefault(call.layer, type(call.module).__name__)
        changed = self._watch(call)
        if self._settled is not None:
            self._pending = projections.Pending(call, block)
            if isinstance(call.module, nn.MultiheadAttention):
                # Its projection is applied by a function.
                call.out_proj = projections.by_head(call.module.out_proj, call)
                self.settle()
        return outputs if changed is None else changed

    def settle(self) -> None:
        """Nothing more will be known of the last call."""
        pending, self._pending = self._pending, None
        if pending is None or self._settled is None:
            return
        if pending.was_read:
            self._forget_projected()  # what went into the output projection is no query and no key
        block = pending.block
        if block is not None and version_of(block.state) == block.version >= 0:
            pending.call.residual = block.state
        self._settled(pending.call)

    def _forget_projected(self) -> None:
        for running in self.modules.stack:
            if running.attended:  # else it began after the last call
                running.projected.clear()

    def _layer_name(self, matrix: AttentionMatrix) -> str:
        stack, heads = self.modules.stack, matrix.shape[1]
        if not stack:
            self._bare += 1
            return "attention" if self._bare == 1 else f"attention ({self._bare})"
        name, turn = stack[-1].name, stack[-1].turn(len(matrix.q) * matrix.shape[2])
        name = name if turn == 1 else f"{name} (call {turn})"
        if self._heads.setdefault(name, heads) != heads:
            return f"{name} ({heads} heads)"
        return name

    def _place(self, call: LayerCall) -> None:
        """Where the queries stand among the keys, and which tokens these are."""
        matrix = call.matrix
        _, _, queries, keys = matrix.shape
        if call.is_cross:
            call.tokens = self._tokens.of_cross(call.layer, matrix.shape).tokens
            return
        lower, upper = _bands(matrix)
        call.own_key = 0 if queries == keys else upper
        known = self._tokens.of_self(
            call.layer,
            matrix.shape,
            self.modules.stack,
            own_key=call.own_key,
            windowed=lower is not None,
        )
        call.tokens, call.dropped = known.tokens, known.dropped
        if call.own_key is None and known.seen is not None:
            call.own_key = known.seen - known.dropped - queries

    def _before(self, running: Running) -> None:
        is_whole = not self.modules.stack
        if is_whole:
            self._tokens.begin_pass(running.tokens)
        # Without an embedding, the tokens that the whole model is given are looked up by nobody.
        is_embedding = isinstance(running.module, nn.Embedding)
        if running.tokens and (is_embedding or (is_whole and not self._looks_up)):
            name = running.name if is_embedding else ""
            looked_up = self._tokens.look_up(name, running.tokens[0], self.modules.stack)
            if looked_up and isinstance(running.module, nn.Embedding):
                self.tables.add(tuple(running.module.weight.shape))
        if any(word in type(running.module).__name__.lower() for word in LOOKS_LIKE):
            self._ran[running.name.partition(" (")[0]] = type(running.module).__name__
        if self._pending is not None:
            self._pending.before(running, [one.module for one in self.modules.stack])

    def _after(self, running: Running, output: Any) -> None:
        if self._pending is not None:
            self._pending.after(running, output)
            if self._pending.is_settled or running.is_block or not self.modules.stack:
                self.settle()


@contextmanager
def reached(
    model: nn.Module | None, watch: Watch, *, settled: Settled | None = None
) -> Iterator[Reach]:
    """Show ``watch`` every attention call of ``model`` while the block runs it.

    Args:
        model: None where what runs is a function.
        watch: given each call; returns the head outputs to go on with, or None for its own.
        settled: given each call once more, when all that can be known around it is known.
    """
    with _one_at_a_time, ExitStack() as stack:
        reach = Reach(model, watch, settled)
        # A compiled graph shows nothing: what is compiled runs as it was written, for this time.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if model is not None:
            stack.enter_context(switched(model))
        stack.enter_context(reach.modules.followed())
        stack.enter_context(watching(reach.show))
        stack.enter_context(TorchCalls())
        yield reach
        reach.settle()


def _bands(matrix: AttentionMatrix) -> tuple[int | None, int | None]:
    """``lower <= key - query <= upper``, where the mask has such bands."""
    batch, heads, queries, keys = matrix.shape
    sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    bound = matrix.mask.bind(**sizes, device=matrix.q.device)
    upper = None if bound.upper is None else min(max(0, bound.upper), max(0, keys - queries))
    return bound.lower, upper


def _is_cross(stack: list[Running], matrix: AttentionMatrix) -> bool:
    """Whether keys are projected from something else than queries.

    By name, where the modules that run inside of the block were given a source; else by what the
    matrices were given since the last attention call: queries first, then keys.
    """
    for running in reversed(stack):
        if running.is_block:
            break
        if running.has_source:
            return True
    given = next((running.projected for running in reversed(stack) if running.projected), [])
    last = stack[-1].last_keys if stack else None
    if not given and last is not None and same(last[0], matrix.k):  # attends once more
        return last[1]
    if not given or matrix.mask.bands:
        return False
    queries, keys = given[0], given[1] if len(given) > 1 else given[0]
    return not same(queries, keys)


def _block_of(stack: list[Running], matrix: AttentionMatrix) -> Running | None:
    """The innermost block around the layer, before its first attention.

    Its state is (batch, queries, width), which cannot be told from (queries, batch, width) where
    both are as long.
    """
    batch, _, queries, _ = matrix.shape
    for running in reversed(stack[:-1]):
        if running.is_block:
            state = running.state
            fits = state is not None and state.dim() == 3 and state.shape[:2] == (batch, queries)
            return running if fits and not running.attended and batch != queries else None
    return None
