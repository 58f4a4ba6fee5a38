"""Summaries of each scanned layer, and access to every statistic of every head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall, tensors_equal
from headwise.scanning.statistics.catalogue import KNOWN_FOR, PICTURED, unknown_statistic_error
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary
from headwise.scanning.written import WrittenText
from headwise.support.lazy import require_package
from headwise.support.tensors import convert_to_int_or_none
from headwise.support.text import describe_count, describe_value, list_some

MOST_TOKENS = 2**18  # of all texts of a scan together


class ScannedText(NamedTuple):
    """Named tuple: the tokens of the sequences that one part of a model read, without padding.

    An encoder-decoder model reads two texts.

    Attributes:
        ids: (tokens,) in int32, one sequence after another; below 0 where a token is unknown.
        lengths: number of tokens of each sequence.
        written: the text of each sequence as it was written, None where it is unknown; empty if
            none is known.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    written: tuple[WrittenText | None, ...] = ()

    def split(self) -> list[tuple[Tensor, WrittenText | None]]:
        """Return the ids and the written text of each sequence."""
        written = self.written or (None,) * len(self.lengths)
        return list(zip(self.ids.split(list(self.lengths)), written, strict=True))

    def word(self, sequence: int, token: int, name_of: Callable[[int], str] | None = None) -> str:
        """Return a token's characters as they were written, else its text by ``name_of``.

        A token without characters, such as a special one, has its text too. The word is empty where
        neither is known.
        """
        written = self.written[sequence] if self.written else None
        word = "" if written is None else written.word(token)
        number = int(self.ids[sum(self.lengths[:sequence]) + token])
        return word or (name_of(number) if name_of is not None and number >= 0 else "")


class TextRecorder:
    """Records the texts of a running model from its attention calls, up to `MOST_TOKENS` in all.

    The keys of a call are one text. A further call of the same input with the same tokens reads
    the same text, another call reads another one. A call that continues a cache adds its tokens to
    the text of the calls before, as long as the keys of these are unchanged in the first layer.

    Args:
        written: the texts as they were written, one for each sequence of all inputs; or none.
    """

    def __init__(self, written: Sequence[WrittenText | None] = ()) -> None:
        self._texts: list[list[tuple[Tensor, WrittenText | None]]] = []
        self._cut: set[int] = set()  # texts with a sequence that there was no room for
        self._room = MOST_TOKENS
        self._now: list[list[Tensor]] = []  # the sequences of each text, of this input
        self._written: list[list[WrittenText | None]] = []
        self._last_queries: int | None = None
        self._first: dict[int, tuple[str, Tensor]] = {}  # the first layer of a text, its keys
        self._given = written
        self._lengths: list[int] = []  # of the sequences of all inputs so far
        self._start = 0  # the number of this input's first sequence
        # The first text of this input that the written ones fit.
        self._read: tuple[list[Tensor], list[WrittenText | None]] | None = None
        self._fitting = 0  # sequences that have their text

    def add_sequences(
        self, number: int, sequences: Iterable[tuple[Tensor, WrittenText | None]]
    ) -> None:
        """Add sequences to a text while there is room."""
        if number == len(self._texts):
            self._texts.append([])
        for ids, written in sequences:
            if len(ids) > self._room:
                self._cut.add(number)
            if number not in self._cut:
                self._texts[number].append((ids.to("cpu", torch.int32), written))
                self._room -= len(ids)

    @property
    def texts(self) -> tuple[ScannedText, ...]:
        """The texts so far."""
        self.begin_input()
        texts = []
        for sequences in self._texts:
            ids = [each for each, _ in sequences]
            written = tuple(each for _, each in sequences)
            known = written if any(each is not None for each in written) else ()
            whole = torch.cat([torch.zeros(0, dtype=torch.int32), *ids])
            texts.append(ScannedText(whole, tuple(map(len, ids)), known))
        return tuple(texts)

    def begin_input(self) -> None:
        """Start another input, with other sequences."""
        for number, written in enumerate(self._written):
            # Tokens that a cache continues have no characters.
            texts = (
                text
                and WrittenText(text.text, pad(text.spans, (0, 0, 0, len(ids) - len(text.spans))))
                for text, ids in zip(written, self._now[number], strict=True)
            )
            self.add_sequences(number, zip(self._now[number], texts, strict=True))
        self._now, self._written, self._first = [], [], {}
        self._last_queries = self._read = None
        self._start = len(self._lengths)

    def record(self, call: CapturedCall) -> tuple[int | None, int | None]:
        """Record the text of a call, and return the numbers of its queries' and its keys' text.

        None stands for an unknown text, as of queries that continue an unknown cache.
        """
        tokens, real = call.tokens, call.real_keys
        if call.dropped:
            tokens, real = call.read_tokens, pad(real, (call.dropped, 0), value=True)
        if tokens is None:
            tokens = torch.full(real.shape, -1, device=real.device)
        sequences = [ids[chosen] for ids, chosen in zip(tokens, real, strict=True)]
        if call.own_key:
            return (self._continue_text(call, sequences, call.own_key),) * 2
        are_known = (
            len(known) == len(sequences) and all(map(torch.equal, known, sequences))
            for known in self._now
        )
        keys = next((n for n, known in enumerate(are_known) if known), len(self._now))
        if keys == len(self._now):
            self._lengths += [] if keys else map(len, sequences)
            self._now.append(sequences)
            self._written.append(self._find_written(sequences, real))
        if call.own_key == 0 and not call.is_cross:
            self._last_queries = keys
            self._first.setdefault(keys, (call.layer, call.matrix.k[:, :, : call.matrix.shape[2]]))
            return keys, keys
        lengths, queries = call.real_queries.sum(-1).tolist(), self._last_queries
        is_known = queries is not None and [len(ids) for ids in self._now[queries]] == lengths
        return (queries if is_known else None), keys

    def _continue_text(self, call: CapturedCall, sequences: list[Tensor], start: int) -> int | None:
        """Return the text of queries after a cache; the call of its first layer adds them to it."""
        k, added = call.matrix.k, call.real_queries.sum(-1).tolist()
        earlier = [ids[: len(ids) - n] for ids, n in zip(sequences, added, strict=True)]
        for number, (layer, keys) in list(self._first.items()):
            is_first, known = call.layer == layer, self._now[number]
            seen = earlier if is_first else sequences
            fits = len(known) == len(seen) and all(map(torch.equal, known, seen))
            if is_first and not (fits and tensors_equal(keys[:, :, -start:], k[:, :, :start])):
                del self._first[number]  # beams moved, or tokens were taken back
            elif fits:
                if is_first:
                    self._first[number] = layer, k[:, :, : start + call.matrix.shape[2]]
                    self._now[number] = sequences
                return number
        return None

    def _find_written(self, sequences: list[Tensor], real: Tensor) -> list[WrittenText | None]:
        """Return the written text of each sequence: of the first text that they fit.

        The decoder of an encoder-decoder model may read the same tokens, one place later.
        """
        none: list[WrittenText | None] = [None] * len(sequences)
        if self._read is not None:
            first, texts = self._read
            is_later = len(first) == len(sequences) and all(
                torch.equal(ids[1:], before[:-1])
                for ids, before in zip(sequences, first, strict=True)
            )
            return [text and text.one_later() for text in texts] if is_later else none
        given = self._given[self._start : self._start + len(sequences)]
        if len(given) < len(sequences):
            return none
        texts = [text and text.of_tokens(kept) for text, kept in zip(given, real, strict=True)]
        if [text is None for text in texts] != [text is None for text in given]:
            return none
        self._read = sequences, texts
        self._fitting += len(texts)
        return texts

    def require_written_texts_read(self) -> None:
        """Raise OptionError if a written text is not that of a sequence."""
        if self._fitting == len(self._given):
            return
        spans = ["none" if text is None else f"{len(text.spans):,}" for text in self._given]
        read = list_some([f"{length:,}" for length in self._lengths], 4)
        raise OptionError(
            saw=f"written= with {describe_count(len(spans), 'text')}, "
            f"whose numbers of tokens are {list_some(spans, 4)}",
            needed="a text for each sequence, with a span for each token; the sequences that were "
            f"read have {read} tokens",
            do="take the offset_mapping of the same call of the tokenizer as the token ids",
        )


def concatenate_texts(texts: Sequence[tuple[ScannedText, ...]]) -> tuple[ScannedText, ...]:
    """Return the texts of several scans of a model, one after another, up to `MOST_TOKENS`."""
    merged = TextRecorder()
    if len({len(each) for each in texts}) == 1:
        for each in texts:
            for number, text in enumerate(each):
                merged.add_sequences(number, text.split())
    return merged.texts


OTHER_HEAD = "other_head"  # the axis of a statistic that compares the heads of a layer
HEAD_DISTANCE = "head_distance"
SCANNED_HEAD = "scanned_head"  # of one that compares all heads, in the order of `heads`
Row = dict[str, str | int | float]


class HeadValue(NamedTuple):
    """Named tuple: the value of a statistic for one head.

    Attributes:
        layer: name of the layer.
        layer_index: row of the layer in the scan, from 0.
        head: number of the head in its layer, from 0.
        value: in the unit of the statistic.
    """

    layer: str
    layer_index: int
    head: int
    value: float


class SimilarHead(NamedTuple):
    """Named tuple: a head, and how far the weights of another head are from its own.

    Attributes:
        layer: row of the layer in the scan, from 0.
        head: number of the head in its layer, from 0.
        distance: share of the weight that lies on other keys, from 0 to 1.
    """

    layer: int
    head: int
    distance: float


class LayerValue(NamedTuple):
    """Named tuple: a statistic over the heads of one layer, as in the margin of the page's grid.

    Attributes:
        layer: name of the layer.
        layer_index: row of the layer in the scan, from 0.
        mean: of the scanned heads that have a value; NaN if none has one.
        low: the least of these heads.
        high: the most of these heads.
    """

    layer: str
    layer_index: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class StandoutHead:
    """A head that stands out by a statistic.

    Attributes:
        head: the head, with its value.
        sentence: what it does, such as "attends most widely: to about 24 of 37 tokens".
        middle: the value of the middle head, in words.
        statistic: name of the statistic.
    """

    head: HeadValue
    sentence: str
    middle: str
    statistic: str


@dataclass(eq=False, kw_only=True, repr=False)
class LayerScan:
    """Summaries of the statistics of one layer, updated with every attention call."""

    name: str  # in the model, such as "encoder.layer.3.attention.self"
    num_heads: int
    heads: tuple[int, ...]  # the selected heads; summaries have a row for each, in this order
    kind: Literal["self", "cross"]  # "self" if queries and keys are the same tokens
    calls: int = 0
    summaries: dict[str, Summary] = field(default_factory=dict)  # by the name of the statistic
    missing: dict[str, str] = field(default_factory=dict)  # why the layer lacks a statistic
    query_text: int | None = None  # number of the text in `HeadScan.texts`; None if unknown
    key_text: int | None = None

    def __repr__(self) -> str:
        some = f"{len(self.heads)} of " if len(self.heads) != self.num_heads else ""
        sizes = f"heads={some}{self.num_heads}, calls={self.calls}"
        sizes += f", statistics={len(self.summaries)}"
        sizes += f", missing={len(self.missing)}" if self.missing else ""
        return f"LayerScan({self.name!r}, {self.kind} attention, {sizes})"

    def add_summary(self, statistic: Statistic, summary: Summary) -> None:
        """Merge the summary of a further call into the summary of this layer."""
        name, before = statistic.definition.name, self.summaries
        both = [before[name], summary] if name in before else [summary]
        self.summaries[name] = statistic.merge(both)
        self.missing.pop(name, None)

    @classmethod
    def merged(cls, layers: Sequence[LayerScan], statistics: Iterable[Statistic]) -> LayerScan:
        """Merge several scans of one layer, between which `reason_not_mergeable` is None."""
        first = layers[0]
        names = [s.definition.name for s in statistics]
        return replace(
            first,
            calls=sum(layer.calls for layer in layers),
            summaries={
                name: statistic.merge([layer.summaries[name] for layer in layers])
                for name, statistic in zip(names, statistics, strict=True)
                if name in first.summaries
            },
            missing={
                name: "; ".join(dict.fromkeys(layer.missing[name] for layer in layers))
                for name in names
                if name not in first.summaries
            },
        )

    def reason_not_mergeable(self, other: LayerScan, statistics: Iterable[Statistic]) -> str | None:
        """Return the first difference that prevents a merge with ``other``, or None."""
        if self.name != other.name:
            return f"layer {self.name}, and {other.name} in its place"
        sizes = [
            (f"{x.kind} attention", f"{x.num_heads} heads", f"heads {', '.join(map(str, x.heads))}")
            for x in (self, other)
        ]
        for here, there in zip(*sizes, strict=True):
            if here != there:
                return f"layer {self.name} with {here}, and with {there}"
        for has, lacks in ((self, other), (other, self)):
            if alone := [name for name in has.summaries if name not in lacks.summaries]:
                reason = lacks.missing.get(alone[0], "it was not requested")
                return f"layer {self.name} with {alone[0]}, and without: {reason}"
        for statistic in statistics:
            if (name := statistic.definition.name) in self.summaries:
                both = self.summaries[name], other.summaries[name]
                if (difference := statistic.reason_not_mergeable(*both)) is not None:
                    return f"layer {self.name} with {difference}"
        return None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ScanReadings:
    """Statistics of the heads of a model as tensors and tables; the base of `HeadScan`."""

    model: str
    sequences: int
    tokens: int
    notes: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    layer_scans: tuple[LayerScan, ...]
    texts: tuple[ScannedText, ...] = ()

    # ---- access -----------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in call order."""
        return tuple(layer.name for layer in self.layer_scans)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the requested statistics."""
        return tuple(statistic.definition.name for statistic in self.statistics)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the statistics that at least one layer has."""
        present = {name for layer in self.layer_scans for name in layer.summaries}
        return tuple(name for name in self.names if name in present)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the measured statistics with one number for each head."""
        return tuple(name for name in self.measured if not self.definition(name).axes)

    @property
    def characterising_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that can characterise a head, in the order of the reports.

        The catalogue lists them; your own statistics are included if they have `Definition.most`.
        """
        others = (n for n in self.scalars if n not in PICTURED and self.definition(n).most)
        return (*(name for name in KNOWN_FOR if name in self.scalars), *others)

    @property
    def heads(self) -> list[tuple[str, int, int]]:
        """Each scanned head as (layer name, layer index, head)."""
        layers = enumerate(self.layer_scans)
        return [(layer.name, index, head) for index, layer in layers for head in layer.heads]

    def definition(self, name: str) -> Definition:
        """Return the definition of a statistic.

        Raises:
            OptionError: the scan has no such statistic.
        """
        return self._find_statistic(name).definition

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        """Return a statistic of all heads.

        Returns:
            (layers, heads, *axes) in float64. The axis of heads, like an axis "other_head", is as
            long as the largest layer needs; entry [l, h] is head h of layer l. An axis
            "scanned_head" has the heads in the order of `heads`. It is NaN for a head that does
            not exist or was not scanned, for a layer without the statistic, and where nothing
            counted.

        Raises:
            OptionError: the scan has no such statistic, or no layer has it.
        """
        statistic = self._find_statistic(name)
        heads = max((layer.num_heads for layer in self.layer_scans), default=0)
        results = {
            index: statistic.result(layer.summaries[name])
            for index, layer in enumerate(self.layer_scans)
            if name in layer.summaries
        }
        if not results:
            reasons = dict.fromkeys(layer.missing[name] for layer in self.layer_scans)
            raise OptionError(
                saw=f"statistic {name!r}, which no layer has: "
                f"{'; '.join(reasons) or 'the scan has no layers'}",
                needed=f"a statistic that was measured: {', '.join(self.measured) or 'none was'}",
                do="scan a model and inputs with what the statistic needs: "
                + (", ".join(statistic.needs) or "an attention layer"),
            )
        if SCANNED_HEAD in statistic.definition.axes:
            results = _mirror_pairs(results, self.layer_scans)
        for axis, axis_name in enumerate(statistic.definition.axes, start=1):
            for index, rows in results.items() if axis_name == OTHER_HEAD else ():
                shape = (*rows.shape[:axis], heads, *rows.shape[axis + 1 :])
                order = torch.tensor(self.layer_scans[index].heads)
                results[index] = rows.new_full(shape, torch.nan).index_copy_(axis, order, rows)
        # The length of any axis may differ between layers, as the number of heads may.
        shapes = zip(*(rows.shape[1:] for rows in results.values()), strict=True)
        sizes = (len(self.layers), heads, *map(max, shapes))
        whole = torch.full(sizes, torch.nan, dtype=torch.float64)
        for index, rows in results.items():
            scanned = list(self.layer_scans[index].heads)
            target: tuple[Any, ...] = (index, scanned, *map(slice, rows.shape[1:]))
            whole[target] = rows
        return whole

    def top(self, name: str, n: int = 5, *, lowest: bool = False) -> list[HeadValue]:
        """Return the ``n`` heads with the most of a statistic, the first of equals first.

        `ScanDiff.top` has the same signature. Heads without a value are left out.

        Args:
            name: a statistic with one number a head.
            n: how many heads.
            lowest: True for the heads with the least.

        Raises:
            OptionError: the scan has no such statistic, no layer has it, or it is not one number
                a head.
        """
        return top_heads(self.layers, self._scalar(name), n, lowest=lowest)

    def most_similar(self, layer: int | str, head: int, n: int = 5) -> list[SimilarHead]:
        """Return the ``n`` heads whose weights are nearest to those of a head, the nearest first.

        The distance is the statistic "head_distance": half the sum of the absolute differences of
        two rows of weights, the mean over queries. Heads without a distance, such as those that
        read another text, are left out.

        Args:
            layer: the layer's number in the scan, or its name.
            head: the head's number.
            n: how many heads.

        Raises:
            OptionError: a head that the scan does not have, or a scan without the statistic.
        """
        heads = self.heads
        places = [
            n for n, (*names, number) in enumerate(heads) if number == head and layer in names
        ]
        if not places:
            saw = f"most_similar({describe_value(layer)}, {describe_value(head)})"
            last = f"{heads[-1][1]} and {heads[-1][2]}" if heads else "none"
            needed = f"the number or name of a layer, and a scanned head: the last are {last}"
            raise OptionError(saw=saw, needed=needed, do="choose from scan.heads")
        distances = self[HEAD_DISTANCE][heads[places[0]][1], head]
        return nearest_heads(heads, distances, places[0], n)

    @property
    def compared_queries(self) -> tuple[tuple[int, int, int] | None, ...]:
        """On how many queries the distances of the heads of each layer were read.

        A layer has the least number of queries of a pair of heads, the largest, and the number of
        all queries; or None if it has no distances.
        """
        summaries = {
            index: layer.summaries[HEAD_DISTANCE]
            for index, layer in enumerate(self.layer_scans)
            if HEAD_DISTANCE in layer.summaries
        }
        counts = {index: summary["count"] for index, summary in summaries.items()}
        compared = dict[int, tuple[int, int, int]]()
        for index, read in _mirror_pairs(counts, self.layer_scans).items():
            if len(some := read[read > 0]):
                queries = int(summaries[index]["queries"].max())
                compared[index] = int(some.min()), int(some.max()), queries
        return tuple(map(compared.get, range(len(self.layer_scans))))

    def by_layer(self, name: str) -> list[LayerValue]:
        """Return the mean of a statistic over the heads of each layer, with the least and the most.

        Args:
            name: a statistic with one number a head.

        Raises:
            OptionError: as `top` does.
        """
        rows = enumerate(zip(self.layers, self._scalar(name), strict=True))
        values = [(layer, index, row[row.isfinite()]) for index, (layer, row) in rows]
        none = (math.nan,) * 3
        return [
            LayerValue(layer, index, *map(float, (x.mean(), x.min(), x.max()) if len(x) else none))
            for layer, index, x in values
        ]

    def table(self) -> list[Row]:
        """Return a row for each scanned head.

        A row holds layer (the name), layer_index, head and the statistics of `scalars`; NaN where
        a layer lacks a statistic.
        """
        return make_table_rows_by_head(self.heads, {name: self[name] for name in self.scalars})

    def to_pandas(self) -> Any:
        """Return the `table` as a pandas.DataFrame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pandas = require_package("pandas", purpose="which holds the table", pip="pandas")
        columns = ["layer", "layer_index", "head", *self.scalars]
        return pandas.DataFrame(self.table(), columns=columns)

    def _scalar(self, name: str) -> Tensor:
        """Return a statistic with one number a head, or raise OptionError."""
        if axes := self.definition(name).axes:
            saw = f"{name}, which has {' x '.join(axes)} numbers for each head"
            needed = f"one number for each head: {', '.join(self.scalars)}"
            raise OptionError(saw=saw, needed=needed, do=f"reduce scan[{name!r}] yourself")
        return self[name]

    def _find_statistic(self, name: str) -> Statistic:
        for statistic in self.statistics:
            if statistic.definition.name == name:
                return statistic
        raise unknown_statistic_error(
            name, self.names, do="take one of these, or name it in statistics= when you scan"
        )


def nearest_heads(
    heads: Sequence[tuple[str, int, int]], distances: Tensor, place: int, n: int
) -> list[SimilarHead]:
    """Return the ``n`` of ``heads`` with the least distances, without the one at ``place``."""
    others = distances.index_fill(0, torch.tensor(place), torch.nan)
    nearest = top_heads(("",), others[None], n, lowest=True)
    return [SimilarHead(*heads[entry.head][1:], entry.value) for entry in nearest]


def _mirror_pairs(results: Mapping[int, Tensor], layers: Sequence[LayerScan]) -> dict[int, Tensor]:
    """Return (heads, all heads) of each layer, from (heads, heads of the layers so far)."""
    ends = [0, *accumulate(len(layer.heads) for layer in layers)]
    whole = torch.full((ends[-1], ends[-1]), torch.nan, dtype=torch.float64)
    for index, rows in results.items():
        here = slice(*ends[index : index + 2])
        whole[here, : here.stop] = rows
        whole[: here.stop, here] = rows.T
    return {index: whole[slice(*ends[index : index + 2])] for index in results}


def top_heads(layers: tuple[str, ...], values: Tensor, n: int, *, lowest: bool) -> list[HeadValue]:
    """Return the ``n`` largest of (layers, heads), or the smallest; NaN is left out."""
    count = convert_to_int_or_none(n)
    if count is None or count < 0:
        raise OptionError(
            saw=f"n={describe_value(n)}", needed="a number of heads, from 0", do="n=5"
        )
    flat = values.flatten()
    order = flat.argsort(descending=not lowest, stable=True)
    places = order[~flat[order].isnan()].tolist()[:count]
    ranked = [divmod(place, values.shape[1]) for place in places]
    return [HeadValue(layers[x], x, head, float(values[x, head])) for x, head in ranked]


def make_table_rows_by_head(
    heads: Iterable[tuple[str, int, int]], columns: Mapping[str, Tensor]
) -> list[Row]:
    """Return a row for each head, with its entry of each column (layers, heads)."""
    lists = {name: column.tolist() for name, column in columns.items()}
    rows: list[Row] = []
    for layer, index, head in heads:
        values = {name: column[index][head] for name, column in lists.items()}
        rows.append({"layer": layer, "layer_index": index, "head": head, **values})
    return rows
