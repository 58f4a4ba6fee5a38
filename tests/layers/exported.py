"""The layer exported. Run by test_ecosystem_export.py in an interpreter of its own."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.layers.ecosystem import AT, BY_NAME, SUBJECTS, every_size
from tests.paths.in_eager import judge
from tests.paths.measure import Call, run
from tests.paths.subjects import Outputs, Subject
from tests.paths.traced import through_a_file
from tests.paths.traced_to_onnx import onnx_session, trace_to_onnx

(QUERIES, KEYS), _ = AT[0]
AXES = {QUERIES: Dim("queries", min=2, max=4096), KEYS: Dim("keys", min=2, max=4096)}


def made_at(subject: Subject) -> tuple[Outputs, tuple[dict[int, Any], ...]]:
    """The inputs a graph is made at, and that the batch and every length of them vary."""
    _, inputs = next(every_size(subject))
    batch = Dim("batch", min=1, max=512)
    return inputs, tuple(
        {0: batch, **{axis: AXES[n] for axis, n in enumerate(x.shape) if n in AXES}} for x in inputs
    )


def check_every_size(subject: Subject, call: Call, module: nn.Module) -> None:
    """Within the budget, also at the sizes it was not made at."""
    for _, inputs in every_size(subject):
        with torch.no_grad():
            found = run(call, module, inputs, backward=False)
        judge(subject, module, call, found, inputs)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda own: own.name)
def test_exported_saved_and_loaded(subject: Subject) -> None:
    module = subject.module().eval()
    inputs, sizes = made_at(subject)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=sizes)
    check_every_size(subject, through_a_file(program).module(), module)


# torch's exporter asks in a way that torch has deprecated, and says that two inputs share a batch.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name. batch:UserWarning")
@pytest.mark.parametrize("name", ["window", "lengths"])
def test_onnx(name: str) -> None:
    subject = BY_NAME[name]
    module = subject.module().eval()
    inputs, sizes = made_at(subject)
    with torch.no_grad():
        program = torch.onnx.export(
            module, inputs, dynamo=True, dynamic_shapes=sizes, verbose=False
        )
    check_every_size(subject, onnx_session(program.model_proto.SerializeToString()), module)


@pytest.mark.parametrize("name", ["window", "sink", "t5", "lengths", "cross"])
def test_traced_to_onnx(name: str) -> None:
    subject = BY_NAME[name]
    module = subject.module().eval()
    call = onnx_session(trace_to_onnx(module, *made_at(subject)))
    check_every_size(subject, call, module)
