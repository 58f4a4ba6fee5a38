"""Result of a cut on held-out data: what prunings and regroupings report alike."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from headwise.surgery.data import Data
from headwise.surgery.quality import Quality, interval


class Measured(ABC):
    """Quality of each held-out sequence before and after a cut, (sequences,).

    ``moved`` is the norm of the change of the outputs over their norm; see `Quality.change`.
    """

    before: Tensor
    after: Tensor
    moved: float

    @property
    def change(self) -> tuple[float, float, float]:
        """The mean change of quality, and its 95 % bootstrap interval over sequences."""
        difference = self.after - self.before
        return (float(difference.mean()), *interval(difference))

    def quality_lines(self, quality: Quality, data: Data) -> list[str]:
        """Return the measure, the data, and the quality before and after, in lines."""
        change, low, high = self.change
        moved = "" if math.isnan(self.moved) else f"; outputs moved by {self.moved:.1%}"
        return [
            f"quality: {quality.title}{self.describe_guess(quality)}",
            f"on {len(self.after)} sequences; {data.note}",
            f"{float(self.before.mean()):.4f} before, {float(self.after.mean()):.4f} after: "
            f"{change:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}{moved}",
        ]

    def describe_guess(self, quality: Quality) -> str:
        """Return words for a model that is no better than guessing before the cut, else ""."""
        if quality.guess is None or interval(self.before)[0] > quality.guess:
            return ""
        return f"; before no better than guessing, {quality.guess:.4f}"

    def quality_values(self, quality: Quality, data: Data) -> dict[str, Any]:
        """Return the same numbers by name."""
        change, low, high = self.change
        return {
            "measure": quality.title,
            "sequences": len(self.after),
            "held_out": data.note,
            "before": float(self.before.mean()),
            "after": float(self.after.mean()),
            "change": {"mean": change, "low": low, "high": high},
            "moved": None if math.isnan(self.moved) else self.moved,
            "guess": quality.guess,
        }

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return all numbers of the report by name."""

    def to_json(self) -> str:
        """Return all numbers of the report as JSON; the cut has a file of its own."""
        return json.dumps(self.values(), indent=1) + "\n"


def mark(number: int, *, is_chosen: bool) -> str:
    """Return a number of heads on a printed curve, with a star where it is the chosen one."""
    return f"*{number}" if is_chosen else str(number)
