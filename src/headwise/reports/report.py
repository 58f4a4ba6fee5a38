"""A scan with sentences on the model and its input: what pages and terminals show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from headwise.scanning.result import HeadScan
from headwise.scanning.schema import fields_of_statistic
from headwise.support.text import describe_count

LIBRARIES = ("headwise", "torch")


@dataclass(frozen=True)
class SameFunction:
    """Comparison of headwise's layers with a model's own layers under the model's weights.

    Attributes:
        model: the model's name.
        layers: the number of its attention layers.
        shares: the largest share of the error budget over the layers, by the layer's name; the
            model's own layers come last.
    """

    model: str
    layers: int
    shares: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """True if every layer is within the error budget."""
        return max(self.shares.values()) <= 1

    @property
    def summary_sentences(self) -> str:
        """The result and its figures, in three sentences."""
        *layers, encoder = self.shares
        verdict = (
            f"The same function. In all {self.layers} layers"
            if self.holds
            else f"Not the same function. In at least one of {self.layers} layers not all of"
        )
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.shares.items())
        return (
            f"{verdict} {' and '.join(layers)} with the weights of {self.model}, and {encoder}, "
            f"are within the error budget of the formula. The largest shares of it: {shares}."
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanReport:
    """A scan with sentences on the model and its input.

    Attributes:
        scan: the scan.
        title: the name of the model.
        about: a phrase on its class, sizes and dtype.
        read: a phrase on the input.
        chosen: sentences on the tokens that count as separators and as special.
        notes: sentences on problems, shown before those of the scan.
        name_of: a function that returns the text of a token, if there is a tokenizer.
        versions: versions of the libraries.
        same_function: the comparison of headwise's layers with the model's own, if measured.
        command: the command that stores what each token of a head looks at, with {heads} for it.
        second: another scan of the same layers and heads, to compare with.
        names: names of the two scans.
    """

    scan: HeadScan
    title: str
    about: str
    read: str
    chosen: str = ""
    notes: tuple[str, ...] = ()
    name_of: Callable[[int], str] | None = None
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: metadata.version(name) for name in LIBRARIES}
    )
    same_function: SameFunction | None = None
    command: str | None = None
    second: HeadScan | None = None
    names: tuple[str, str] = ("A", "B")

    @classmethod
    def of(
        cls,
        scan: HeadScan,
        *,
        title: str | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> ScanReport:
        """Return the report of a scan alone, for ``print`` and for a notebook."""
        return cls(
            scan=scan,
            title=title or scan.model,
            name_of=name_of,
            about=f"HeadScan of {describe_count(len(scan.measured), 'statistic')}",
            read=f"{describe_count(scan.sequences, 'sequence')}, "
            f"{describe_count(scan.tokens, 'token')}",
        )

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes of the report, then those of the scan."""
        return (*self.notes, *self.scan.notes)

    @property
    def num_heads(self) -> int:
        """Number of scanned heads in all layers."""
        return sum(len(layer.heads) for layer in self.scan.layer_scans)

    @property
    def sizes_text(self) -> str:
        """``6 layers of 12 heads``."""
        counts = sorted({layer.num_heads for layer in self.scan.layer_scans})
        layers = describe_count(len(self.scan.layers), "layer")
        if not counts:
            return layers
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        return f"{layers} of {fewest}{describe_count(counts[-1], 'head')}"

    @property
    def missing_statistics_by_reason(self) -> dict[str, list[str]]:
        """Names of the statistics that no layer has, by the reason."""
        reasons: dict[str, list[str]] = {}
        for name in self.scan.names:
            if self.scan.layers and name not in self.scan.measured:
                reasons.setdefault(self.scan.layer_scans[0].missing[name], []).append(name)
        return reasons

    @property
    def not_measured_sentences(self) -> list[str]:
        """Sentences on missing statistics, with the reason and the number of layers."""
        layers = self.scan.layer_scans
        missing = ((reason, name) for layer in layers for name, reason in layer.missing.items())
        groups: dict[tuple[str, int], list[str]] = {}
        for (reason, name), count in Counter(missing).items():
            groups.setdefault((reason, count), []).append(name)
        return [
            f"Not measured{'' if count == len(layers) else f' in {count} of {len(layers)} layers'}"
            f": {', '.join(names)} ({reason})."
            for (reason, count), names in groups.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all but the pictures as JSON data; None where a head has no value."""
        scan = self.scan
        return {
            "model": {"name": self.title, "class": scan.model, "about": self.about},
            "read": {"what": self.read, "sequences": scan.sequences, "tokens": scan.tokens},
            "chosen": self.chosen,
            "notes": list(self.all_notes),
            "missing": self.missing_statistics_by_reason,
            "statistics": [fields_of_statistic(scan.definition(name)) for name in scan.scalars],
            "heads": [
                {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
                for row in scan.table()
            ],
            "versions": dict(self.versions),
            **({"same_function": asdict(self.same_function)} if self.same_function else {}),
        }
