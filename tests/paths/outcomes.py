"""What a path came to for a subject, and the reasons that the table gives."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Note:
    """A reason: what is different here, why, and what to do. Emitted where it was observed."""

    key: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """One cell of the table."""

    word: str
    notes: tuple[str, ...] = ()


NOT_RUN = Outcome("–")

DENSE_DROPOUT = Note(
    "dropout",
    "Writes queries x keys: torch's fused CPU kernel has no dropout, and what was dropped is kept "
    "for the backward pass.",
)
DENSE_ONNX = Note(
    "onnx",
    "Writes queries x keys when it runs: ONNX knows no operator of headwise, so the graph holds "
    "the reference arithmetic.",
)
DENSE_FUNC = Note(
    "func",
    "Writes queries x keys: torch.func sees through torch's own operators only, so the reference "
    "arithmetic takes the place of the tiled kernel.",
)
DENSE_DOUBLE = Note(
    "double",
    "Writes queries x keys in a backward pass with create_graph=True: that gradient is taken "
    "through the weights written down, so that it has a gradient itself.",
)
FUSED_HAS_NO_SECOND = Note(
    "no second derivative",
    "Where the fused kernel serves `A @ v` (`A.explain()` says where; masks up to a tile are "
    "among it): it has no second derivative. RuntimeError, `derivative for "
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented`. Inside "
    "`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` it works, and writes queries x keys.",
)
FUSED_HAS_NO_FORWARD = Note(
    "no forward mode",
    "Where the fused kernel serves `A @ v`, as in the next note: it has no forward-mode "
    "derivative. NotImplementedError. Inside `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` it "
    "works, and writes queries x keys.",
)
ONE_BY_ONE = Note(
    "one by one",
    "Sample by sample, with a UserWarning: torch has no batching rule for its fused CPU kernel.",
)
AUTOCAST_KEEPS = Note(
    "autocast",
    "The tiled kernel keeps the dtype of q, here float32; the fused kernel, as torch's own "
    "operator, returns autocast's. In the layer both are autocast's, since the projections are.",
)
HINT = Note(
    "hint",
    "is_causal must be given to the encoder: without it torch's encoder reads the mask's values to "
    "find it, which cannot be done here (RuntimeError). torch's encoder itself raises the same.",
)
BLOCKS = Note(
    "blocks",
    "topk works in blocks of queries: the graph holds for the lengths that need as many blocks as "
    "those it was made at. At others torch.compile compiles once more, and an exported program "
    "raises (AssertionError, `Guard failed`).",
)
REGISTERED = Note(
    "registered",
    "A process that loads the program must have imported the tiled kernel's operator before, which "
    "`from headwise import AttentionMatrix` does (`import headwise` alone does not).",
)
TRACE_IS_FIXED = Note(
    "fixed",
    "A trace is for the lengths it was made at. At others it raises or is wrong, as torch warns "
    "while tracing (TracerWarning). torch.export has lengths that vary.",
)
NO_SCRIPT = Note(
    "script",
    "NotSupportedError: TorchScript compiles the source of a layer, and lacks parts of Python that "
    "headwise uses. The same layers script as torch's classes: script before `upgrade`, or use "
    "torch.export or torch.compile.",
)

NOTES = {
    note.key: note
    for note in (
        DENSE_DROPOUT,
        AUTOCAST_KEEPS,
        ONE_BY_ONE,
        DENSE_FUNC,
        FUSED_HAS_NO_FORWARD,
        FUSED_HAS_NO_SECOND,
        DENSE_DOUBLE,
        HINT,
        BLOCKS,
        REGISTERED,
        DENSE_ONNX,
        TRACE_IS_FIXED,
        NO_SCRIPT,
    )
}


def works(*notes: Note) -> Outcome:
    return Outcome("works", in_order(notes))


def raises(*notes: Note) -> Outcome:
    return Outcome("raises", in_order(notes))


def in_order(notes: Iterable[Note]) -> tuple[str, ...]:
    """As they are numbered on the page."""
    given = {note.key for note in notes}
    return tuple(key for key in NOTES if key in given)


def refused(call: Callable[[], Any], kind: type[Exception], words: str) -> bool:
    """Whether a call raises this; anything else that it raises is a failure."""
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise
        return True
    return False


def dense_notes(
    module: nn.Module, is_dense: Callable[[], bool], why: Note | None = None
) -> tuple[Note, ...]:
    """The reasons for a tensor of queries x keys, where one is seen.

    Dropout is one; then the path's own is given only if it is seen without dropout as well.
    """
    if not is_dense():
        return ()
    notes: tuple[Note, ...] = ()
    if module.training and module.inner.dropout:
        notes, before, module.inner.dropout = (DENSE_DROPOUT,), module.inner.dropout, 0.0
        seen = is_dense()
        module.inner.dropout = before
        if not seen:
            return notes
    assert why is not None, "a tensor of queries x keys was written, and no reason is known"
    return (*notes, why)
