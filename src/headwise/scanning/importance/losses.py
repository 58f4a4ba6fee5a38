"""Losses for importance: one number for each sequence, never the mean of a batch.

With the mean over a batch, the importance of a head would depend on the size of the batch, and the
absolute effect on each sequence would be unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import Recorder
from headwise.scanning.weights import find_unembedding_weight
from headwise.support.text import describe_value

# (output of the model, its inputs) -> (batch,)
Loss = Callable[[Any, Any], Tensor]

PASS_A_LOSS = (
    "loss=function, where function(output, inputs) returns a tensor (batch,): the loss of each "
    "sequence"
)


def next_token(
    output: Any, inputs: Any, *, vocabularies: Collection[int] | None = None
) -> Float[Tensor, " batch"]:
    """Return the mean cross-entropy of the next token in each sequence, in nats.

    Only pairs of a real token and a real next token count.

    Args:
        output: the output of a causal language model: logits (batch, length, vocabulary), an
            object with them as ``logits``, or a tuple with them.
        inputs: the token ids, or a mapping with ``input_ids`` and, for padded inputs,
            ``attention_mask``.
        vocabularies: the possible sizes of the vocabulary. An unnamed tensor of another width is
            not taken for logits. None for any size.

    Raises:
        OptionError: no logits, no token ids, or a sequence without a next token.
        ShapeError: logits that do not fit the token ids.
    """
    ids = _require_input_ids(inputs)
    logits = _find_logits(output, ids, vocabularies)
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise ShapeError(
            saw=f"logits {tuple(logits.shape)} for input ids {tuple(ids.shape)}",
            needed="logits (batch, length, vocabulary): a next token for each token",
            do=PASS_A_LOSS,
        )
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    predicted = real[:, 1:] & real[:, :-1]
    counts = predicted.sum(-1)
    if bool((counts == 0).any()):
        index = int((counts == 0).int().argmax())
        raise OptionError(
            saw=f"sequence {index} of a batch with {int(real[index].sum())} real tokens",
            needed="at least 2 real tokens in each sequence",
            do="leave this sequence out",
        )
    # Selected by index, since infinite values at padding times 0 are NaN.
    targets = ids[:, 1:][predicted]
    _require_tokens_within_vocabulary(targets, logits)
    chosen = logits[:, :-1][predicted]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    each = F.cross_entropy(chosen, targets, reduction="none").double()
    rows = predicted.nonzero()[:, 0]
    total = each.new_zeros(len(ids)).index_add(0, rows, each)
    return total / counts


def _require_tokens_within_vocabulary(targets: Tensor, logits: Tensor) -> None:
    """Raise ShapeError if a token has no logit."""
    lowest, highest = int(targets.min()), int(targets.max())
    if not 0 <= lowest <= highest < logits.shape[-1]:
        raise ShapeError(
            saw=f"logits {tuple(logits.shape)} for tokens from {lowest} to {highest}",
            needed="a logit for each token of the vocabulary",
            do=PASS_A_LOSS,
        )


def apply_loss_per_sequence(
    model: nn.Module, recorder: Recorder, output: Any, inputs: Any, loss: Loss | None
) -> Float[Tensor, " batch"]:
    """Return the loss, or the default loss, of each sequence in one run of a model.

    Raises:
        OptionError, DTypeError, ShapeError: as `next_token` and `check_losses`.
    """
    if loss is not None:
        if not callable(loss):
            raise OptionError(
                saw=f"loss={describe_value(loss)}",
                needed="a function (output, inputs) -> (batch,)",
                do="leave it out for the mean cross-entropy of each next token",
            )
        return check_losses(loss(output, inputs))
    unembedding = find_unembedding_weight(model)
    tables = (
        recorder.tables if unembedding is None else recorder.tables | {tuple(unembedding.shape)}
    )
    # A square table is left out: a state as wide as the vocabulary could be taken for logits.
    vocabularies = {rows for rows, width in tables if rows != width}
    return check_losses(next_token(output, inputs, vocabularies=vocabularies))


def check_losses(losses: object) -> Float[Tensor, " batch"]:
    """Check that a loss is one number for each sequence, and return it in float64.

    Raises:
        DTypeError: the loss is not a floating-point tensor.
        ShapeError: the loss is a single number, or has several numbers for a sequence.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise DTypeError(
            saw=f"a loss that gave {kind}",
            needed="a floating-point tensor (batch,)",
            do=PASS_A_LOSS,
        )
    if losses.dim() == 0:
        raise ShapeError(
            saw="a loss that gave a single number",
            needed="one number for each sequence, (batch,): with a mean over the batch, importance "
            "would depend on the size of the batch",
            do='reduction="none", and a mean over the tokens of each sequence',
        )
    if losses.dim() != 1:
        raise ShapeError(
            saw=f"a loss that gave {tuple(losses.shape)}",
            needed="one number for each sequence, (batch,)",
            do="a mean over the tokens of each sequence: loss.mean(-1)",
        )
    return losses.double()


@torch.no_grad()
def require_causal(call: CapturedCall) -> None:
    """Refuse the default loss for a model that attends to the tokens it has to predict.

    Two rows of the weights are checked: the first, and one in the middle.

    Raises:
        OptionError: a query of the call attends to a later key.
    """
    _, _, queries, keys = call.matrix.shape
    if call.is_cross or queries != keys or keys < 2:
        return
    rows = torch.tensor([0, (queries - 1) // 2], device=call.matrix.q.device)
    later = torch.arange(keys, device=rows.device) > rows[:, None]
    if bool(((call.matrix.rows(rows) > 0) & later).any()):
        raise OptionError(
            saw=f"loss=None for a model whose layer {call.layer} attends to later tokens",
            needed="a causal model for the default loss, which predicts each next token",
            do=PASS_A_LOSS,
        )


def _find_logits(output: Any, ids: Tensor, vocabularies: Collection[int] | None) -> Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if isinstance(logits, Tensor):
        return logits
    parts = output if isinstance(output, list | tuple) else [output]
    for part in parts:
        # Only a floating-point tensor with three axes may be logits.
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.dim() != 3:
            continue
        is_known = vocabularies is None or part.shape[-1] in vocabularies
        if is_known and part.shape[:2] == ids.shape:
            return part
    tokens = " or ".join(map(str, sorted(vocabularies or ()))) or "tokens"
    raise OptionError(
        saw=f"loss=None for a model whose output has no logits: {_describe_output(output)}",
        needed=f"logits (batch {len(ids)}, length {ids.shape[1]}, vocabulary {tokens}) for the "
        "default loss, which predicts each next token: alone, as .logits, or in a tuple",
        do=f"{PASS_A_LOSS}; or loss=next_token of headwise.scanning.importance, if the output is "
        "logits of another vocabulary",
    )


def _describe_output(output: Any) -> str:
    if isinstance(output, list | tuple):
        return f"{type(output).__name__} of {', '.join(map(describe_value, output[:4]))}"
    is_tensor = isinstance(output, Tensor)
    return describe_value(output) if is_tensor else f"an output of type {type(output).__name__}"


def _require_input_ids(inputs: Any) -> Tensor:
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if isinstance(ids, tuple) and len(ids) == 1:  # a second argument may be an unknown mask
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise OptionError(
            saw="loss=None for inputs without token ids",
            needed="input_ids (batch, length) for the default loss, which predicts each next token",
            do=PASS_A_LOSS,
        )
    return ids
