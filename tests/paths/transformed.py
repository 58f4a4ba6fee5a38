"""The paths of torch.func, and gradients of gradients."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.function.rounding import FORWARD
from tests.paths.in_eager import hint_needed, seeded
from tests.paths.measure import (
    LENGTHS,
    LONG,
    Ran,
    _budgets,
    budgets,
    is_dense,
    is_vector,
    leaves,
    requiring_grad,
    same,
    upstream,
)
from tests.paths.outcomes import (
    DENSE_DOUBLE,
    DENSE_FUNC,
    FUSED_HAS_NO_FORWARD,
    FUSED_HAS_NO_SECOND,
    ONE_BY_ONE,
    Note,
    Outcome,
    dense_notes,
    raises,
    refused,
    works,
)
from tests.paths.subjects import BATCH, Outputs, Subject

NO_SECOND = "_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
NO_FORWARD = "forward AD with _scaled_dot_product_flash_attention_for_cpu"


def detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def functional(subject: Subject) -> Outcome:
    """Other parameters than the module's own."""
    module, inputs = subject.module(), subject.at(*LENGTHS)
    other = {name: (0.5 * p).requires_grad_() for name, p in detached(module).items()}
    found = seeded(
        lambda *given: functional_call(module, other, given), module, inputs, backward=False
    )
    module.load_state_dict(other)
    assert same(found, seeded(module, module, inputs, backward=False))
    return works()


# ---- per-sample gradients ----------------------------------------------------------------------


def sample_loss(module: nn.Module, inputs: Outputs) -> tuple[Callable[..., Tensor], list[bool]]:
    """The loss of one sample as a function of (parameters, *inputs without batch)."""
    mapped = [x.shape[0] == BATCH for x in inputs]

    def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        given = [x[None] if is_mapped else x for x, is_mapped in zip(sample, mapped, strict=True)]
        outputs = functional_call(module, parameters, tuple(given))
        pairs = zip(outputs, upstream(outputs), strict=True)
        return torch.stack([(x * u).sum() for x, u in pairs]).sum()

    return loss, mapped


def per_sample(subject: Subject) -> Outcome:
    module, inputs = subject.module(), subject.at(*LENGTHS)
    each, notes = map_gradients(module, inputs)
    _, mapped = sample_loss(module, inputs)
    vectors = len(each) - len(list(module.parameters()))
    allowed = []
    for b in range(BATCH if not subject.training else 0):
        alone = tuple(x[b : b + 1] if m else x for x, m in zip(inputs, mapped, strict=True))
        allowed.append(budgets(subject, module, alone, torch.float32).gradients)
    for i, samples in enumerate(zip(*allowed, strict=True)):
        # One family: a mapped sum has another order, and plain torch's error is that of any sample.
        largest = torch.stack([own.allowed for own in samples]).amax(0)
        for b, own in enumerate(samples):
            gradient = each[i][b, None] if i < vectors else each[i][b]
            replace(own, allowed=largest).assert_holds(gradient)
    assert all(x.isfinite().all() for x in each)
    long = subject.at(*LONG)
    dense = dense_notes(
        module, lambda: is_dense(lambda: map_gradients(module, long)[0], long), DENSE_FUNC
    )
    hint = hint_needed(subject, lambda encoder, inputs: map_gradients(encoder, inputs))
    return works(*notes, *dense, *hint)


def map_gradients(module: nn.Module, inputs: Outputs) -> tuple[Outputs, tuple[Note, ...]]:
    """vmap(grad(loss)) of the vectors, then of the parameters; and whether torch maps in a loop."""
    loss, mapped = sample_loss(module, inputs)
    places = [i for i, x in enumerate(inputs) if is_vector(x)]
    gradient = torch.func.grad(loss, argnums=(0, *(i + 1 for i in places)))
    dims = (None, *(0 if is_mapped else None for is_mapped in mapped))
    # The upstream gradients are drawn once, outside of the transform.
    loss(detached(module), *(x[0] if m else x for x, m in zip(inputs, mapped, strict=True)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mapping = torch.func.vmap(gradient, in_dims=dims, randomness="different")
        parameters, *vectors = mapping(detached(module), *inputs)
    in_a_loop = any("not yet implemented the batching rule" in str(w.message) for w in caught)
    return (*vectors, *parameters.values()), ((ONE_BY_ONE,) if in_a_loop else ())


# ---- forward mode ------------------------------------------------------------------------------


def forward_mode(subject: Subject) -> Outcome:
    notes: list[Note] = []
    if not refused(lambda: notes.extend(check_jvp(subject)), NotImplementedError, NO_FORWARD):
        return works(*notes)
    with sdpa_kernel(SDPBackend.MATH):
        check_jvp(subject)
        assert jvp_is_dense(subject, subject.module())
    return raises(FUSED_HAS_NO_FORWARD)


def check_jvp(subject: Subject) -> tuple[Note, ...]:
    module, inputs = subject.module(), subject.at(*LENGTHS)
    places = [i for i, x in enumerate(inputs) if is_vector(x)]
    parameters = detached(module)

    def exact(*vectors: Tensor) -> Outputs:
        own = {name: p.to(vectors[0].dtype) for name, p in parameters.items()}
        return jvp(lambda *given: subject.reference(own, *given), inputs, places, vectors)

    found = jvp(module, inputs, places, [inputs[i] for i in places])
    allowed = _budgets(exact, [inputs[i] for i in places], FORWARD, "jvp", torch.float32)
    for own, x in list(zip(allowed, found, strict=True))[int(subject.training) :]:
        own.assert_holds(x)
    assert all(x.isfinite().all() for x in found)
    return dense_notes(module, lambda: jvp_is_dense(subject, module), DENSE_FUNC)


def jvp(call: Callable[..., Outputs], inputs: Outputs, places: list[int], vectors: Any) -> Outputs:
    """The derivative of the outputs along the seeded upstream of the vectors."""

    def of_vectors(*own: Tensor) -> Outputs:
        given = [x.to(own[0].dtype) if x.is_floating_point() else x for x in inputs]
        for place, x in zip(places, own, strict=True):
            given[place] = x
        return call(*given)

    tangents = tuple(u.to(x.dtype) for u, x in zip(upstream(inputs), inputs, strict=True))
    along = tuple(tangents[i].to(vectors[0].dtype) for i in places)
    return torch.func.jvp(of_vectors, tuple(vectors), along)[1]


def jvp_is_dense(subject: Subject, module: nn.Module) -> bool:
    inputs = subject.at(*LONG)
    places = [i for i, x in enumerate(inputs) if is_vector(x)]
    return is_dense(lambda: jvp(module, inputs, places, [inputs[i] for i in places]), inputs)


# ---- batches of gradients ----------------------------------------------------------------------

FACTORS = (1.0, -0.5, 2.0)  # powers of 2: a gradient divided by its factor has the same bits


def batched(subject: Subject) -> Outcome:
    """As `torch.autograd.functional.jacobian(vectorize=True)` takes them: one backward pass."""
    module, inputs = subject.module(), subject.at(*LENGTHS)
    each = batch_of_gradients(module, inputs).gradients
    if subject.training:
        assert all(torch.equal(g[0], g[i] / f) for g in each for i, f in enumerate(FACTORS))
        assert all(x.isfinite().all() for x in each)
    else:
        allowed = budgets(subject, module, inputs, torch.float32)
        for own, gradient in zip(allowed.gradients, each, strict=True):
            for index, factor in enumerate(FACTORS):
                own.assert_holds(gradient[index] / factor)
    long = subject.at(*LONG)
    return works(
        *dense_notes(
            module,
            lambda: is_dense(lambda: batch_of_gradients(module, long), long, times=len(FACTORS)),
        )
    )


def batch_of_gradients(module: nn.Module, inputs: Outputs) -> Ran:
    """The gradients of `measure.run`, for the seeded upstream times each factor."""
    inputs = requiring_grad(inputs)
    outputs = module(*inputs)
    factors = torch.tensor(FACTORS)
    batches = [factors.view(-1, *[1] * u.dim()) * u for u in upstream(outputs)]
    of = leaves(module, inputs)
    return Ran(outputs, torch.autograd.grad(outputs, of, batches, is_grads_batched=True))


# ---- gradients of gradients --------------------------------------------------------------------


def double_backward(subject: Subject) -> Outcome:
    if refused(lambda: check_double(subject), RuntimeError, NO_SECOND):
        with sdpa_kernel(SDPBackend.MATH):
            check_double(subject)
            assert double_is_dense(subject, subject.module())
        return raises(FUSED_HAS_NO_SECOND)
    module = subject.module()
    return works(*dense_notes(module, lambda: double_is_dense(subject, module), DENSE_DOUBLE))


def check_double(subject: Subject) -> None:
    module = subject.module().double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in subject.at(7, 11))
    vectors = [i for i, x in enumerate(inputs) if is_vector(x)]
    names = [name for name, _ in module.named_parameters()]
    values = [p.detach().requires_grad_() for p in module.parameters()]

    def call(*floats: Tensor) -> Outputs:
        torch.manual_seed(5)
        given = list(inputs)
        for place, x in zip(vectors, floats, strict=False):
            given[place] = x
        return functional_call(
            module, dict(zip(names, floats[len(vectors) :], strict=True)), tuple(given)
        )

    floats = (*(inputs[i].clone().requires_grad_() for i in vectors), *values)
    assert torch.autograd.gradgradcheck(call, floats, fast_mode=True)


def double_is_dense(subject: Subject, module: nn.Module) -> bool:
    inputs = subject.at(*LONG)

    def twice() -> Outputs:
        given = requiring_grad(inputs)
        own = leaves(module, given)
        outputs = module(*given)
        first = torch.autograd.grad(outputs, own, upstream(outputs), create_graph=True)
        curved = [x for x in first if x.requires_grad]
        torch.autograd.grad(curved, own, upstream(curved), allow_unused=True)
        return outputs

    return is_dense(twice, inputs)
