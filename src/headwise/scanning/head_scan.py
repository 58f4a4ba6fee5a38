"""What a scan found: every statistic of every head, to read, to merge and to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from headwise.errors import OptionError
from headwise.scanning import scan_file
from headwise.scanning.layer_scan import LayerScan, ScanReadings
from headwise.scanning.scan_diff import ScanDiff
from headwise.scanning.statistics.statistic import Statistic
from headwise.support.axes import describe_value
from headwise.support.display import Displayed


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadScan(Displayed, ScanReadings):
    """What every head of a model did while it read; ``headwise.scan`` makes one.

    ``scan["entropy"]`` is a tensor (layers, heads), ``scan.top("induction")`` names heads, and
    ``print(scan)`` draws a picture; a notebook shows its page. It is never changed: `merge` gives
    a new one.

    Attributes:
        model: what was scanned, such as "BertModel".
        sequences: how many were read.
        tokens: how many were read, without padding.
        notes: what could not be reached.
        statistics: what was asked of each layer.
        layer_scans: what was seen, a layer each, in call order.

    Raises:
        OptionError: two statistics of one name, or a layer that neither has a statistic nor says
            why it is missing.
    """

    def __repr__(self) -> str:
        sizes = {"layers": len(self.layers), "heads": len(self.heads)}
        sizes |= {"statistics": len(self.measured)}
        sizes |= {"sequences": self.sequences, "tokens": self.tokens}
        return f"HeadScan({self.model}, {', '.join(f'{name}={n:,}' for name, n in sizes.items())})"

    # ---- to put together --------------------------------------------------------------------

    def merge(self, *others: HeadScan) -> HeadScan:
        """One scan of all that was read, as if in one go.

        What a summary counts is exact. What it sums is summed in float64 in the given order, so
        the same scans in the same order give the same bits.

        Raises:
            OptionError: scans of other models, layers, heads or statistics; the first difference
                is named.
        """
        for other in others:
            _require_scan(other)
        everyone = (self, *others)
        for place, other in enumerate(others, start=2):
            if (difference := self.difference(other)) is not None:
                raise OptionError(
                    saw=f"scans 1 and {place} of {len(everyone)}: {difference}",
                    needed="scans of the same layers, heads and statistics",
                    do="merge scans of one model that were made with the same options; "
                    "HeadScan.diff compares two models",
                )
        return HeadScan(
            model=self.model,
            sequences=sum(scan.sequences for scan in everyone),
            tokens=sum(scan.tokens for scan in everyone),
            notes=tuple(dict.fromkeys(note for scan in everyone for note in scan.notes)),
            statistics=self.statistics,
            layer_scans=tuple(
                LayerScan.merged(layers, self.statistics)
                for layers in zip(*(scan.layer_scans for scan in everyone), strict=True)
            ),
        )

    def difference(self, other: HeadScan) -> str | None:
        """The first thing that keeps two from being merged; None where nothing does."""
        if self.model != other.model:
            return f"a {self.model}, and a {other.model}"
        if (first := _difference_of_statistics(self, other)) is not None:
            return first
        for has, lacks in ((self, other), (other, self)):
            if alone := [name for name in has.layers if name not in lacks.layers]:
                return f"layer {alone[0]}, which only one of them saw"
        if len(self.layers) != len(other.layers):
            return f"{len(self.layers)} layers, and {len(other.layers)}"
        pairs = zip(self.layer_scans, other.layer_scans, strict=True)
        return next((found for one, two in pairs if (found := one.difference(two))), None)

    def diff(self, other: HeadScan, *, match: bool = False) -> ScanDiff:
        """What changed from this scan to another, head by head: ``other - self``.

        Layers are paired in their order, whatever they are called.

        Args:
            other: a scan with as many layers, of the same heads.
            match: first assign the heads of each layer to each other, by the least total distance;
                `headwise.scanning.scan_diff` says what the distance is.

        Raises:
            OptionError: other layers or heads, or no statistic that both have.
            MissingExtraError: matching without scipy.
        """
        _require_scan(other)
        return ScanDiff.between(self, other, match=match)

    # ---- to keep ----------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one .safetensors file and return its absolute path; folders on the way are made.

        The same scan gives the same bytes. A reader never meets half a file. The file has a digest
        of all that it holds, so `load` refuses a file that was damaged.

        Raises:
            OptionError: nothing can be written there, or the scan could not be loaded again.
        """
        return scan_file.write(self, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str], statistics: Iterable[Statistic] = ()) -> HeadScan:
        """Read what `save` wrote.

        A file that headwise 0.1.0 wrote has no digest (format 1). It loads, and `notes` says so.

        Args:
            path: the file.
            statistics: those of the file that are not in headwise's catalogue.

        Raises:
            FileNotFoundError: there is no such file.
            OptionError: a file that is damaged or was edited, of another program or of a later
                headwise, or with a statistic that is not known or has another `Definition.id`.
        """
        fields, _ = scan_file.read(Path(path), statistics)
        return cls(**fields)


def _difference_of_statistics(one: HeadScan, two: HeadScan) -> str | None:
    for has, lacks in ((one, two), (two, one)):
        if alone := [name for name in has.names if name not in lacks.names]:
            return f"statistic {alone[0]}, which only one of them has"
    for name in one.names:
        own, other = one.definition(name), two.definition(name)
        if own.id != other.id:
            return f"{name} as {own.formula} ({own.id}), and as {other.formula} ({other.id})"
    return None


def _require_scan(other: object) -> None:
    if not isinstance(other, HeadScan):
        raise OptionError(
            saw=f"{describe_value(other)} in the place of a scan",
            needed="a HeadScan",
            do="headwise.scan(model, inputs), or HeadScan.load(path)",
        )
