"""The paths that make a graph. Run in an interpreter that does not check annotations of shapes."""

import io
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.export import Dim
from torch.jit.frontend import NotSupportedError

from headwise import MultiheadAttention
from tests.paths.in_eager import hint_needed, judge
from tests.paths.measure import (
    LENGTHS,
    LONG,
    Call,
    as_traced,
    check_close,
    count_nodes,
    is_dense,
    largest_node,
    limit,
    run,
    same,
    small_tiles,
)
from tests.paths.outcomes import (
    BLOCKS,
    NO_SCRIPT,
    NOT_RUN,
    REGISTERED,
    TRACE_IS_FIXED,
    Note,
    Outcome,
    dense_notes,
    raises,
    refused,
    works,
)
from tests.paths.subjects import Outputs, Parts, Subject

# The first is what the graph is made at: there a tensor of queries x keys is seen by its size.
ALL_LENGTHS = (LONG, LENGTHS, (31, 37), (263, 331))
# More blocks of rows than at the others.
TOO_LONG = (400, 420)
# A tile that is smaller than the matrix at LONG, and so large that graphs stay short.
TILE_IN_A_GRAPH = 2**17


# ---- torch.compile -----------------------------------------------------------------------------


def compiled(*, backward: bool) -> Callable[[Subject], Outcome]:
    """One compilation, without a break in the graph, for every length."""

    def path(subject: Subject) -> Outcome:
        if subject.training and not backward:
            return NOT_RUN
        module = subject.module()
        call, graphs = compile_module(module)
        each_length(subject, module, call, ALL_LENGTHS, backward=backward)
        sweeps = count_nodes(graphs, "sweep"), count_nodes(graphs, "sweep_backward")
        assert [n > 0 for n in sweeps] == [subject.tiled, subject.tiled and backward]
        if subject.name == "product, tiled":
            assert sweeps == (1, int(backward))
        blocks = blocks_needed(subject, module, call, backward=backward)

        def dense() -> bool:
            without_dropout = subject.training and not module.inner.dropout
            if without_dropout or subject.build is Parts:
                return compiled_is_dense(subject, module, backward=backward)
            return is_dense_graph(graphs, subject, module)

        notes = dense_notes(module, dense)
        if not backward:
            notes += hint_needed(subject, lambda own, inputs: compile_module(own)[0](*inputs))
        return works(*notes, *blocks)

    return path


def compile_module(
    module: nn.Module, *, dynamic: bool = True
) -> tuple[Any, list[torch.fx.GraphModule]]:
    """The compiled call, and a list that its graphs go to, forward and backward."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep)
    return torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend), graphs


def each_length(
    subject: Subject,
    module: nn.Module,
    call: Call,
    all_lengths: tuple[tuple[int, int], ...],
    *,
    backward: bool,
) -> None:
    """`LENGTHS` within the budget, others as in eager mode; never compiled again."""
    for lengths in all_lengths:
        inputs = subject.at(*lengths)
        with (
            torch.set_grad_enabled(backward),
            torch._dynamo.config.patch(error_on_recompile=True),
        ):
            found = run(marked(call, lengths), module, inputs, backward=backward)
            expected = run(module, module, inputs, backward=backward)
        if lengths == LENGTHS:
            judge(subject, module, call, found, inputs)
        elif subject.training:
            check_close(found.outputs[1:], expected.outputs[1:])
        else:
            check_close(found, expected)


def marked(call: Call, lengths: tuple[int, int]) -> Call:
    """The call with its lengths marked as dynamic: torch raises where one became a constant."""

    def marking(*inputs: Tensor) -> Outputs:
        for x in inputs:
            for axis, size in enumerate(x.shape):
                if size in lengths:
                    torch._dynamo.mark_dynamic(x, axis)
        return call(*inputs)

    return marking


def compiled_is_dense(subject: Subject, module: nn.Module, *, backward: bool) -> bool:
    """Compiled at `LONG` with small tiles, which topk has in its graph: it must be several."""
    call, graphs = compile_module(module, dynamic=False)
    with small_tiles(TILE_IN_A_GRAPH), torch.set_grad_enabled(backward):
        run(call, module, subject.at(*LONG), backward=backward)
    return is_dense_graph(graphs, subject, module)


def is_dense_graph(graphs: list[torch.fx.GraphModule], subject: Subject, module: nn.Module) -> bool:
    inputs = subject.at(*LONG)
    return largest_node(graphs) > limit(inputs, module(*inputs))


def blocks_needed(
    subject: Subject, module: nn.Module, call: Call, *, backward: bool
) -> tuple[Note, ...]:
    """Whether the graph does not serve longer lengths."""

    def longer() -> None:
        with torch.set_grad_enabled(backward):
            run(call, module, subject.at(*TOO_LONG), backward=backward)

    with torch._dynamo.config.patch(error_on_recompile=True):
        again = refused(longer, torch._dynamo.exc.RecompileError, "Recompiling")
    assert again is (subject.build is Parts)
    return (BLOCKS,) if again else ()


def inductor(*, backward: bool) -> Callable[[Subject], Outcome]:
    """Three subjects: the graph is the one that is looked at above."""

    def path(subject: Subject) -> Outcome:
        if subject.name not in ("product, fused", "product, tiled", "layer, masks"):
            return NOT_RUN
        module = subject.module()
        torch._dynamo.reset()
        call = torch.compile(module, fullgraph=True, dynamic=True)
        for lengths in ALL_LENGTHS[1:3]:
            inputs = subject.at(*lengths)
            with torch.set_grad_enabled(backward):
                found = run(call, module, inputs, backward=backward)
                check_close(found, run(module, module, inputs, backward=backward))
        return works()

    return path


# ---- torch.export ------------------------------------------------------------------------------


def exported(subject: Subject) -> Outcome:
    module = subject.module()
    program = through_a_file(export(module, subject))
    call = program.module()
    each_length(subject, module, call, ALL_LENGTHS, backward=False)
    assert (count_nodes([program.graph_module], "sweep") > 0) is subject.tiled
    notes = dense_notes(module, lambda: exported_is_dense(subject, module))
    guarded = refused(lambda: call(*subject.at(*TOO_LONG)), AssertionError, "Guard failed")
    assert guarded is (subject.build is Parts)
    notes += (BLOCKS,) if guarded else ()
    if subject.tiled:
        notes += registered(module, subject)
    hint = hint_needed(subject, lambda encoder, _: export(encoder, subject))
    return works(*notes, *hint)


def exported_is_dense(subject: Subject, module: nn.Module) -> bool:
    """Exported as `compiled_is_dense` has it, and seen while it runs."""
    inputs = subject.at(*LONG)
    with small_tiles(TILE_IN_A_GRAPH), torch.no_grad():
        call = torch.export.export(module, inputs).module()
    return is_dense(lambda: call(*inputs), inputs)


def export(module: nn.Module, subject: Subject) -> torch.export.ExportedProgram:
    inputs = subject.at(*LONG)
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=dynamic(inputs))


def dynamic(inputs: Outputs) -> tuple[dict[int, Any], ...]:
    """Both lengths vary, wherever they are an axis."""
    axes = (Dim("queries", min=6, max=4096), Dim("keys", min=6, max=4096))
    sizes = dict(zip(LONG, axes, strict=True))
    return tuple(
        {axis: sizes[size] for axis, size in enumerate(x.shape) if size in sizes} for x in inputs
    )


def through_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def registered(module: nn.Module, subject: Subject) -> tuple[Note, ...]:
    """Whether a new process can load the program only after an import; asked for one subject."""
    if subject.name != "product, tiled":
        return (REGISTERED,)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.pt2"
        torch.export.save(export(module, subject), file)
        load = f"import torch, headwise; IMPORT; torch.export.load({str(file)!r})"
        codes = []
        for more in ("0", "from headwise import AttentionMatrix"):
            command = [sys.executable, "-c", load.replace("IMPORT", more)]
            done = subprocess.run(command, capture_output=True, text=True)
            codes.append(done.returncode)
            if done.returncode:
                assert "headwise" in done.stderr
    assert codes[1] == 0
    return (REGISTERED,) if codes[0] else ()


# ---- torch.jit.trace ---------------------------------------------------------------------------


def jit_traced(subject: Subject) -> Outcome:
    """Saved, loaded, and run at the lengths it was made at; then at others."""
    if subject.training:
        return NOT_RUN
    module, inputs = subject.module(), subject.at(*LONG)
    with warnings.catch_warnings(record=True) as caught, small_tiles(), as_traced():
        warnings.simplefilter("always")
        traced = torch.jit.trace(module, inputs, check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        call = torch.jit.load(file)
        assert same(tuple(call(*inputs)), module(*inputs))
        notes = dense_notes(module, lambda: is_dense(lambda: call(*inputs), inputs))
        assert same(run(call, call, inputs).gradients, run(module, module, inputs).gradients)
        fixed = is_fixed(subject, module, call)
    assert any(issubclass(w.category, torch.jit.TracerWarning) for w in caught)
    return works(*notes, *((TRACE_IS_FIXED,) if fixed else ()))


def jit_scripted(subject: Subject) -> Outcome:
    """Layers alone: the same modules script as torch's classes."""
    module = getattr(subject.module(), "inner", None)
    if module is None:
        return NOT_RUN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that scripting is to go
        try:
            torch.jit.script(module)
        except (NotSupportedError, RuntimeError):  # the second after a class has failed once
            pass
        else:
            return works()
        for part in module.modules():
            if isinstance(part, MultiheadAttention):
                part.__class__ = nn.MultiheadAttention
        torch.jit.script(module)
    return raises(NO_SCRIPT)


def is_fixed(subject: Subject, module: nn.Module, call: Call) -> bool:
    """Whether the trace raises or is wrong at other lengths."""
    inputs = subject.at(*LENGTHS)
    try:
        found = run(call, module, inputs, backward=False)
    except RuntimeError:
        return True
    try:
        judge(subject, module, call, found, inputs)
    except AssertionError:
        return True
    return False
