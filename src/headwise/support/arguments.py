"""Arguments of the wrong type, and those that a function does not have.

`explain_arguments` wraps a function whose callers come from other libraries. In place of Python's
"got an unexpected keyword argument" it raises an `ArgumentError`, a TypeError whose message names
the argument to pass instead.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from headwise.errors import ArgumentError, DTypeError, OptionError
from headwise.support.text import describe_value

P = ParamSpec("P")
R = TypeVar("R")

OWNERS = ("self", "cls")


class ArgumentAdvice(NamedTuple):
    """Advice for an argument name of another library."""

    needed: str  # the form that headwise has
    do: str  # what to pass instead; ``{value}`` stands for the value that was given


def renamed_arguments(**aliases: str) -> dict[str, ArgumentAdvice]:
    """Return the advice for other names of arguments: argument -> its other names, by spaces."""
    return {
        alias: ArgumentAdvice(f"{name}, which is the same", f"{name}={{value}}")
        for name, words in aliases.items()
        for alias in words.split()
    }


# For functions that take the counts of a config.
RENAMED_COUNTS = renamed_arguments(
    heads="num_heads nhead n_heads num_attention_heads",
    kv_heads="num_kv_heads n_kv_heads num_key_value_heads",
)


def require_tensors(**arguments: object) -> None:
    """Raise DTypeError for an argument that is no tensor; its name is the keyword."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise DTypeError(
                saw=f"{name} of type {type(value).__name__}",
                needed=f"a tensor for {name}",
                do=f"e.g. torch.as_tensor({name})",
            )


def require_choice(name: str, value: object, known: Sequence[str], usual: str) -> None:
    """Raise OptionError unless an argument is one of the known words."""
    if value not in known:
        raise OptionError(
            saw=f"{name}={describe_value(value)}",
            needed=f"one of {', '.join(known)}",
            do=f'{name}="{usual}"',
        )


def is_number(value: object) -> bool:
    """True for a number of any library. A tensor is none: its gradient would be lost."""
    if isinstance(value, Tensor):
        return False
    return isinstance(value, float | int) or hasattr(value, "__float__")


def explain_arguments(
    answers: Mapping[str, ArgumentAdvice],
    *,
    beyond: Callable[[tuple[Any, ...]], ArgumentAdvice] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function or a method: arguments that it lacks get an answer.

    Where it takes any keyword, only those in ``answers`` are refused.

    The signature, the types and what a compiler sees of the method stay as they are. ``beyond``
    gives the answer to more positional arguments than the method takes, from all of them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names = frozenset(parameters)
        kinds = [p.kind for p in parameters.values()]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        by_name = takes_all or inspect.Parameter.KEYWORD_ONLY in kinds
        most = sum(kind.name.startswith("POSITIONAL") for kind in kinds)

        @wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in () if names.issuperset(kwargs) else kwargs:
                if name not in names and (name in answers or not takes_all):
                    _refuse_name(function, args, name, kwargs[name], answers)
            if len(args) > most and by_name:
                _refuse_positions(function, args, most, beyond)
            return function(*args, **kwargs)

        return explained

    return decorate


def _refuse_name(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    value: object,
    answers: Mapping[str, ArgumentAdvice],
) -> NoReturn:
    names = [n for n in inspect.signature(function).parameters if n not in OWNERS]
    answer = answers.get(name)
    if answer is None:
        near = difflib.get_close_matches(name, names, n=1)
        answer = ArgumentAdvice(
            ", ".join(names), f"{near[0]}={{value}}" if near else f"leave out {name}"
        )
    shown = describe_value(value)
    raise ArgumentError(
        saw=f"{_callee_name(function, args)} has no argument {name!r}, got {name}={shown}",
        needed=answer.needed,
        do=answer.do.replace("{value}", shown if len(shown) < 20 else "..."),
    )


def _refuse_positions(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    most: int,
    beyond: Callable[[tuple[Any, ...]], ArgumentAdvice] | None,
) -> NoReturn:
    parameters = inspect.signature(function).parameters.values()
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    answer = ArgumentAdvice(f"by name: {', '.join(by_name)}", f"{by_name[0]}=..., and so on")
    if beyond is not None:
        answer = beyond(args[1:])
    raise ArgumentError(
        saw=f"{_callee_name(function, args)} takes {most - 1} arguments by position, "
        f"got {len(args) - 1}",
        needed=answer.needed,
        do=answer.do,
    )


def _callee_name(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    name = function.__name__
    if next(iter(inspect.signature(function).parameters)) not in OWNERS:
        return name
    owner = args[0] if inspect.isclass(args[0]) else type(args[0])
    return owner.__name__ if name in ("__init__", "forward") else f"{owner.__name__}.{name}"
