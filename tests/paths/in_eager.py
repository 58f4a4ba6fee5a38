"""The paths that need no tracing."""

import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.paths.measure import (
    LENGTHS,
    LONG,
    Call,
    Ran,
    budgets,
    check,
    check_dropout,
    check_dropped_gradient,
    gradients,
    is_dense,
    leaves,
    requiring_grad,
    run,
    same,
    upstream,
)
from tests.paths.outcomes import (
    AUTOCAST_KEEPS,
    HINT,
    NOT_RUN,
    Note,
    Outcome,
    dense_notes,
    works,
)
from tests.paths.subjects import Encoder, Outputs, Subject


def judge(subject: Subject, module: nn.Module, call: Call, found: Ran, inputs: Outputs) -> None:
    """Outputs and gradients against the budget; with dropout the mean of the draws."""
    dtype = next(x.dtype for x in inputs if x.is_floating_point())
    allowed = budgets(subject, module, inputs, dtype)
    if not subject.training:
        check(allowed, found)
        return
    check(allowed, Ran(found.outputs), skip=1)
    check_dropout(call, allowed.outputs[0].exact, inputs)
    assert all(x.isfinite().all() for x in found.gradients)
    if found.gradients and dtype == torch.float32:
        check_dropped_gradient(module, found)


def measured(call: Call, module: nn.Module, inputs: Outputs, *, backward: bool) -> tuple[Note, ...]:
    """Why queries x keys was written, if it was: only dropout may."""
    return dense_notes(
        module, lambda: is_dense(lambda: run(call, module, inputs, backward=backward), inputs)
    )


def training(subject: Subject) -> Outcome:
    module = subject.module()
    inputs = subject.at(*LENGTHS)
    judge(subject, module, module, run(module, module, inputs), inputs)
    return works(*measured(module, module, subject.at(*LONG), backward=True))


def inference(subject: Subject) -> Outcome:
    if subject.training:
        return NOT_RUN
    module = subject.module()
    inputs = subject.at(*LENGTHS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = run(module, module, inputs, backward=False)
        judge(subject, module, module, found, inputs)
    with torch.no_grad():
        return works(*measured(module, module, subject.at(*LONG), backward=False))


def half(dtype: torch.dtype) -> Callable[[Subject], Outcome]:
    def path(subject: Subject) -> Outcome:
        module = subject.module().to(dtype)
        short, long = (cast(subject.at(*lengths), dtype) for lengths in (LENGTHS, LONG))
        judge(subject, module, module, run(module, module, short), short)
        return works(*measured(module, module, long, backward=True))

    return path


def cast(inputs: Outputs, dtype: torch.dtype) -> Outputs:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def autocast(subject: Subject) -> Outcome:
    """Against the budget of bfloat16, for float32 numbers that bfloat16 holds exactly."""
    module = subject.module().bfloat16().float()
    inputs = cast(subject.at(*LENGTHS), torch.bfloat16)

    def call(*given: Tensor) -> Outputs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(*given)

    def widened(*given: Tensor) -> Outputs:
        return call(*(x.float() if x.is_floating_point() else x for x in given))

    found = run(call, module, cast(inputs, torch.float32))
    judge(subject, module, widened, found, inputs)
    notes = measured(call, module, subject.at(*LONG), backward=True)
    first = found.outputs[0].dtype
    assert first in (torch.float32, torch.bfloat16)
    keeps = first == torch.float32 and hasattr(module, "matrix")
    return works(*notes, *((AUTOCAST_KEEPS,) if keeps else ()))


def saved_tensor_hooks(subject: Subject) -> Outcome:
    """The gradients from what hooks gave back: clones, pickles, and what was offloaded."""
    module, inputs = subject.module(), subject.at(*LENGTHS)
    expected = seeded(module, module, inputs)
    graph = torch.autograd.graph
    for hooks in (
        graph.saved_tensors_hooks(torch.clone, lambda x: x),
        graph.saved_tensors_hooks(pickle.dumps, pickle.loads),
        graph.save_on_cpu(),
    ):

        def call(*given: Tensor, hooks: Any = hooks) -> Outputs:
            with hooks:
                outputs: Outputs = module(*given)
                return outputs

        assert same(seeded(call, module, inputs), expected)
    return works()


# ---- copies ------------------------------------------------------------------------------------


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_a_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied(how: Callable[[Any], Any]) -> Callable[[Subject], Outcome]:
    """The module; and an `AttentionMatrix` with its mask and bias, which is a value as well."""

    def path(subject: Subject) -> Outcome:
        module, inputs = subject.module(), subject.at(*LENGTHS)
        other = how(module)
        assert same(seeded(other, other, inputs), seeded(module, module, inputs))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        if list(module.parameters()):  # the copy has its own
            assert not same(seeded(other, other, inputs), seeded(module, module, inputs))
        check_copied_matrix(how, module, inputs)
        return works()

    return path


def check_copied_matrix(how: Callable[[Any], Any], module: nn.Module, inputs: Outputs) -> None:
    if not hasattr(module, "matrix"):
        return
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            matrix = module.matrix(*inputs[:2], *inputs[3:])
        assert same(how(matrix).dense(), matrix.dense())
        assert same(how(matrix).statistics(), matrix.statistics())


def seeded(call: Call, module: nn.Module, inputs: Outputs, *, backward: bool = True) -> Ran:
    """`run`, with the same dropout at every call."""
    torch.manual_seed(5)
    return run(call, module, inputs, backward=backward)


def meta(subject: Subject) -> Outcome:
    original, inputs = subject.module(), subject.at(*LENGTHS)
    with torch.device("meta"):
        module = subject.build().train(subject.training)
        shapes = tuple(x.to("meta") for x in inputs)
        outputs = module(*shapes)
    expected = original(*inputs)
    assert all(x.is_meta for x in outputs)
    assert [(x.shape, x.dtype) for x in outputs] == [(x.shape, x.dtype) for x in expected]
    module.to_empty(device="cpu").load_state_dict(original.state_dict())
    assert same(seeded(module, module, inputs), seeded(original, original, inputs))
    return works(*hint_needed(subject, lambda encoder, _: encoder.to("meta")(*shapes)))


def hint_needed(subject: Subject, path: Callable[[Encoder, Outputs], Any]) -> tuple[Note, ...]:
    """Whether an encoder that is not told is_causal fails on this path; then torch's own does."""
    if subject.build is not Encoder:
        return ()
    failed = []
    for upgraded in (True, False):
        encoder, inputs = Encoder(hint=None, upgraded=upgraded), subject.at(*LENGTHS)
        try:
            path(encoder, inputs)
        except (RuntimeError, torch._dynamo.exc.UserError):
            failed.append(upgraded)
    assert failed != [True]
    return (HINT,) if True in failed else ()


# ---- run another way ---------------------------------------------------------------------------


def checkpointed(subject: Subject) -> Outcome:
    module, inputs = subject.module(), subject.at(*LENGTHS)
    expected = seeded(module, module, inputs)
    for use_reentrant in (True, False):

        def call(*given: Tensor, use_reentrant: bool = use_reentrant) -> Outputs:
            return checkpoint(module, *given, use_reentrant=use_reentrant)

        torch.manual_seed(5)
        given = requiring_grad(inputs)
        own = leaves(module, given)
        outputs = call(*given)
        # The reentrant form serves backward() alone.
        found = gradients_by_backward(outputs, own) if use_reentrant else gradients(outputs, own)
        # The reentrant form computes the outputs without a graph, perhaps by another kernel.
        torch.testing.assert_close(outputs, expected.outputs)
        assert same(found, expected.gradients)
    return works(*measured(call, module, subject.at(*LONG), backward=True))


def gradients_by_backward(outputs: Outputs, own: list[Tensor]) -> Outputs:
    torch.autograd.backward(outputs, upstream(outputs))
    found = tuple(x.grad for x in own)
    for x in own:
        x.grad = None
    return found


def threads(subject: Subject) -> Outcome:
    """One module, four inputs, two threads, forward and backward."""
    if subject.training:
        return NOT_RUN  # dropout draws from one generator
    module, (queries, keys) = subject.module(), LENGTHS
    given = [subject.at(queries + n, keys + n) for n in range(4)]
    expected = [run(module, module, inputs) for inputs in given]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda inputs: run(module, module, inputs), given * 5))
    assert same(found, expected * 5)
    return works()
