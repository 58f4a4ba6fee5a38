"""Model inputs in one form: a list of inputs, each with positional and named arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise.checkpoints.transformers import read_longest_input
from headwise.errors import HeadwiseError, OptionError, ShapeError
from headwise.function.rounding import default_tolerance
from headwise.layers.hooks import attention_hook
from headwise.scanning import weights
from headwise.support.tensors import iterate_leaves, map_leaves
from headwise.support.text import describe_value
from headwise.support.tracing import evaluation_mode

# A scan needs no cache of keys and values. It does not need logits of each token either, which can
# take more memory than all the rest.
NO_CACHE = {"use_cache": False}
NO_LOGITS = {"logits_to_keep": 1}
PLAIN = (Tensor, bool, int, float, str, type(None))
AS_TENSOR = "torch.as_tensor(array) for each array"
TOKENS_TO_COMPARE = 64  # that a model reads with and without these arguments


@dataclass(frozen=True, eq=False)
class ModelInput:
    """One input, for ``model(*positional, **named)``; ``original`` is the user's value."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    original: Any = None


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
    """Return each input of a list, or of a tensor, a tuple or a mapping the only input."""
    values = inputs if isinstance(inputs, list) else [inputs]
    if not values:
        raise _no_inputs_error("an empty list of inputs")
    parsed = []
    for value in values:
        if isinstance(value, Mapping):  # a BatchEncoding of transformers, too
            parsed.append(ModelInput((), dict(value), value))
        elif isinstance(value, tuple | Tensor):
            parsed.append(ModelInput(value if isinstance(value, tuple) else (value,), {}, value))
        else:
            do = "e.g. scan(model, {'input_ids': ids, 'attention_mask': mask})"
            if isinstance(value, int | list):  # a list is read as several inputs
                do = "torch.tensor([ids]) for the token ids of one text"
            elif hasattr(value, "__array__"):
                do = AS_TENSOR
            elif isinstance(value, str):
                do = 'tokenizer(text, return_tensors="pt")'
            raise OptionError(
                saw=f"an input of type {type(value).__name__}",
                needed="a tensor, a tuple of positional arguments, a mapping of named ones, or a "
                "list of several such inputs",
                do=do,
            )
    return parsed


def _no_inputs_error(saw: str) -> OptionError:
    do = "pass the arguments of the model: a tensor, a tuple, a mapping, or a list of these"
    return OptionError(saw=saw, needed="at least one", do=do)


def check_tokens_and_limit_outputs(
    model: Any, inputs: list[ModelInput], *, with_logits: bool = False, limit: bool = True
) -> list[ModelInput]:
    """Check token ids, and switch off outputs of a model of transformers that are not needed.

    An option stays away if the model computes something else with it; see `_keep_function`.
    """
    if isinstance(model, nn.Module):
        for model_input in inputs:
            require_valid_token_ids(model, model_input)
    if not limit or not isinstance(model, nn.Module) or not hasattr(model, "config"):
        return inputs
    parameters, fewer = inspect.signature(model.forward).parameters, []
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    for model_input in inputs:
        # The loss of the model needs all logits.
        needs_logits = with_logits or model_input.named.get("labels") is not None
        options = NO_CACHE if needs_logits else NO_CACHE | NO_LOGITS
        unnamed = parameters.keys() - model_input.named.keys()
        options = {name: value for name, value in options.items() if name in unnamed}
        names = (*model_input.named, *options)
        if options and (names not in known or "position_ids" in names):
            known[names] = _keep_function(model, model_input, options)
        fewer.append(replace(model_input, named=known.get(names, {}) | model_input.named))
    return fewer


def _keep_function(
    model: nn.Module, model_input: ModelInput, options: dict[str, Any]
) -> dict[str, Any]:
    """Return those of the options with which the outputs at the last position stay the model's.

    transformers takes ``position_ids`` for packed documents only with ``use_cache=False``.
    """
    if not all(isinstance(x, PLAIN) for x in iterate_leaves(model_input.named)):
        return options  # a cache, which would hold the tokens twice
    few = _cut_tokens(model_input)
    fewer = {name: value for name, value in options.items() if name in NO_LOGITS}
    is_long = (ids := token_ids(few)) is not None and ids.shape[-1] > TOKENS_TO_COMPARE

    def run(named: dict[str, Any]) -> Tensor | None:
        output = call_model_on_input(model, replace(few, named=named | few.named))
        states = (x[:, -1] for x in iterate_leaves(output) if isinstance(x, Tensor) and x.dim() > 2)
        return next(states, None)

    unrecorded = attention_hook(lambda _matrix, _v, outputs: outputs)
    eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), evaluation_mode(model), unrecorded, eager:
        expected = run(fewer if is_long else {})
        for kept in (options, fewer):
            if expected is None or (output := run(kept)) is None:
                return options
            allowed = default_tolerance(output.dtype) * expected.abs().amax()
            if bool((output - expected).abs().amax() <= allowed):
                return kept
    return {}


def _cut_tokens(model_input: ModelInput) -> ModelInput:
    """Return `TOKENS_TO_COMPARE` tokens of each text; all where other tensors have other sizes.

    They are those around the first place where ``position_ids`` do not rise by one, if any.
    """
    ids, positions = token_ids(model_input), model_input.named.get("position_ids")
    given = (model_input.positional, model_input.named)
    tensors = [x for x in iterate_leaves(given) if isinstance(x, Tensor)]
    if ids is None or any(x.shape[:2] != ids.shape for x in tensors):
        return model_input
    breaks = [0] if positions is None else [*(positions.diff() != 1).nonzero()[:, 1].tolist(), 0]
    first = max(0, breaks[0] - TOKENS_TO_COMPARE // 2)
    part = slice(None), slice(first, first + TOKENS_TO_COMPARE)
    return ModelInput(*map_leaves(lambda x: x[part] if isinstance(x, Tensor) else x, given))


def require_finite_parameters(model: nn.Module) -> None:
    """Raise OptionError if a parameter holds NaN or infinity, or is on the meta device."""
    loads_later = any(hasattr(module, "_hf_hook") for module in model.modules())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not loads_later:
            saw = f"{name} on the meta device, which holds shapes and no numbers"
            do = "model.to_empty(device=...), then load_state_dict"
            raise OptionError(saw=saw, needed="a model with weights", do=do)
        weight: Any = parameter.detach()
        is_divided = weights.is_divided_over_devices(weight)
        for part in [weight] if is_divided else weights.plain_tensors_of_weight(weight):
            if part.is_meta or not part.is_floating_point() or not part.numel():
                continue
            total: Any = part.sum(dtype=torch.float64)
            # In every process that holds a part of a weight, or in none.
            if bool(torch.isfinite(total.full_tensor() if is_divided else total)):
                continue
            whole = weight.full_tensor() if is_divided else part
            bad = int((~torch.isfinite(whole)).sum())
            if bad:  # the sum of finite numbers may overflow
                raise OptionError(
                    saw=f"{name} holds {bad:,} of {whole.numel():,} numbers that are NaN or "
                    "infinite",
                    needed="finite weights",
                    do="load a checkpoint that is whole, or one in a wider dtype",
                )


def require_valid_token_ids(model: nn.Module, model_input: ModelInput) -> None:
    """Raise OptionError for arrays, and for token ids that are empty or that no table holds."""
    for value in iterate_leaves((model_input.positional, model_input.named)):
        if not isinstance(value, PLAIN) and getattr(value, "ndim", False):
            saw = f"an input with {describe_value(value)}"
            raise OptionError(saw=saw, needed="tensors", do=AS_TENSOR)
    input_ids = model_input.named.get("input_ids")
    if isinstance(input_ids, list | tuple):
        saw = f"input_ids={describe_value(input_ids)}"
        do = 'tokenizer(text, return_tensors="pt"), or torch.tensor([ids])'
        raise OptionError(saw=saw, needed="a tensor of token ids, (batch, length)", do=do)
    ids = token_ids(model_input)
    if ids is None:
        return
    if not ids.numel():
        saw = f"token ids of shape {tuple(ids.shape)}: there are none"
        raise OptionError(saw=saw, needed="at least one token", do="leave out texts without tokens")
    embedding = None
    with suppress(NotImplementedError, AttributeError):  # a model without tokens
        embedding = cast(Any, model).get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return
    if ids.dim() < 2:
        raise _no_batch_error(ids)
    size = embedding.num_embeddings
    require_tokens_below(size, ids, f"the model's embedding has {size} rows")


def require_tokens_below(size: int, ids: Tensor, reason: str) -> None:
    """Raise OptionError for token ids that a vocabulary of this size does not have."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        needed = f"tokens from 0 to {size - 1}: {reason}"
        do = "check where the ids come from: a tokenizer must be the one that belongs to this model"
        raise OptionError(saw=f"tokens from {low} to {high}", needed=needed, do=do)


def token_ids(model_input: ModelInput) -> Tensor | None:
    """Return ``input_ids``, or the first positional argument, if it is an integer tensor."""
    first = model_input.positional[0] if model_input.positional else None
    ids = model_input.named.get("input_ids", first)
    is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    return ids if is_ids else None


def call_model_on_input(model: Any, model_input: ModelInput) -> Any:
    """Run a model on one input, and return its output."""
    if not model_input.positional and not model_input.named:
        function = model.forward if isinstance(model, nn.Module) else model
        parameters = inspect.signature(function).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(p.default is p.empty and p.kind not in variadic for p in parameters):
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
        kind = type(model).__name__
        raise OptionError(
            saw=f"token ids of shape {tuple(ids.shape)}, at which {kind} fails: "
            f"{' '.join(str(error).split())[:200]}",
            needed=f"at most {most:,} tokens, the number of positions of {kind}",
            do=f"ids[:, :{most}]; or tokenizer(text, truncation=True, max_length={most})",
        ) from error


def _no_batch_error(ids: Tensor) -> OptionError:
    saw = f"token ids of shape {tuple(ids.shape)}"
    return OptionError(saw=saw, needed="(batch, length)", do="ids[None] for one sequence")


@contextmanager
def explain_failure_on_token_ids(title: str, count: int, *, do: str) -> Iterator[None]:
    """Raise OptionError with advice where a model fails in the block, which passes it token ids."""
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
