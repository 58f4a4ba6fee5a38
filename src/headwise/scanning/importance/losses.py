"""The loss whose change is measured: one number for each sequence, never their mean.

The mean over a batch would make the importance of a head depend on how many sequences are in it,
and the absolute value could no longer be taken of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.scanning.capture import AttentionCapture
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.module_calls import unembedding_of
from headwise.support.axes import describe_value

# (what the model returned, the inputs it was given) -> (batch,)
Loss = Callable[[Any, Any], Tensor]

GIVE_ONE = (
    "loss=function, where function(output, inputs) gives a tensor (batch,): for each sequence what "
    "the model should keep low"
)


def next_token(
    output: Any, inputs: Any, *, vocabularies: Collection[int] | None = None
) -> Float[Tensor, " batch"]:
    """The mean cross-entropy of each next token of a sequence, in nats, over its real tokens.

    What stands behind padding is not predicted, and what is padding is no answer.

    Args:
        output: of a causal language model: the logits (batch, length, vocabulary), or something
            that has them as ``logits``, or a tuple with them.
        inputs: the token ids, or a mapping with ``input_ids`` and, where some of them are padding,
            ``attention_mask``.
        vocabularies: the numbers of tokens that the model may have: a tensor without a name is
            taken for logits only if it has one of them. None for any number.

    Raises:
        OptionError: there are no logits or no ids, or a sequence has no next token.
        ShapeError: logits and ids of different numbers.
    """
    ids = _ids(inputs)
    logits = _logits(output, ids, vocabularies)
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise ShapeError(
            saw=f"logits {tuple(logits.shape)} for input ids {tuple(ids.shape)}",
            needed="logits (batch, length, vocabulary): a next token for each token",
            do=GIVE_ONE,
        )
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    predicted = real[:, 1:] & real[:, :-1]
    counts = predicted.sum(-1)
    if bool((counts == 0).any()):
        place = int((counts == 0).int().argmax())
        raise OptionError(
            saw=f"sequence {place} of a batch with {int(real[place].sum())} real tokens",
            needed="at least 2 in each, so that there is a next token",
            do="leave it out",
        )
    # Chosen, not multiplied by 0: what stands at padding may be infinite.
    targets = ids[:, 1:][predicted]
    _require_logits_of(targets, logits)
    chosen = logits[:, :-1][predicted]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    each = F.cross_entropy(chosen, targets, reduction="none").double()
    rows = predicted.nonzero()[:, 0]
    total = each.new_zeros(len(ids)).index_add(0, rows, each)
    return total / counts


def _require_logits_of(targets: Tensor, logits: Tensor) -> None:
    """Raise ShapeError where a token has no logit."""
    lowest, highest = int(targets.min()), int(targets.max())
    if not 0 <= lowest <= highest < logits.shape[-1]:
        raise ShapeError(
            saw=f"logits {tuple(logits.shape)} for tokens from {lowest} to {highest}",
            needed="a logit for each token of the vocabulary",
            do=GIVE_ONE,
        )


def of_run(
    model: nn.Module, reach: AttentionCapture, output: Any, inputs: Any, loss: Loss | None
) -> Float[Tensor, " batch"]:
    """Return what the loss, or the default one, says of one run of a model.

    Raises:
        OptionError, DTypeError, ShapeError: as `next_token` and `checked`.
    """
    if loss is not None:
        if not callable(loss):
            raise OptionError(
                saw=f"loss={describe_value(loss)}",
                needed="a function (output, inputs) -> (batch,)",
                do="leave it out for the mean cross-entropy of each next token",
            )
        return checked(loss(output, inputs))
    unembedding = unembedding_of(model)
    tables = reach.tables if unembedding is None else reach.tables | {tuple(unembedding.shape)}
    # A state as wide as the vocabulary could be taken for logits.
    vocabularies = {rows for rows, width in tables if rows != width}
    return checked(next_token(output, inputs, vocabularies=vocabularies))


def checked(losses: object) -> Float[Tensor, " batch"]:
    """What a loss gave, if it is one number for each sequence.

    Raises:
        DTypeError: it is no floating-point tensor.
        ShapeError: it is one number, or several for a sequence.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise DTypeError(
            saw=f"a loss that gave {kind}",
            needed="a floating-point tensor (batch,)",
            do=GIVE_ONE,
        )
    if losses.dim() == 0:
        raise ShapeError(
            saw="a loss that gave a single number",
            needed="one for each sequence, (batch,): of a mean over the batch, importance would "
            "depend on how many sequences are in it",
            do='reduction="none", and a mean over the tokens of each sequence by itself',
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
    """Refuse a default loss for a model that sees the tokens it is to predict.

    Two rows of the weights are looked at: the first, and one in the middle.

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
            saw=f"no loss, and {call.layer}, where a token attends to later ones",
            needed="a causal model for the default loss, which predicts each next token",
            do=GIVE_ONE,
        )


def _logits(output: Any, ids: Tensor, vocabularies: Collection[int] | None) -> Tensor:
    named = output.get("logits") if isinstance(output, Mapping) else None
    named = getattr(output, "logits", None) if named is None else named
    if isinstance(named, Tensor):
        return named
    parts = output if isinstance(output, list | tuple) else [output]
    for part in parts:
        # It may be logits: numbers for each token.
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.dim() != 3:
            continue
        is_known = vocabularies is None or part.shape[-1] in vocabularies
        if is_known and part.shape[:2] == ids.shape:
            return part
    tokens = " or ".join(map(str, sorted(vocabularies or ()))) or "tokens"
    raise OptionError(
        saw=f"no loss, and a model whose output has no logits: {_shown(output)}",
        needed=f"logits (batch {len(ids)}, length {ids.shape[1]}, vocabulary {tokens}) for the "
        "default loss, which predicts each next token: alone, as .logits, or in a tuple",
        do=f"{GIVE_ONE}; or loss=next_token of headwise.scanning.importance, where the output is "
        "logits of another vocabulary",
    )


def _shown(output: Any) -> str:
    if isinstance(output, list | tuple):
        return f"{type(output).__name__} of {', '.join(map(describe_value, output[:4]))}"
    is_tensor = isinstance(output, Tensor)
    return describe_value(output) if is_tensor else f"an output of type {type(output).__name__}"


def _ids(inputs: Any) -> Tensor:
    found = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if isinstance(found, tuple) and len(found) == 1:  # with another, padding may be unknown
        found = found[0]
    if not isinstance(found, Tensor) or found.dim() != 2 or found.is_floating_point():
        raise OptionError(
            saw="no loss, and inputs without token ids",
            needed="input_ids (batch, length) for the default loss, which predicts each next token",
            do=GIVE_ONE,
        )
    return found
