"""The page of the first look: every head of an encoder, in pictures and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from headwise.budget import budget
from headwise.reports import pictures
from headwise.reports.template import templates
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.statistic import Definition
from headwise.studies.first_look import METRICS, CloseUp, FirstLook, Head
from headwise.support.whole_files import write_whole

# Weights below this have no hover text in a close-up: there are hundreds, and none is worth it.
WORTH_A_HOVER = 0.05


@dataclass(frozen=True)
class Measure:
    """One statistic as a page shows it; ``full`` is the value at the right end of its scale."""

    key: str
    label: str
    definition: Definition
    full: float
    even: float
    is_weight: bool

    @property
    def unit(self) -> str:
        """The unit in few words; the definition has more."""
        return "A share, 0 to 1." if self.is_weight else "In nats; 0 is all on one token."

    def colour(self, value: float) -> pictures.RGB:
        """A weight on the scale of the maps, an entropy on a straight one."""
        if self.is_weight:
            return pictures.viridis(pictures.weight_position(value))
        return pictures.viridis(value / self.full)

    def short(self, value: float) -> str:
        """For a small cell: ``.78`` of a weight, ``5.4`` nats."""
        return f"{value:.2f}".removeprefix("0") if self.is_weight else f"{value:.1f}"

    def long(self, value: float) -> str:
        """For a sentence: three decimals of a weight, two of an entropy."""
        return f"{value:.3f}" if self.is_weight else f"{value:.2f}"


def save(result: FirstLook, path: Path) -> Path:
    """Write the page, whole or not at all. Returns its absolute path."""
    return write_whole(path, render(result))


def render(result: FirstLook) -> str:
    """The page as HTML."""
    environment = templates()
    environment.filters |= {
        "css": pictures.css,
        "ink": pictures.ink,
        "png": pictures.weights_png,
        "scientific": scientific,
        "words": in_words,
    }
    template = environment.get_template("first_look.html")
    layers = [
        [result.head(layer, head) for head in range(result.num_heads)]
        for layer in range(result.num_layers)
    ]
    return template.render(
        look=result,
        layers=layers,
        measures=measures(result),
        close_ups=[(shown, layers[shown.layer][shown.head]) for shown in result.close_ups],
        hovers=hovers,
        describe=describe,
        gradient=Markup(pictures.gradient()),
        ticks=[(w, 100 * pictures.weight_position(w)) for w in (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)],
        factor=budget.FORWARD,
        extremes={m: max(getattr(h, m) for h in result.heads) for m in METRICS},
        worst=max(equality.drop_in.ratio for equality in result.equalities),
    )


def measures(result: FirstLook) -> tuple[Measure, ...]:
    """The four statistics, with what a head that looks everywhere evenly would have."""
    even = 1 / len(result.tokens)
    entropy, previous, first, separator = (s.definition for s in catalogue.named(METRICS))
    return (
        Measure(
            "entropy",
            "Entropy",
            entropy,
            full=result.even_entropy,
            even=result.even_entropy,
            is_weight=False,
        ),
        Measure(
            "previous_token",
            "Weight on the previous token",
            previous,
            full=1.0,
            even=even,
            is_weight=True,
        ),
        Measure(
            "first_token",
            f"Weight on the first token, {result.tokens[0]}",
            first,
            full=1.0,
            even=even,
            is_weight=True,
        ),
        Measure(
            "separator",
            f"Weight on the separator, {result.separator_name}",
            separator,
            full=1.0,
            even=even * result.separator_count,
            is_weight=True,
        ),
    )


def describe(head: Head) -> str:
    """A head in a sentence, for those who do not see the picture."""
    return (
        f"Layer {head.layer}, head {head.head}: entropy {head.entropy:.2f} nats; weight on the "
        f"previous token {head.previous_token:.2f}, on the first {head.first_token:.2f}, "
        f"on the separator {head.separator:.2f}"
    )


def hovers(shown: CloseUp, tokens: Sequence[str]) -> list[tuple[int, int, str]]:
    """(row, column, words) for each weight of a close-up that is worth a hover text."""
    part = tokens[shown.start : shown.start + len(shown.weights)]
    return [
        (i, j, f"{part[i]} → {part[j]}: {weight:.2f}")
        for i, row in enumerate(shown.weights)
        for j, weight in enumerate(row)
        if weight >= WORTH_A_HOVER
    ]


def in_words(parts: Sequence[str]) -> str:
    """``a, b and c``, with a capital."""
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return text[:1].upper() + text[1:]


def scientific(value: float) -> Markup:
    """``1.9 × 10⁻⁶``."""
    if value == 0 or not math.isfinite(value):
        return Markup("{:g}").format(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return Markup("{} × 10<sup>{}</sup>").format(mantissa, str(int(exponent)).replace("-", "−"))
