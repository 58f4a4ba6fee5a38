"""What a model is given, in one form: several inputs, each positional arguments and named ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, OptionError, ShapeError
from headwise.scanning.module_calls import as_written, plain_parts
from headwise.support.axes import describe_value

# What nobody here has a use for: keys and values kept for later steps. A scan has none either for
# the scores of the whole vocabulary after each token, which can take more memory than all the rest.
NO_CACHE = {"use_cache": False}
NO_LOGITS = {"logits_to_keep": 1}

OUTSIDE = "check where the ids come from: a tokenizer must be the one that belongs to this model"


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One input: ``model(*positional, **named)``, and ``given``, which it was made of."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    given: Any = None


def require_module(model: Any) -> nn.Module:
    """Return the model as it was before it was compiled.

    Raises:
        OptionError: it is no module.
    """
    model = as_written(model)
    if not isinstance(model, nn.Module):
        raise no_model(model, "an nn.Module with its weights")
    return model


def no_model(model: object, needed: str) -> OptionError:
    """Return the error for something that cannot be run, such as the name of a model."""
    kind, do = "no model", "give the model first, then its inputs"
    if isinstance(model, str | PathLike):
        kind = "a name"
        do = f"load it first, e.g. transformers.AutoModel.from_pretrained({describe_value(model)})"
    elif isinstance(model, type):
        kind, do = "a class", f"make a model of it first, e.g. {model.__name__}(...)"
    return OptionError(saw=f"model={describe_value(model)}, which is {kind}", needed=needed, do=do)


def inputs_of(given: Any) -> list[ModelInput]:
    """Each input of a list, or the only one: a tensor, a tuple of positional ones, or a mapping.

    Raises:
        OptionError: none of these, or nothing at all.
    """
    several = given if isinstance(given, list) else [given]
    if not several:
        raise _no_inputs("no inputs")
    return [_arguments(one) for one in several]


def _no_inputs(saw: str) -> OptionError:
    return OptionError(
        saw=saw,
        needed="at least one",
        do="give what the model is called with: a tensor, a tuple, a mapping, or several",
    )


def _arguments(one: Any) -> ModelInput:
    if isinstance(one, Mapping):  # a BatchEncoding of transformers, too
        return ModelInput((), dict(one), one)
    if isinstance(one, tuple):
        return ModelInput(one, {}, one)
    if isinstance(one, Tensor):
        return ModelInput((one,), {}, one)
    do = "e.g. scan(model, {'input_ids': ids, 'attention_mask': mask})"
    if isinstance(one, int | list):  # a list stands for several inputs
        do = "torch.tensor([ids]) for the token ids of one text"
    elif isinstance(one, str):
        do = 'tokenizer(text, return_tensors="pt")'
    raise OptionError(
        saw=f"an input of type {type(one).__name__}",
        needed="a tensor, a tuple of positional arguments, a mapping of named ones, or a list "
        "of several such inputs",
        do=do,
    )


def prepared(
    model: Any, several: list[ModelInput], *, with_logits: bool = False
) -> list[ModelInput]:
    """Return inputs that ask a model of transformers for no more than is needed.

    Raises:
        OptionError: token ids that the model cannot look up.
    """
    if isinstance(model, nn.Module):
        for one in several:
            require_tokens(model, one)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return several
    taken = inspect.signature(model.forward).parameters
    unwanted = NO_CACHE if with_logits else NO_CACHE | NO_LOGITS
    return [
        _asking_for_less(one, {k: v for k, v in unwanted.items() if k in taken}) for one in several
    ]


def _asking_for_less(one: ModelInput, unwanted: dict[str, Any]) -> ModelInput:
    if one.named.get("labels") is not None:  # the model's own loss is of all logits
        unwanted = {k: v for k, v in unwanted.items() if k not in NO_LOGITS}
    return replace(one, named={**unwanted, **one.named})


def require_finite(model: nn.Module) -> None:
    """Raise OptionError if a parameter holds NaN or infinity, or no numbers at all."""
    loads_later = any(hasattr(module, "_hf_hook") for module in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not loads_later:
            raise OptionError(
                saw=f"{name} on the meta device, which holds shapes and no numbers",
                needed="a model with weights",
                do="load them: model.to_empty(device=...) and then load_state_dict",
            )
        for part in plain_parts(parameter.detach()):
            _require_finite(name, part)


def _require_finite(name: str, part: Tensor) -> None:
    if part.is_meta or not part.is_floating_point() or not part.numel():
        return
    if not bool(torch.isfinite(part.sum(dtype=torch.float64))):
        bad = int((~torch.isfinite(part)).sum())
        if bad:  # else the sum alone overflowed
            raise OptionError(
                saw=f"{name} holds {bad:,} of {part.numel():,} numbers that are NaN or infinite",
                needed="finite weights",
                do="load a checkpoint that is whole, or one in a wider dtype",
            )


def require_tokens(model: nn.Module, given: ModelInput) -> None:
    """Raise OptionError for token ids that the model cannot look up, or that are none at all."""
    listed = given.named.get("input_ids")
    if isinstance(listed, list | tuple):
        raise OptionError(
            saw=f"input_ids={describe_value(listed)}",
            needed="a tensor of token ids, (batch, length)",
            do='tokenizer(text, return_tensors="pt"), or torch.tensor([ids])',
        )
    ids = token_ids(given)
    if ids is None:
        return
    if not ids.numel():
        raise OptionError(
            saw=f"token ids of shape {tuple(ids.shape)}: there are none",
            needed="at least one token",
            do="leave texts without tokens out",
        )
    embedding = _embedding_of(model)
    if not isinstance(embedding, nn.Embedding):
        return
    if ids.dim() < 2:
        raise _no_batch(ids)
    low, high, size = int(ids.min()), int(ids.max()), embedding.num_embeddings
    if low < 0 or high >= size:
        raise OptionError(
            saw=f"tokens from {low} to {high}",
            needed=f"tokens from 0 to {size - 1}: the model's embedding has {size} rows",
            do=OUTSIDE,
        )


def token_ids(given: ModelInput) -> Tensor | None:
    """Return ``input_ids``, or the first positional argument, if these are whole numbers."""
    ids = given.named.get("input_ids", given.positional[0] if given.positional else None)
    is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    return ids if is_ids else None


def run(model: Any, given: ModelInput) -> Any:
    """Return what a model gives for one input.

    Raises:
        OptionError: no arguments where the model needs some; or ids of one sequence, without a
            batch, which a layer of headwise refused.
    """
    if not given.positional and not given.named and _needs_arguments(model):
        raise _no_inputs("an input without arguments")
    try:
        return model(*given.positional, **given.named)
    except ShapeError as error:  # in a layer's words, which are not of tokens
        ids = token_ids(given)
        if ids is None or ids.dim() > 1:
            raise
        raise _no_batch(ids) from error


def _needs_arguments(model: Any) -> bool:
    written = model.forward if isinstance(model, nn.Module) else model
    parameters = inspect.signature(written).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variadic for p in parameters)


def _no_batch(ids: Tensor) -> OptionError:
    return OptionError(
        saw=f"token ids of shape {tuple(ids.shape)}",
        needed="(batch, length)",
        do="ids[None] for one sequence",
    )


def _embedding_of(model: nn.Module) -> Any:
    """What looks tokens up, where a model says it."""
    named = getattr(model, "get_input_embeddings", None)
    if named is None:
        return None
    try:
        return named()
    except (NotImplementedError, AttributeError):  # a model of transformers without tokens
        return None


@contextmanager
def on_tokens(title: str, count: int, *, do: str) -> Iterator[None]:
    """Refuse a model that fails in the block, which gives it ``count`` tokens and nothing else.

    Args:
        title: what the model is called.
        count: how many tokens it is given.
        do: what to do instead.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise OptionError(
            saw=f"{title}, which fails on {count} tokens: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            needed="a model that reads tokens and nothing else",
            do=do,
        ) from error
