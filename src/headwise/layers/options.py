"""Options of `Attention` that are fields of its function: type, field and way back, in one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from headwise.errors import OptionError
from headwise.function import spec as rules
from headwise.function.rotary import Rotary
from headwise.function.spec import FROM_CONFIG, Latent, Softcap, TemperatureRule, ValueRule
from headwise.layers.distance import Alibi, PositionBias, T5Bias
from headwise.layers.norm import QKNorm
from headwise.support.text import describe_value


class Option(NamedTuple):
    """An option of `Attention`, and the field of this name in `AttentionSpec`.

    Attributes:
        kind: the type of the option; None where another check refuses a wrong one.
        needed, example: what an error asks for, and what it advises.
        field: gives the value of the field for the layer's attribute of this name.
        option: gives the option for a value of the field; None where no layer has it.
        is_positional: True if it acts by the positions of tokens in one sequence.
    """

    kind: type | None
    needed: str = ""
    example: str = ""
    field: Callable[[Any], Any] = lambda value: value
    option: Callable[[Any], Any] = lambda value: value
    is_positional: bool = False


def _rule(option: Any) -> Any:
    """Return the rule of an option; of a module that a user wrote, its name."""
    return getattr(option, "rule", None) or rules.Other(f"that of {type(option).__name__}")


def _score_bias_of(rule: Any) -> PositionBias | None:
    if isinstance(rule, rules.BucketRule):
        return T5Bias(rule.buckets, rule.max_distance, rule.bidirectional)
    return None if rule.before_scale else Alibi(rule.bias_max, rule.slopes)


OPTIONS = {
    "rotary": Option(Rotary, "a Rotary", "rotary=Rotary()", _rule, Rotary.of, True),
    "qk_norm": Option(QKNorm, "a QKNorm", "qk_norm=QKNorm()", _rule, QKNorm.of),
    "softcap": Option(None, field=Softcap, option=lambda softcap: softcap.limit),
    "score_bias": Option(
        PositionBias,
        "an Alibi or a T5Bias; a ScoreBias is an argument of the call",
        "score_bias=Alibi()",
        _rule,
        _score_bias_of,
        is_positional=True,
    ),
    "window": Option(
        tuple,
        "(left, right): the number of keys before and after a query's position",
        "window=(W - 1, 0) for a causal window of W keys, the query's own key included",
        is_positional=True,
    ),
    "output_gate": Option(None),
    "temperature": Option(
        TemperatureRule,
        "a TemperatureRule, of headwise.function",
        "temperature=TemperatureRule(0.1, 8192)",
        is_positional=True,
    ),
    "clip": Option(
        None,
        "the largest size of queries, keys and values, a positive number",
        "e.g. clip=8.0, or None",
        option=float,
    ),
    "values": Option(ValueRule, "a ValueRule, of headwise.function", "values=None"),
    "output_norm": Option(QKNorm, "a QKNorm", 'QKNorm(over="width")', _rule, QKNorm.of),
    "latent": Option(
        Latent,
        "a Latent with a rank and a shared_width",
        "latent=Latent(rank=512, shared_width=64), of headwise.function",
        option=lambda latent: None if latent.rank is None else latent,
    ),
}
POSITIONAL = tuple(name for name, option in OPTIONS.items() if option.is_positional)


def check_type(name: str, value: Any) -> None:
    """Raise OptionError for an option of another type."""
    kind = OPTIONS[name].kind
    if kind is None or value is None:
        return
    if isinstance(value, type) or not isinstance(value, kind):
        refuse(name, describe_value(value))


def refuse(name: str, shown: str) -> NoReturn:
    option = OPTIONS[name]
    raise OptionError(saw=f"{name}={shown}", needed=option.needed, do=option.example)


def is_settled(value: Any) -> bool:
    """True for a field that a layer can have: no `Unset`, no `Other`, no number left open."""
    if isinstance(value, rules.Unset | rules.Other):
        return False
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return FROM_CONFIG not in parts
