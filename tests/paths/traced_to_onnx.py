"""The two exporters of torch to ONNX. Run in an interpreter that does not check annotations."""

import io
import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tests.paths.in_eager import hint_needed
from tests.paths.measure import LONG, Call, count_nodes, limit
from tests.paths.outcomes import DENSE_ONNX, NOT_RUN, Outcome, dense_notes, works
from tests.paths.subjects import Outputs, Subject
from tests.paths.traced import ALL_LENGTHS, dynamic, each_length, is_dense_graph


def by_dynamo(subject: Subject) -> Outcome:
    """The exporter on top of torch.export, run by onnxruntime at every length."""
    if subject.training:
        return NOT_RUN
    module = subject.module().eval()
    program = export_to_onnx(module, subject)
    call = onnx_session(program.model_proto.SerializeToString())
    each_length(subject, module, call, ALL_LENGTHS, backward=False)
    graphs = [program.exported_program.graph_module]
    assert count_nodes(graphs, "sweep") == 0
    notes = dense_notes(module, lambda: is_dense_graph(graphs, subject, module), DENSE_ONNX)
    return works(*notes, *hint_needed(subject, lambda encoder, _: export_to_onnx(encoder, subject)))


def export_to_onnx(module: nn.Module, subject: Subject) -> Any:
    inputs = subject.at(*LONG)
    with torch.no_grad():
        return torch.onnx.export(
            module, inputs, dynamo=True, dynamic_shapes=dynamic(inputs), verbose=False
        )


def onnx_session(model: bytes) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [own.name for own in session.get_inputs()]

    def call(*inputs: Tensor) -> Outputs:
        given = {n: x.detach().numpy() for n, x in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(x) for x in session.run(None, given))

    return call


def by_tracing(subject: Subject) -> Outcome:
    """The older exporter on top of torch.jit.trace, run by onnxruntime at every length."""
    if subject.training:
        return NOT_RUN
    module, inputs = subject.module().eval(), subject.at(*LONG)
    model = trace_to_onnx(module, inputs, dynamic(inputs))
    each_length(subject, module, onnx_session(model), ALL_LENGTHS, backward=False)

    def dense() -> bool:
        return largest_value(trace_to_onnx(module, inputs)) > limit(inputs, module(*inputs))

    notes = dense_notes(module, dense, DENSE_ONNX)
    hint = hint_needed(subject, lambda encoder, given: trace_to_onnx(encoder, given))
    return works(*notes, *hint)


def trace_to_onnx(
    module: nn.Module, inputs: Outputs, sizes: tuple[dict[int, Any], ...] = ()
) -> bytes:
    """The model; ``sizes`` has the axes of each input that vary, by their names."""
    file, names = io.BytesIO(), [f"input_{i}" for i in range(len(inputs))]
    axes = {
        name: {axis: size.__name__ for axis, size in own.items()}
        for name, own in zip(names, sizes, strict=False)
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about each size that may become a constant
        torch.onnx.export(module, inputs, file, dynamo=False, input_names=names, dynamic_axes=axes)
    return file.getvalue()


def largest_value(model: bytes) -> int:
    """The bytes of the largest tensor that a node of a model of fixed sizes returns."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(model)).graph
    types = [value.type.tensor_type for value in graph.value_info]
    return max(
        prod(axis.dim_value for axis in own.shape.dim)
        * onnx.helper.tensor_dtype_to_np_dtype(own.elem_type).itemsize
        for own in types
    )
