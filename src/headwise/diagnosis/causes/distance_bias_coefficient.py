"""The bias by distance is multiplied by a number; 0 where it is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.layers.positions.distance_bias import alibi_slopes


class DistanceBiasCoefficientCause(Cause):
    """The bias by distance is multiplied by a number; 0 where it is left out.

    Falcon adds ALiBi before it divides the scores by sqrt(head_dim). BLOOM and MPT add it after.
    The same slopes then differ by a factor of sqrt(head_dim). A negative number is a wrong sign of
    the distance.

    Wrong:
        scores = q @ k.mT / head_dim**0.5 + slopes * distance  # Falcon's weights

    Right:
        scores = (q @ k.mT + slopes * distance) / head_dim**0.5

    Repair:
        Divide the slopes by the number that is reported.

    Confused with:
        distance bias slope rule: with one head, where rules differ by a factor alone.
    """

    name: ClassVar[str] = "distance bias coefficient"
    symptom: ClassVar[str] = (
        "ALiBi attention is too local or too flat (Falcon, BLOOM, MPT), by one factor in every head"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return no bias, and the family of all factors of the slopes.

        The slopes are those of the paper where there should be none.
        """
        model, slopes = evidence.model, evidence.model.settings.slopes
        is_missing = slopes is None
        if slopes is None:
            slopes = alibi_slopes(model.settings.num_heads).double()
        else:
            none = model.with_settings(slopes=None)
            yield Variant(none, {"coefficient": 0.0}, "add the bias by distance: Alibi()")

        def make(factor: float) -> Variant:
            changed = model.with_settings(slopes=factor * slopes)
            repair = f"slopes divided by {factor:.6g}"
            repair = "leave out the bias by distance" if is_missing else repair
            return Variant(changed, {"coefficient": factor}, repair)

        yield Family(make, (-1.0, 0.5, 2.0, 8.0))
