"""Model inputs in one form: a list of inputs, each with positional and named arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.transformers import read_longest_input
from headwise.errors import HeadwiseError, OptionError, ShapeError
from headwise.scanning.weights import (
    is_divided_over_devices,
    plain_tensors_of_weight,
    unwrap_compiled,
)
from headwise.support.text import describe_value

# A scan needs no cache of keys and values. It does not need logits of each token either, which can
# take more memory than all the rest.
NO_CACHE = {"use_cache": False}
NO_LOGITS = {"logits_to_keep": 1}

CHECK_TOKENIZER = (
    "check where the ids come from: a tokenizer must be the one that belongs to this model"
)


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One input, for ``model(*positional, **named)``; ``original`` is the user's value."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    original: Any = None


def require_module(model: Any) -> nn.Module:
    """Return the model without the wrapper of torch.compile.

    Raises:
        OptionError: the model is not a module.
    """
    model = unwrap_compiled(model)
    if not isinstance(model, nn.Module):
        raise not_a_model_error(model, "an nn.Module with its weights")
    return model


def not_a_model_error(model: object, needed: str) -> OptionError:
    """Return the error for a value that cannot run, such as the name of a model."""
    kind, do = "no model", "pass the model first, then its inputs"
    if isinstance(model, str | PathLike):
        kind = "a name"
        do = f"load it first, e.g. transformers.AutoModel.from_pretrained({describe_value(model)})"
    elif isinstance(model, type):
        kind, do = "a class", f"make a model of it first, e.g. {model.__name__}(...)"
    return OptionError(saw=f"model={describe_value(model)}, which is {kind}", needed=needed, do=do)


def list_inputs(inputs: Any) -> list[ModelInput]:
    """Return each input of a list, or of a tensor, a tuple or a mapping the only input.

    Raises:
        OptionError: an input of another type, or an empty list.
    """
    values = inputs if isinstance(inputs, list) else [inputs]
    if not values:
        raise _no_inputs_error("an empty list of inputs")
    return [_parse_input(value) for value in values]


def _no_inputs_error(saw: str) -> OptionError:
    return OptionError(
        saw=saw,
        needed="at least one",
        do="pass the arguments of the model: a tensor, a tuple, a mapping, or a list of these",
    )


def _parse_input(value: Any) -> ModelInput:
    if isinstance(value, Mapping):  # a BatchEncoding of transformers, too
        return ModelInput((), dict(value), value)
    if isinstance(value, tuple):
        return ModelInput(value, {}, value)
    if isinstance(value, Tensor):
        return ModelInput((value,), {}, value)
    do = "e.g. scan(model, {'input_ids': ids, 'attention_mask': mask})"
    if isinstance(value, int | list):  # a list is read as several inputs
        do = "torch.tensor([ids]) for the token ids of one text"
    elif isinstance(value, str):
        do = 'tokenizer(text, return_tensors="pt")'
    raise OptionError(
        saw=f"an input of type {type(value).__name__}",
        needed="a tensor, a tuple of positional arguments, a mapping of named ones, or a list "
        "of several such inputs",
        do=do,
    )


def check_tokens_and_limit_outputs(
    model: Any, inputs: list[ModelInput], *, with_logits: bool = False
) -> list[ModelInput]:
    """Check token ids, and switch off outputs of a model of transformers that are not needed.

    Raises:
        OptionError: token ids that the model cannot look up.
    """
    if isinstance(model, nn.Module):
        for model_input in inputs:
            require_valid_token_ids(model, model_input)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return inputs
    parameters = inspect.signature(model.forward).parameters
    options = NO_CACHE if with_logits else NO_CACHE | NO_LOGITS
    options = {name: value for name, value in options.items() if name in parameters}
    return [_request_fewer_outputs(model_input, options) for model_input in inputs]


def _request_fewer_outputs(model_input: ModelInput, options: dict[str, Any]) -> ModelInput:
    if model_input.named.get("labels") is not None:  # the loss of the model needs all logits
        options = {k: v for k, v in options.items() if k not in NO_LOGITS}
    return replace(model_input, named={**options, **model_input.named})


def require_finite_parameters(model: nn.Module) -> None:
    """Raise OptionError if a parameter holds NaN or infinity, or is on the meta device."""
    loads_later = any(hasattr(module, "_hf_hook") for module in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not loads_later:
            raise OptionError(
                saw=f"{name} on the meta device, which holds shapes and no numbers",
                needed="a model with weights",
                do="model.to_empty(device=...), then load_state_dict",
            )
        if is_divided_over_devices(parameter):
            _require_finite_divided(name, parameter.detach())
            continue
        for part in plain_tensors_of_weight(parameter.detach()):
            _require_finite(name, part)


def _require_finite_divided(name: str, divided: Any) -> None:
    """Raise the same error in every process that holds a part of a weight, or in none."""
    if divided.is_floating_point() and not divided.is_meta:
        total = divided.sum(dtype=torch.float64).full_tensor()
        if not bool(torch.isfinite(total)):
            _require_finite(name, divided.full_tensor())


def _require_finite(name: str, part: Tensor) -> None:
    if part.is_meta or not part.is_floating_point() or not part.numel():
        return
    if not bool(torch.isfinite(part.sum(dtype=torch.float64))):
        bad = int((~torch.isfinite(part)).sum())
        if bad:  # the sum of finite numbers may overflow
            raise OptionError(
                saw=f"{name} holds {bad:,} of {part.numel():,} numbers that are NaN or infinite",
                needed="finite weights",
                do="load a checkpoint that is whole, or one in a wider dtype",
            )


def require_valid_token_ids(model: nn.Module, model_input: ModelInput) -> None:
    """Raise OptionError for token ids that are empty or that the model cannot look up."""
    input_ids = model_input.named.get("input_ids")
    if isinstance(input_ids, list | tuple):
        raise OptionError(
            saw=f"input_ids={describe_value(input_ids)}",
            needed="a tensor of token ids, (batch, length)",
            do='tokenizer(text, return_tensors="pt"), or torch.tensor([ids])',
        )
    ids = token_ids(model_input)
    if ids is None:
        return
    if not ids.numel():
        raise OptionError(
            saw=f"token ids of shape {tuple(ids.shape)}: there are none",
            needed="at least one token",
            do="leave out texts without tokens",
        )
    embedding = _find_embedding(model)
    if not isinstance(embedding, nn.Embedding):
        return
    if ids.dim() < 2:
        raise _no_batch_error(ids)
    low, high, size = int(ids.min()), int(ids.max()), embedding.num_embeddings
    if low < 0 or high >= size:
        raise OptionError(
            saw=f"tokens from {low} to {high}",
            needed=f"tokens from 0 to {size - 1}: the model's embedding has {size} rows",
            do=CHECK_TOKENIZER,
        )


def token_ids(model_input: ModelInput) -> Tensor | None:
    """Return ``input_ids``, or the first positional argument, if it is an integer tensor."""
    first = model_input.positional[0] if model_input.positional else None
    ids = model_input.named.get("input_ids", first)
    is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    return ids if is_ids else None


def call_model_on_input(model: Any, model_input: ModelInput) -> Any:
    """Run a model on one input, and return its output.

    Raises:
        OptionError: no arguments for a model that needs some; token ids without a batch, which
            a layer of headwise refused; or more tokens than positions, at which the model failed.
    """
    if not model_input.positional and not model_input.named and _has_required_arguments(model):
        raise _no_inputs_error("an input without arguments")
    try:
        return model(*model_input.positional, **model_input.named)
    except ShapeError as error:  # the message of a layer does not mention tokens
        ids = token_ids(model_input)
        if ids is None or ids.dim() > 1:
            raise
        raise _no_batch_error(ids) from error
    except (IndexError, RuntimeError) as error:
        ids, most = token_ids(model_input), None
        if hasattr(getattr(model, "config", None), "get_text_config"):
            most = read_longest_input(model)
        if ids is None or most is None or ids.shape[-1] <= most:
            raise
        raise _too_many_tokens_error(model, ids, most, error) from error


def _too_many_tokens_error(
    model: nn.Module, ids: Tensor, most: int, error: Exception
) -> OptionError:
    kind = type(model).__name__
    return OptionError(
        saw=f"token ids of shape {tuple(ids.shape)}, at which {kind} fails: "
        f"{' '.join(str(error).split())[:200]}",
        needed=f"at most {most:,} tokens, the number of positions of {kind}",
        do=f"ids[:, :{most}]; or tokenizer(text, truncation=True, max_length={most})",
    )


def _has_required_arguments(model: Any) -> bool:
    function = model.forward if isinstance(model, nn.Module) else model
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variadic for p in parameters)


def _no_batch_error(ids: Tensor) -> OptionError:
    return OptionError(
        saw=f"token ids of shape {tuple(ids.shape)}",
        needed="(batch, length)",
        do="ids[None] for one sequence",
    )


def _find_embedding(model: nn.Module) -> Any:
    """Return the token embedding of a model of transformers, if it has one."""
    getter = getattr(model, "get_input_embeddings", None)
    if getter is None:
        return None
    try:
        return getter()
    except (NotImplementedError, AttributeError):  # a model of transformers without tokens
        return None


@contextmanager
def explain_failure_on_token_ids(title: str, count: int, *, do: str) -> Iterator[None]:
    """Raise OptionError where a model fails in the block, which passes it only token ids.

    Args:
        title: the name of the model.
        count: number of tokens.
        do: the advice of the error.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise OptionError(
            saw=f"{title}, which fails on {count} tokens: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            needed="a model that takes token ids alone",
            do=do,
        ) from error
