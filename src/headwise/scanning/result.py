"""`HeadScan`: every statistic of every head of a model, to read, merge and save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from headwise.errors import OptionError
from headwise.scanning import file
from headwise.scanning.diff import ScanDiff
from headwise.scanning.layer import LayerScan, ScanReadings, StandoutHead, concatenate_texts
from headwise.scanning.links import Direction, Link, find_links
from headwise.scanning.statistics.statistic import Statistic
from headwise.support.files import write_whole
from headwise.support.lazy import Displayed, render_form
from headwise.support.text import describe_value


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadScan(Displayed, ScanReadings):
    """Statistics of every attention head of a model; ``headwise.scan`` returns one.

    ``scan["entropy"]`` is a tensor (layers, heads), ``scan.top("induction")`` names heads, and
    ``print(scan)`` draws pictures; a notebook shows the page. A scan never changes: `merge`
    returns a new one.

    Attributes:
        model: the class of the model, such as "BertModel".
        sequences: number of sequences.
        tokens: number of tokens, without padding.
        notes: sentences on modules that could not be captured.
        statistics: the requested statistics.
        layer_scans: the summaries of each layer, in call order.
        texts: the tokens that were read, up to 262,144; `LayerScan.query_text` and
            `LayerScan.key_text` number them.
    """

    def __repr__(self) -> str:
        sizes = {"layers": len(self.layers), "heads": len(self.heads)}
        sizes |= {"statistics": len(self.measured)}
        sizes |= {"sequences": self.sequences, "tokens": self.tokens}
        return f"HeadScan({self.model}, {', '.join(f'{name}={n:,}' for name, n in sizes.items())})"

    # ---- merge and compare ------------------------------------------------------------------

    def merge(self, *others: HeadScan) -> HeadScan:
        """Return one scan of the data of all scans, as if it had been scanned in one call.

        Counts are exact. Sums are added in float64, those of maps in float32, in the order of
        the arguments, so the same scans in the same order give the same bits.

        Raises:
            OptionError: scans of other models, layers, heads or statistics; the first difference
                is named.
        """
        for other in others:
            _require_scan(other)
        scans = (self, *others)
        for number, other in enumerate(others, start=2):
            if (difference := self.reason_not_mergeable(other)) is not None:
                raise OptionError(
                    saw=f"scans 1 and {number} of {len(scans)}: {difference}",
                    needed="scans of the same layers, heads and statistics",
                    do="merge scans of one model that were made with the same options; "
                    "HeadScan.diff compares two models",
                )
        return HeadScan(
            model=self.model,
            sequences=sum(scan.sequences for scan in scans),
            tokens=sum(scan.tokens for scan in scans),
            notes=tuple(dict.fromkeys(note for scan in scans for note in scan.notes)),
            statistics=self.statistics,
            layer_scans=tuple(
                LayerScan.merged(layers, self.statistics)
                for layers in zip(*(scan.layer_scans for scan in scans), strict=True)
            ),
            texts=concatenate_texts([scan.texts for scan in scans]),
        )

    def reason_not_mergeable(self, other: HeadScan) -> str | None:
        """Return the first difference that prevents a merge with ``other``, or None."""
        if self.model != other.model:
            return f"a {self.model}, and a {other.model}"
        both = {"statistic": (self.names, other.names), "layer": (self.layers, other.layers)}
        for kind, (mine, theirs) in both.items():
            if alone := [n for n in mine if n not in theirs] + [n for n in theirs if n not in mine]:
                return f"{kind} {alone[0]}, which only one of them has"
        if len(self.layers) != len(other.layers):
            return f"{len(self.layers)} layers, and {len(other.layers)}"
        differences = [self.definition(n).difference_of_meaning(other.definition(n)) for n in self]
        pairs = zip(self.layer_scans, other.layer_scans, strict=True)
        differences += [mine.reason_not_mergeable(its, self.statistics) for mine, its in pairs]
        return next((difference for difference in differences if difference), None)

    def diff(self, other: HeadScan, *, match: bool = False) -> ScanDiff:
        """Return the change from this scan to another, head by head: ``other - self``.

        Layers are paired by their order, whatever their names.

        Args:
            other: a scan with as many layers, of the same heads.
            match: True to assign the heads of each layer to each other first, by the least total
                distance as defined in `headwise.scanning.diff`.

        Raises:
            OptionError: other layers or heads, or no statistic that both have.
            MissingExtraError: matching without scipy.
        """
        _require_scan(other)
        return ScanDiff.between(self, other, match=match)

    def links(
        self,
        token: int,
        key: int | None = None,
        *,
        direction: Direction = "keys",
        sequence: int = 0,
        text: int = 0,
        name_of: Callable[[int], str] | None = None,
    ) -> list[Link]:
        """Return what every head's token looks at, or the weight of a pair of tokens in every head.

        ``scan.links(17)`` is the key to which query 17 gives most in each head, and
        ``scan.links(17, 3)`` the weight of query 17 on key 3. The answers are those of the page. A
        map of one token a cell holds every weight; else `TopKeysOfEveryQuery` has stored the
        largest.

        Args:
            token: counted in its sequence, from 0: the query, or with ``direction="queries"`` the
                key.
            key: counted in its sequence, for the weight of a pair; None to search it.
            direction: "keys" for what the token looks at, "queries" for the query that gives most
                to it.
            sequence: of the scan, from 0.
            text: the number of the token's text in `texts`, of models that read two: layers in
                which it is no query (or no key) have no link.
            name_of: returns the text of a token id, where the text was not written down.

        Returns:
            A link of each head that has one, the largest weight first; bounds of pairs that are
            not stored ("at most") come last.

        Raises:
            OptionError: a token, a sequence or a text that the scan does not have, or a scan
                without single tokens.
        """
        options = {"sequence": sequence, "text": text}
        return find_links(self, token, key, direction=direction, **options, name_of=name_of)

    # ---- pages ------------------------------------------------------------------------------

    def standouts(self, *, name_of: Callable[[int], str] | None = None) -> list[StandoutHead]:
        """Return the heads that stand out, with the sentences of pages and terminals.

        A head stands out by a statistic if its value is the highest, at least twice that of the
        middle head, and for shares 5 percentage points more. It also stands out if it attends to
        the fewest tokens, and to at most half as many as the middle head. The list is empty where
        all heads are alike, as in a model with random weights.

        Of the heads that give over 30 % of the weight of all queries to one key, the one that gives
        most is in the list too, whatever the middle head does. A query that cannot see the key
        counts with 0. The sentence names the key; the same weight is not in the list again as that
        on the first token, on separators or on special tokens.

        Args:
            name_of: returns the text of a token id; without it, keys are numbers, unless the scan
                has the text as it was written.
        """
        heads: list[StandoutHead] = render_form(self, "standouts", name_of=name_of)
        return heads

    def save_page(
        self,
        path: str | PathLike[str],
        *,
        title: str | None = None,
        name_of: Callable[[int], str] | None = None,
        top_keys: Literal["all", "standouts"] = "standouts",
    ) -> Path:
        """Write the viewer's page of this scan, a single offline file, and return its path.

        Args:
            path: the HTML file; it is replaced as a whole.
            title: the name of the model; its class if None.
            name_of: returns the text of a token id; without it, tokens are numbers.
            top_keys: "all" for the four stored keys of every query of all heads. "standouts" for
                four keys of heads that stand out, and the first of others, in a page of more than
                262,144 heads x queries; the page is then a third as large.

        Raises:
            OptionError: nothing can be written there.
        """
        options = {"title": title, "name_of": name_of, "top_keys": top_keys}
        return write_whole(Path(path), render_form(self, "page", **options))

    def view(
        self,
        *,
        model: Any = None,
        inputs: Any = None,
        other: HeadScan | None = None,
        title: str | None = None,
        name_of: Callable[[int], str] | None = None,
        height: int = 800,
    ) -> Any:
        """Return the viewer as a widget of a notebook.

        ``widget.selected_head`` is [layer, head]: it follows the page, and setting it moves the
        page.

        Args:
            model: the model that was scanned; the kernel then computes exact rows on demand.
            inputs: its inputs, as `headwise.scan` got them.
            other: the scan after this one, of the same layers and heads, to compare with.
            title: the name of the model; its class if None.
            name_of: returns the text of a token id. Without it, the tokenizer of a model that
                transformers loaded writes the text; without that, tokens are numbers.
            height: of the widget, in pixels.

        Raises:
            OptionError: a model without inputs, or inputs without a model.
            MissingExtraError: anywidget is not installed.
        """
        options = {"title": title, "name_of": name_of, "height": height}
        return render_form(self, "widget", model=model, inputs=inputs, other=other, **options)

    def plot(
        self,
        kind: Literal["map", "grid", "profile", "token"] = "grid",
        *,
        layer: int | str | None = None,
        head: int | None = None,
        statistic: str | None = None,
        token: int | None = None,
        direction: Direction = "keys",
        sequence: int = 0,
        queries: range | None = None,
        keys: range | None = None,
        name_of: Callable[[int], str] | None = None,
        ax: Any = None,
        width: float = 3.35,
    ) -> Any:
        """Return a matplotlib Figure, at the quality of a paper: the pictures of the viewer.

        Each has a title with the model, and a scale. Text stays text in PDF and SVG, and colours
        are those of the page, which shows the call that draws what it shows.

        Args:
            kind: "grid" for layers x heads of a statistic, "map" for the weights of a head in
                blocks, "profile" for its weights by offset, "token" for what a token looks at.
            layer: the layer's number in the scan, or its name; that of the first head that stands
                out if None.
            head: the head's number; that of the first head that stands out if None.
            statistic: of a grid; the one of the first head that stands out if None.
            token: of "token", counted in its sequence, from 0. A map of one token a cell holds
                every weight; else `TopKeysOfEveryQuery` has stored the largest. The figure says
                which.
            direction: "keys" for what the token looks at, "queries" for what looks at it.
            sequence: the token's, from 0.
            queries: the tokens of a map that are in sight, in whole blocks; all if None.
            keys: the same of the keys.
            name_of: returns the text of a token id, where the text was not written down. A map of
                up to 48 tokens shows their words.
            ax: matplotlib axes to draw into, instead of a new figure.
            width: of a new figure, in inches; 3.35 is a column of many journals.

        Raises:
            OptionError: a kind, a statistic, a head or tokens that the scan does not have, or a
                token of a head without single tokens.
            MissingExtraError: matplotlib is not installed.
        """
        chosen = {"layer": layer, "head": head, "statistic": statistic, "name_of": name_of}
        asked = {"token": token, "direction": direction, "sequence": sequence}
        part = {"queries": queries, "keys": keys}
        return render_form(self, "figure", kind=kind, **chosen, **asked, **part, ax=ax, width=width)

    # ---- save and load ----------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one .safetensors file, make missing folders, and return the absolute path.

        The same scan gives the same bytes. The file is replaced as a whole, so no reader opens
        half a file. It holds a digest of its content, so `load` refuses a damaged file.

        Raises:
            OptionError: nothing can be written there, or the scan could not be loaded again.
        """
        return file.write_scan_file(self, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str], statistics: Iterable[Statistic] = ()) -> HeadScan:
        """Read what `save` wrote.

        A file that headwise 0.1.0 wrote has no digest (format 1). It loads with a note in `notes`.

        Args:
            path: the file.
            statistics: statistics of the file that are not in headwise's catalogue.

        Raises:
            FileNotFoundError: there is no such file.
            OptionError: a file that is damaged or was edited, comes from another program or a
                later headwise, or has a statistic that is unknown or has another meaning.
        """
        fields, _ = file.read_scan_fields(Path(path), statistics)
        return cls(**fields)


def _require_scan(other: object) -> None:
    if not isinstance(other, HeadScan):
        saw = f"{describe_value(other)} instead of a scan"
        do = "headwise.scan(model, inputs), or HeadScan.load(path)"
        raise OptionError(saw=saw, needed="a HeadScan", do=do)
