"""Every attention call of a running model, whatever it is computed by.

Reached are layers of headwise; models of transformers that go through its attention interface;
`torch.nn.MultiheadAttention` and torch's transformer layers; and whatever calls
`scaled_dot_product_attention`. No layer is rewritten: hooks and settings are put back as they were,
also after an exception. What torch.compile has compiled runs uncompiled meanwhile. Attention that a
module computes by matrix products of its own, or in a graph that was exported or scripted, is not
reached; `AttentionCapture.unseen` names the modules that look like it.

What is said around a call is observed, or not said at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.errors import OptionError
from headwise.huggingface.enable import switched
from headwise.layers.hooks import attention_hook
from headwise.masks.clauses.band import Band
from headwise.scanning.call_context import KeyTokens, PendingProjection, TokenStreams, by_head
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.module_calls import ModuleCall, ModuleCalls, same, version_of
from headwise.scanning.torch_calls import TorchCalls
from headwise.support.kernel_calls import telling_own_calls

# A module of these names that ran and showed nothing may be attention that was not reached.
LOOKS_LIKE = ("attention", "attn")
MOST_NAMES = 4  # of these, before the rest is counted

Watch = Callable[[CapturedCall], Tensor | None]
Settled = Callable[[CapturedCall], None]

_one_at_a_time = threading.RLock()  # hooks of two readers of one model would meet


class AttentionCapture:
    """What was reached of one model; filled while it runs.

    ``layers`` holds the layers whose attention was seen, in call order: name -> class;
    ``tables`` the shapes of the embeddings that looked up tokens.
    """

    def __init__(
        self, model: nn.Module | None, watch: Watch | None, settled: Settled | None
    ) -> None:
        self.layers: dict[str, str] = {}
        self.tables: set[tuple[int, ...]] = set()
        self._watch, self._settled = watch, settled
        self._pending: PendingProjection | None = None
        self._ran: dict[str, str] = {}
        # Block, and real queries, of the last self-attention.
        self._last_block: tuple[str, Tensor | None] = ("", None)
        self._heads: dict[str, int] = {}
        self._bare = 0
        self._looks_up = model is not None and any(
            isinstance(module, nn.Embedding) for module in model.modules()
        )
        self._tokens = TokenStreams()
        whole = nn.Module() if model is None else model
        self.modules = ModuleCalls(whole, before=self._before, after=self._after)

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

    def require_any(self, model: str) -> None:
        """Raise OptionError if no attention of the model was seen."""
        if self.layers:
            return
        similar = ", ".join(sorted(set(self.unseen.values()))) or "none"
        raise OptionError(
            saw=f"{model}, in which no attention was seen; looking like it: {similar}",
            needed="attention that goes through transformers' interface, torch's layers, "
            "scaled_dot_product_attention, or headwise",
            do="where a module multiplies queries and keys itself, put an AttentionMatrix there",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What looks like attention, ran, and was not seen, in a sentence; none if all was."""
        if not (unseen := self.unseen):
            return ()
        names = ", ".join(f"{name} ({kind})" for name, kind in list(unseen.items())[:MOST_NAMES])
        more = f" and {len(unseen) - MOST_NAMES} more" if len(unseen) > MOST_NAMES else ""
        return (
            f"{len(self.layers)} layers were seen; {len(unseen)} that look like attention ran and "
            "were not: they multiply matrices themselves, call the kernel of another library, or "
            f"are scripted or exported graphs: {names}{more}",
        )

    def begin(self) -> None:
        """Another input: other sequences, and what runs outside of any module counts anew."""
        self._bare, self._last_block = 0, ("", None)
        self._tokens.begin_input()

    def show(self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
        """A watcher of `headwise.layers.hooks`."""
        self.settle()
        stack = self.modules.stack
        call = self._call(matrix, v, outputs)
        block = _block_of(stack, matrix)
        if stack:
            stack[-1].last_keys = matrix.k, call.is_cross
        for running in stack:
            running.attended += 1
        self._forget_projected()
        self.layers.setdefault(call.layer, type(call.module).__name__)
        changed = None if self._watch is None else self._watch(call)
        if self._settled is not None:
            self._pending = PendingProjection(call, block, version=version_of(outputs))
            if isinstance(call.module, nn.MultiheadAttention):
                # Its projection is applied by a function.
                call.out_proj = by_head(call.module.out_proj, outputs)
                self.settle()
        return outputs if changed is None else changed

    def settle(self) -> None:
        """Nothing more will be known of the last call."""
        pending, self._pending = self._pending, None
        if pending is None or self._settled is None:
            return
        if pending.was_read:
            self._forget_projected()  # what went into the output projection is no query and no key
        call, block = pending.call, pending.block
        # A model may have changed its head outputs since they were shown.
        if not version_of(call.outputs) == pending.version >= 0:
            call.outputs = None
        if block is not None and version_of(block.state) == block.version >= 0:
            assert block.state is not None
            width = None if call.out_proj is None else call.out_proj.shape[-1]
            call.residual = block.state if block.state.shape[-1] == width else None
        self._settled(call)

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

    def _call(self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> CapturedCall:
        """The record of a call, with what is known before anything else runs."""
        stack, layer = self.modules.stack, self._layer_name(matrix)
        batch, _, queries, keys = matrix.shape
        is_cross = _is_cross(stack, matrix)
        own_key, known = self._place(layer, matrix, is_cross=is_cross)
        real_keys = _real_keys(matrix, own_key)
        block = next((running.name for running in stack if running.is_block), "")
        if own_key is not None and own_key + queries <= keys:
            real_queries = real_keys[:, own_key : own_key + queries]
            self._last_block = block, real_queries
        else:
            own_key, real_queries = None, real_keys.new_ones(batch, queries)
            last, of_last = self._last_block
            # Queries of cross attention are those of the self-attention before it in its block.
            if block and last == block and of_last is not None:
                real_queries = of_last if of_last.shape == (batch, queries) else real_queries
        return CapturedCall(
            layer=layer,
            module=stack[-1].module if stack else None,
            state=stack[-1].state if stack else None,
            matrix=matrix,
            values=v,
            outputs=outputs,
            is_cross=is_cross,
            own_key=own_key,
            real_queries=real_queries,
            real_keys=real_keys,
            tokens=known.tokens,
            dropped=known.dropped,
        )

    def _place(
        self, layer: str, matrix: AttentionMatrix, *, is_cross: bool
    ) -> tuple[int | None, KeyTokens]:
        """Where the queries stand among the keys, and which tokens these are."""
        if is_cross:
            return None, self._tokens.of_cross(layer, matrix.shape)
        _, _, queries, keys = matrix.shape
        left, right = matrix.bound_mask.reach
        upper = None if right is None else min(max(0, right), max(0, keys - queries))
        own_key = 0 if queries == keys else upper
        known = self._tokens.of_self(
            layer,
            matrix.shape,
            self.modules.stack,
            own_key=own_key,
            windowed=left is not None,
        )
        if own_key is None and known.seen is not None:
            own_key = known.seen - known.dropped - queries
        return own_key, known

    def _before(self, running: ModuleCall) -> None:
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

    def _after(self, running: ModuleCall, output: Any) -> None:
        if self._pending is not None:
            self._pending.after(running, output)
            if self._pending.is_settled or running.is_block or not self.modules.stack:
                self.settle()


@contextmanager
def reached(
    model: nn.Module | None, watch: Watch | None = None, *, settled: Settled | None = None
) -> Iterator[AttentionCapture]:
    """Follow every attention call of ``model`` while the block runs it.

    Args:
        model: None where what runs is a function.
        watch: given each call at once; returns the head outputs to go on with, or None for its
            own.
        settled: given each call, or given it once more, when all that can be known around it is
            known.
    """
    with _one_at_a_time, ExitStack() as stack:
        reach = AttentionCapture(model, watch, settled)
        # A compiled graph shows nothing: what is compiled runs as it was written, for this time.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if model is not None:
            stack.enter_context(switched(model))
        stack.enter_context(reach.modules.followed())
        stack.enter_context(attention_hook(reach.show))
        stack.enter_context(telling_own_calls())
        stack.enter_context(TorchCalls())
        yield reach
        reach.settle()


def _real_keys(matrix: AttentionMatrix, own_key: int | None) -> Tensor:
    """(batch, keys): False where a key is hidden from every query, other than by a band.

    Behind the last query's own key a band hides what a cache has room for.
    """
    real = matrix.bound_mask.real_keys()
    for bias in matrix.score_bias.tensors:
        if bias.shape[2] == 1:
            real = real & (bias > -torch.inf).amax((1, 2))
    if own_key is not None and matrix.bound_mask.reach[1] is not None:
        queries = matrix.shape[2]
        real = real & (torch.arange(real.shape[1], device=real.device) < own_key + queries)
    return real


def _is_cross(stack: list[ModuleCall], matrix: AttentionMatrix) -> bool:
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
    if not given or matrix.mask.of_kind(Band):
        return False
    queries, keys = given[0], given[1] if len(given) > 1 else given[0]
    return not same(queries, keys)


def _block_of(stack: list[ModuleCall], matrix: AttentionMatrix) -> ModuleCall | None:
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
