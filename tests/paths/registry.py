"""Every path: the rows of the table, in their order."""

import copy
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from tests.paths import in_eager, traced, traced_to_onnx, transformed
from tests.paths.outcomes import Outcome
from tests.paths.subjects import SUBJECTS, Subject

OPERATORS = "every operator"
GRAPH = "every node"
RUNNING = "every operator of the graph"
UNSEEN = ""


@dataclass(frozen=True)
class Path:
    """One row.

    Attributes:
        key: its name on the command line.
        title: the head of the row.
        looked_at: where queries x keys was looked for.
        run: what it comes to for a subject.
        traces: it makes a graph of the source, which must then hold no check of annotations.
        compiler: it needs a C++ compiler.
    """

    key: str
    title: str
    looked_at: str
    run: Callable[[Subject], Outcome]
    traces: bool = False
    compiler: bool = False

    def missing(self) -> str | None:
        """What this machine lacks."""
        if self.compiler and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "torch.compile's inductor needs a C++ compiler (g++, clang++)"
        return None

    def row(self, names: Collection[str]) -> dict[str, Outcome]:
        """The outcome for the subjects of these names."""
        found = {}
        for subject in SUBJECTS:
            if subject.name not in names:
                continue
            try:
                found[subject.name] = self.run(subject)
            except BaseException as error:
                error.add_note(f"path: {self.title}; subject: {subject.name}")
                raise
        return found


PATHS = (
    Path("training", "eager, forward and backward", OPERATORS, in_eager.training),
    Path("inference", "eager, no_grad and inference_mode", OPERATORS, in_eager.inference),
    Path("bfloat16", "bfloat16", OPERATORS, in_eager.half(torch.bfloat16)),
    Path("float16", "float16", OPERATORS, in_eager.half(torch.float16)),
    Path("autocast", "autocast to bfloat16", OPERATORS, in_eager.autocast),
    Path("deepcopy", "copy.deepcopy", UNSEEN, in_eager.copied(copy.deepcopy)),
    Path("pickle", "pickle", UNSEEN, in_eager.copied(in_eager.through_pickle)),
    Path("save", "torch.save, torch.load", UNSEEN, in_eager.copied(in_eager.through_a_file)),
    Path("meta", "meta device, then to_empty and load_state_dict", UNSEEN, in_eager.meta),
    Path("checkpoint", "activation checkpointing", OPERATORS, in_eager.checkpointed),
    Path("hooks", "saved-tensor hooks", UNSEEN, in_eager.saved_tensor_hooks),
    Path("threads", "two threads at once", UNSEEN, in_eager.threads),
    Path("functional_call", "torch.func.functional_call", UNSEEN, transformed.functional),
    Path("vmap", "torch.func.vmap of grad", OPERATORS, transformed.per_sample),
    Path("jvp", "torch.func.jvp", OPERATORS, transformed.forward_mode),
    Path("batched", "batched gradients", OPERATORS, transformed.batched),
    Path("double", "gradient of a gradient", OPERATORS, transformed.double_backward),
    Path(
        "compile",
        "torch.compile, inference",
        GRAPH,
        traced.compiled(backward=False),
        traces=True,
    ),
    Path(
        "compile-training",
        "torch.compile, training",
        GRAPH,
        traced.compiled(backward=True),
        traces=True,
    ),
    Path(
        "inductor",
        "torch.compile with inductor, inference",
        UNSEEN,
        traced.inductor(backward=False),
        traces=True,
        compiler=True,
    ),
    Path(
        "inductor-training",
        "torch.compile with inductor, training",
        UNSEEN,
        traced.inductor(backward=True),
        traces=True,
        compiler=True,
    ),
    Path("export", "torch.export, saved and loaded", RUNNING, traced.exported, traces=True),
    Path(
        "onnx",
        "torch.onnx.export(dynamo=True), run by onnxruntime",
        GRAPH,
        traced_to_onnx.by_dynamo,
        traces=True,
    ),
    Path(
        "onnx-traced",
        "torch.onnx.export(dynamo=False), run by onnxruntime",
        GRAPH,
        traced_to_onnx.by_tracing,
        traces=True,
    ),
    Path("jit", "torch.jit.trace, saved and loaded", RUNNING, traced.jit_traced, traces=True),
    Path("jit-script", "torch.jit.script", UNSEEN, traced.jit_scripted),
)
