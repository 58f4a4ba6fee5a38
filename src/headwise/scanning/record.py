"""The one recorder of a running model: its attention calls, and what was observed around them.

Scans, importance, comparisons, detection and divided models read its records. Five sources are
captured: layers of headwise, models of transformers that use its attention interface,
`torch.nn.MultiheadAttention` with torch's transformer layers, any code that calls
`scaled_dot_product_attention`, and attention by two matrix products with a softmax in between. No
layer is rewritten. Hooks, settings and modes are restored afterwards, also after an exception, and
compiled modules run uncompiled in between.

Exported or scripted graphs are not captured, and no products of which the second has other weights
than the softmax returned. `Recorder.missed_modules` lists the modules that look like attention and
were not captured.

Everything reported about a call is observed at run time; nothing is guessed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.places import is_same_branch
from headwise.errors import OptionError
from headwise.huggingface.running import observe_attention, using_headwise_attention
from headwise.layers.hooks import attention_hook
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.clauses.band import Band
from headwise.masks.clauses.chosen import Chosen
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning import weights
from headwise.scanning.call import (
    ORIGINAL,
    CapturedCall,
    ModuleCall,
    OriginalHeads,
    tensors_equal,
    version_counter,
)
from headwise.scanning.context import CallAwaitingProjection, KeyTokens, TokenStreams
from headwise.scanning.inputs import ModelInput, call_model_on_input
from headwise.scanning.torch_calls import TorchCalls
from headwise.support.text import describe_count, list_some
from headwise.support.tracing import evaluation_mode, is_kernel_call, track_kernel_calls

# Names of arguments. A module with a tensor argument of the first attends to another source.
SOURCES = (
    "encoder_hidden_states",
    "key_value_states",
    "cross_attention_states",
    "context",
    "memory",
    "source",
)
MASKS = ("attention_mask", "mask")
POSITIONS = ("position_ids", "cache_position")
NO_TOKENS = (*POSITIONS, "token_type_ids")  # integers that are no tokens

# A module whose class has one of these words in its name is expected to compute attention.
ATTENTION_WORDS = ("attention", "attn")
MOST_NAMES = 4  # modules that a note names; the others are counted

Watch = Callable[[CapturedCall], Tensor | None]
OnComplete = Callable[[CapturedCall], None]

_recorder_lock = threading.RLock()  # the hooks of two recorders of one model would collide


@contextmanager
def record_attention(
    model: Any,
    watch: Watch | None = None,
    *,
    on_complete: OnComplete | None = None,
    keep_implementation: bool = False,
    gradients: bool = False,
) -> Iterator[Recorder]:
    """Record every attention call of ``model`` while the block runs, in evaluation mode.

    Args:
        model: a module, or a function that attends.
        watch: called at once with each call; returns head outputs to continue with, or None to
            leave them as they are.
        on_complete: called later with each call, when all that is observed around it is recorded.
        keep_implementation: True if models of transformers compute attention by their own
            implementation and masks; by default headwise computes it.
        gradients: True to run with gradients.
    """
    module = model if isinstance(model, nn.Module) else None
    with _recorder_lock, ExitStack() as stack:
        recorder = Recorder(model, watch, on_complete)
        if gradients:
            stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(evaluation_mode(module))
        # Hooks do not run inside a compiled graph, so compiled modules run uncompiled here.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if keep_implementation:
            stack.enter_context(observe_attention())
        elif module is not None:
            stack.enter_context(using_headwise_attention(module))
        stack.enter_context(recorder.follow_modules())
        stack.enter_context(attention_hook(recorder.record_call))
        stack.enter_context(track_kernel_calls())
        stack.enter_context(TorchCalls(recorder.find_owner, recorder.note_explicit_attention))
        yield recorder
        recorder.complete_call()


class Recorder:
    """The attention calls of one model, recorded while the model runs."""

    def __init__(
        self, model: Any, watch: Watch | None = None, on_complete: OnComplete | None = None
    ) -> None:
        whole = model if isinstance(model, nn.Module) else nn.Module()
        self.stack: list[ModuleCall] = []  # modules that are running, outermost first
        self._names = {
            module: ".".join(part for part in name.split(".") if part != "_orig_mod")
            for name, module in whole.named_modules()
            if weights.unwrap_compiled(module) is module
        }
        blocks = map(_members_if_same_class, whole.modules())
        self._blocks = {id(block) for members in blocks for block in members}
        self._times: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self.layers: dict[str, str] = {}  # class of each captured layer, by its name
        self.tables: set[tuple[int, ...]] = set()  # shapes of embeddings that looked up tokens
        self._model, self._watch, self._on_complete = model, watch, on_complete
        self._pending: CallAwaitingProjection | None = None
        self._ran: dict[str, str] = {}  # modules whose class says attention
        self._explicit: dict[str, str] = {}  # modules with explicit products
        self._outside = ModuleCall(module=nn.Module(), name="attention")
        self._is_reading = False  # True while a call is handed on
        # The block and the real queries of the last self-attention.
        self._last_block: tuple[str, Tensor | None] = ("", None)
        self._heads: dict[str, int] = {}
        self._calls_outside_modules = 0
        self._has_embedding = any(isinstance(m, nn.Embedding) for m in whole.modules())
        self._has_divided_weights = any(map(weights.is_divided_over_devices, whole.parameters()))
        self._tokens = TokenStreams()
        # outputs of the blocks that ended in this pass, None for one that ran twice; kept on demand
        self.ended: dict[nn.Module, Any] | None = None

    # ---- modules ------------------------------------------------------------------------------

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Follow every module while the block runs, in this thread."""
        with ExitStack() as handles:
            handles.callback(self.stack.clear)
            for module in self._names:
                if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                    start = module.register_forward_pre_hook(self._on_start, with_kwargs=True)
                    handles.enter_context(start)
                    end = module.register_forward_hook(self._on_end, always_call=True)
                    handles.enter_context(end)
            yield

    def _on_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.stack:
            self._times.clear()  # another pass of the whole model begins
        name = self._names[module] or type(module).__name__
        self._times[name] += 1
        again = self._times[name]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        state = next((x for x in tensors if torch.is_floating_point(x)), None)
        named = [value for key, value in kwargs.items() if key not in NO_TOKENS]
        pairs = [x for x in (*args, *named) if isinstance(x, Tensor) and x.dim() == 2]
        module_call = ModuleCall(
            module=module,
            name=name if again == 1 else f"{name} ({again})",
            is_block=id(module) in self._blocks,
            state=state,
            version=version_counter(state),
            tokens=[x for x in pairs if x.dtype in (torch.int32, torch.int64)],
            has_source=_has_cross_attention_source(module, args, kwargs),
        )
        weight = getattr(module, "weight", None)
        is_projection = isinstance(weight, Tensor) and weight.dim() == 2
        for outer in reversed(self.stack) if is_projection else ():
            if len(outer.projected) < 2 and state is not None:
                outer.projected.append(state)
            if outer.is_block:
                break
        self._note_module_start(module_call)
        self.stack.append(module_call)

    def _note_module_start(self, module_call: ModuleCall) -> None:
        is_whole = not self.stack
        if is_whole:
            self._tokens.begin_pass(module_call.tokens)
        # In a model without an embedding, the tokens of the model's input count as looked up.
        is_embedding = isinstance(module_call.module, nn.Embedding)
        if module_call.tokens and (is_embedding or (is_whole and not self._has_embedding)):
            name = module_call.name if is_embedding else ""
            looked_up = self._tokens.add_lookup(name, module_call.tokens[0], self.stack)
            if looked_up and isinstance(module_call.module, nn.Embedding):
                self.tables.add(tuple(module_call.module.weight.shape))
        if any(word in type(module_call.module).__name__.lower() for word in ATTENTION_WORDS):
            name = module_call.name.partition(" (")[0]
            self._ran[name] = weights.class_name_without_fsdp(module_call.module)
        if self._pending is not None:
            self._pending.note_module_start(module_call, [outer.module for outer in self.stack])

    def _on_end(self, module: nn.Module, _: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self.stack:
            # The hook of an inner module that raised may not have run.
            module_call = self.stack.pop()
            if self._pending is not None:
                result = output if module_call.module is module else None
                self._pending.note_module_output(module_call, result)
                if self._pending.is_complete or module_call.is_block or not self.stack:
                    self.complete_call()
            if module_call.module is module:
                if module_call.is_block and self.ended is not None:
                    self.ended[module] = None if module in self.ended else output
                return

    @contextmanager
    def reuse(self, outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
        """Let modules return these outputs while the block runs, in place of running."""
        before = {module: vars(module).get("forward") for module in outputs}
        try:
            for module, output in outputs.items():
                vars(module)["forward"] = lambda *_, _output=output, **__: _output
            yield
        finally:
            for module, forward in before.items():
                vars(module).pop("forward", None)
                vars(module).update({} if forward is None else {"forward": forward})

    # ---- running, and what was not captured -----------------------------------------------------

    def begin_input(self) -> None:
        """Start another input, with other sequences and a new count of calls outside modules."""
        self._calls_outside_modules, self._last_block = 0, ("", None)
        self._outside = ModuleCall(module=nn.Module(), name="attention")
        self._tokens.begin_input()

    def run(self, model_input: ModelInput) -> Any:
        """Start another input, run the model on it, and return the output."""
        self.begin_input()
        return call_model_on_input(self._model, model_input)

    @property
    def missed_modules(self) -> dict[str, str]:
        """The class of each module that looks like attention, ran, and was not captured.

        A module looks like attention by its class name, or by its explicit matrix products.
        """
        missed = {
            name: kind
            for name, kind in self._ran.items()
            if not any(is_same_branch(name, layer) for layer in self.layers)
        }
        missed |= self._explicit
        outer = [x for x in missed if any(other.startswith(x + ".") for other in missed)]
        return {x: kind for x, kind in missed.items() if x in self._explicit or x not in outer}

    def require_any_captured(self, model: str) -> None:
        """Raise OptionError if no attention of the model was captured."""
        if self.layers:
            return
        similar = ", ".join(sorted(set(self.missed_modules.values()))) or "none"
        raise OptionError(
            saw=f"{model}, in which no attention was captured; modules that look like it: "
            f"{similar}",
            needed="attention computed by transformers' attention interface, torch's layers, "
            "scaled_dot_product_attention or headwise, or by two matrix products with a softmax in "
            "between",
            do="use an AttentionMatrix in the module that multiplies queries and keys itself",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the modules that look like attention and were not captured, if any."""
        if not (missed := self.missed_modules):
            return ()
        names = list_some([f"{name} ({kind})" for name, kind in missed.items()], MOST_NAMES)
        captured, others = len(self.layers), describe_count(len(missed), "module")
        return (
            f"captured: {describe_count(captured, 'layer')}; not captured: {others} similar to "
            "attention, with matrix products of its own, the kernel of another library, or a "
            f"scripted or exported graph: {names}",
        )

    # ---- attention calls --------------------------------------------------------------------

    def record_call(self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor) -> Tensor:
        """Record one attention call; a hook of `headwise.layers.hooks`."""
        self.complete_call()
        stack, computed = self.stack, outputs
        matrix, v, outputs = self._join_divided_heads(matrix, v, outputs)
        call = self._make_call_record(matrix, v, outputs)
        block = _find_block(stack, matrix)
        if stack:
            stack[-1].last_keys = matrix.k, call.is_cross
        for module_call in stack:
            module_call.attended += 1
        self._clear_projection_inputs()
        self.layers.setdefault(call.layer, weights.class_name_without_fsdp(call.module))
        changed = self._hand_on(call, self._watch)
        if self._on_complete is not None:
            self._pending = CallAwaitingProjection(call, block, computed)
            is_drop_in = isinstance(call.module, MultiheadAttention)
            if isinstance(call.module, nn.MultiheadAttention) and not is_drop_in:
                # Its projection is applied by a function; the drop-in calls it.
                call.out_proj = weights.split_weight_by_head(call.module.out_proj, outputs)
                self.complete_call()
        return computed if changed is None else changed

    def find_owner(self) -> ModuleCall | None:
        """Return the innermost running module with parameters, to which products belong.

        None if a kernel of headwise runs, or code that reads a call.
        """
        if self._is_reading or is_kernel_call():
            return None
        owners = (x for x in reversed(self.stack) if any(True for _ in x.module.parameters()))
        return next(owners, self.stack[0] if self.stack else self._outside)

    def note_explicit_attention(self, owner: ModuleCall) -> None:
        """Note that a module multiplied values by weights of which no matrix is known."""
        name = owner.name.partition(" (")[0]
        self._explicit[name] = weights.class_name_without_fsdp(owner.module)

    def _join_divided_heads(
        self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor
    ) -> tuple[AttentionMatrix, Tensor, Tensor]:
        stack = self.stack
        if not self._has_divided_weights or not stack:
            return matrix, v, outputs
        around = list(takewhile(lambda inner: not inner.is_block, reversed(stack)))
        modules = [module_call.module for module_call in around or stack[-1:]]
        weight = weights.find_divided_projection(modules, outputs.shape[1] * outputs.shape[3])
        if weight is None:
            return matrix, v, outputs
        return weights.join_divided_heads(matrix, v, outputs, weight, layer=stack[-1].name)

    def complete_call(self) -> None:
        """Hand the last call on, with all that was observed around it."""
        pending, self._pending = self._pending, None
        if pending is None or self._on_complete is None:
            return
        if pending.was_read:
            # The input of the output projection is no query and no key.
            self._clear_projection_inputs()
        call, block = pending.call, pending.block
        # A model may have changed its head outputs in place since the call.
        if not version_counter(pending.outputs) == pending.version >= 0:
            call.outputs = None
        if block is not None and version_counter(block.state) == block.version >= 0:
            assert block.state is not None
            width = None if call.out_proj is None else call.out_proj.shape[-1]
            call.residual = block.state if block.state.shape[-1] == width else None
        self._hand_on(call, self._on_complete)

    def _hand_on(self, call: CapturedCall, read: Watch | OnComplete | None) -> Tensor | None:
        """Return what a reader of calls returns, whose products are none of the model."""
        self._is_reading = True
        try:
            return None if read is None else read(call)
        finally:
            self._is_reading = False

    def _clear_projection_inputs(self) -> None:
        for module_call in self.stack:
            if module_call.attended:  # a module that began after the last call keeps its inputs
                module_call.projected.clear()

    def _layer_name(self, matrix: AttentionMatrix) -> str:
        stack, heads = self.stack, matrix.shape[1]
        if not stack:
            self._calls_outside_modules += 1
            count = self._calls_outside_modules
            return "attention" if count == 1 else f"attention ({count})"
        turn = stack[-1].turn_of_attention_call(len(matrix.q) * matrix.shape[2])
        name = stack[-1].name if turn == 1 else f"{stack[-1].name} (call {turn})"
        if self._heads.setdefault(name, heads) != heads:
            return f"{name} ({heads} heads)"
        return name

    def _make_call_record(
        self, matrix: AttentionMatrix, v: Tensor, outputs: Tensor
    ) -> CapturedCall:
        stack, layer = self.stack, self._layer_name(matrix)
        batch, _, queries, keys = matrix.shape
        is_cross = _is_cross(stack, matrix)
        own_key, key_tokens = self._locate_queries_and_key_tokens(layer, matrix, is_cross=is_cross)
        real_keys = _real_keys(matrix, own_key)
        block = next((module_call.name for module_call in stack if module_call.is_block), "")
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
            tokens=key_tokens.tokens,
            dropped=key_tokens.dropped,
            read_tokens=key_tokens.read,
            original=_original_heads(stack, matrix.shape[1]),
        )

    def _locate_queries_and_key_tokens(
        self, layer: str, matrix: AttentionMatrix, *, is_cross: bool
    ) -> tuple[int | None, KeyTokens]:
        """Return the key index of query 0, and the tokens of the keys."""
        if is_cross:
            return None, self._tokens.key_tokens_of_cross_attention(layer, matrix.shape)
        _, _, queries, keys = matrix.shape
        left, right = matrix.bound_mask.reach
        upper = None if right is None else min(max(0, right), max(0, keys - queries))
        own_key = 0 if queries == keys else upper
        key_tokens = self._tokens.key_tokens_of_self_attention(
            layer, matrix.shape, self.stack, own_key=own_key, windowed=left is not None
        )
        if own_key is None and key_tokens.count is not None:
            own_key = key_tokens.count - key_tokens.dropped - queries
        return own_key, key_tokens


def _members_if_same_class(listing: nn.Module) -> list[nn.Module]:
    if not isinstance(listing, (nn.ModuleList, nn.Sequential)):
        return []
    members = [weights.unwrap_compiled(member) for member in listing]
    return members if len({type(member) for member in members}) == 1 else []


def _has_cross_attention_source(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if isinstance(module, nn.MultiheadAttention):  # its projections are no modules
        query, key = [*args[:2], *(kwargs[k] for k in ("query", "key") if k in kwargs)][:2]
        return not tensors_equal(query, key)
    return any(isinstance(kwargs.get(name), Tensor) for name in SOURCES)


def _original_heads(stack: list[ModuleCall], heads: int) -> OriginalHeads | None:
    """Return the heads that the innermost module had before some were taken out, if it says so."""
    stated = (vars(module_call.module).get(ORIGINAL) for module_call in reversed(stack))
    original = next(filter(None, stated), None)
    return original if original is not None and len(original.numbers) == heads else None


def _real_keys(matrix: AttentionMatrix, own_key: int | None) -> Tensor:
    """Return (batch, keys), False where more than a band hides a key from every query.

    Keys behind the last query are free space of a cache.
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
    """True if keys are projected from another tensor than queries.

    A source that is named decides, or else the inputs of the matrices: queries first, then keys.
    """
    for module_call in reversed(stack):
        # A list of torch's layers makes a block of each, which attends once all the same.
        if module_call.is_block and not isinstance(module_call.module, nn.MultiheadAttention):
            break
        if module_call.has_source:
            return True
    inputs = next((each.projected for each in reversed(stack) if each.projected), [])
    last = stack[-1].last_keys if stack else None
    if not inputs and last is not None and tensors_equal(last[0], matrix.k):  # attends once more
        return last[1]
    if not inputs or any(isinstance(clause, Band | Chosen) for clause in matrix.mask.clauses):
        return False
    queries, keys = inputs[0], inputs[1] if len(inputs) > 1 else inputs[0]
    return not tensors_equal(queries, keys)


def _find_block(stack: list[ModuleCall], matrix: AttentionMatrix) -> ModuleCall | None:
    """Return the innermost block around the layer, before the first attention of the block.

    None where its state could be (queries, batch, width) as well as (batch, queries, width).
    """
    batch, _, queries, _ = matrix.shape
    for module_call in reversed(stack[:-1]):
        if module_call.is_block:
            state = module_call.state
            fits = state is not None and state.dim() == 3 and state.shape[:2] == (batch, queries)
            return module_call if fits and not module_call.attended and batch != queries else None
    return None
