"""Data of the viewer in bytes: maps, thumbnails, distances, offsets, top keys and texts.

`viewer/src/contract.ts` describes the blobs to their reader. A weight is stored as a byte, the
rounded 255 times its square root, so a value that is shown is right to 1/255 of the square root.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.scanning.layer import HEAD_DISTANCE, LayerScan, ScannedText
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import (
    MOST_BLOCKS,
    MOST_CELLS,
    OffsetProfile,
    block_size,
    block_sizes,
    coarsen_map,
)
from headwise.scanning.written import WrittenText

MAP, OFFSETS, RECEIVED = "map", "offset_profile", "most_received"
TOP_KEYS = "top_keys_of_every_query"
THUMB = 16  # cells of a thumbnail on each side
NO_DISTANCE = 2**16 - 1  # the step of two heads without a distance; one less is a distance of 1
LAST_OF_ONE_UNIT = 2**16 - 1  # of UTF-16; characters beyond it take two
MANY_TOKENS = 2**16  # keys beyond this number take four bytes instead of two
OFFSET_REACH = OffsetProfile.OFFSETS
MOST_ROWS = 2**18  # heads x queries up to which a page shows all stored keys of all heads
LEAST_IN_CHUNK = 1024  # queries of a blob of top keys
MOST_CHUNKS = 16  # blobs of top keys of a layer
MOST_RECEIVING = 4  # keys in the list of those that receive most

Names = Callable[[int], str]
Array = np.ndarray[Any, np.dtype[Any]]
TopKeyCounts = Sequence[Sequence[int]]  # keys of every query, for each head of each layer


def scan_blobs(
    scan: HeadScan,
    maps: Sequence[Array | None],
    top_keys: TopKeyCounts,
    *,
    name_of: Names | None,
    prefix: str,
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every blob of a scan; `maps` are those of its layers."""
    for index, text in enumerate(scan.texts):
        if has_known_tokens(text) or text.written:
            yield f"{prefix}/text/{index}", json.dumps(text_fields(text, name_of)).encode()
    for index, values in enumerate(maps):
        if values is not None:
            yield f"{prefix}/map/{index}", quantise_square_roots(values)
    thumbs = [
        np.zeros((len(layer.heads), THUMB, THUMB))
        if values is None
        else pool_thumbnails(values, map_axes(scan, layer, values.shape[1:]))
        for values, layer in zip(maps, scan.layer_scans, strict=True)
    ]
    if thumbs:
        yield f"{prefix}/thumbs", b"".join(map(quantise_square_roots, thumbs))
    if HEAD_DISTANCE in scan.measured:
        yield f"{prefix}/distances", _head_distance_steps(scan)
    if OFFSETS in scan.measured:
        yield (
            f"{prefix}/profile",
            b"".join(offset_profile_arrays(layer).tobytes() for layer in scan.layer_scans),
        )
    if RECEIVED in scan.measured:
        rows = scan[RECEIVED]
        received = [
            [most_received_tokens(scan, index, rows[index, head], name_of) for head in layer.heads]
            for index, layer in enumerate(scan.layer_scans)
        ]
        yield f"{prefix}/received", json.dumps(received).encode()
    for index, layer in enumerate(scan.layer_scans):
        for chunk, planes in enumerate(_top_key_chunks(scan, layer, top_keys[index])):
            yield f"{prefix}/top/{index}/{chunk}", planes


def quantise_square_roots(values: Array) -> bytes:
    """Return a byte for each weight: the rounded 255 times its square root; NaN is 0."""
    steps = np.fmax(values, 0)  # fmax takes 0 instead of NaN
    # In place: new memory for each step takes longer than the arithmetic.
    np.sqrt(np.fmin(steps, 1, out=steps), out=steps)
    steps *= 255
    stored: bytes = np.rint(steps, out=steps).astype(np.uint8).tobytes()
    return stored


# ---- maps ----------------------------------------------------------------------------------------


class MapAxis(NamedTuple):
    """One side of a map in blocks of tokens, of which the last may be shorter."""

    blocks: int
    length: int  # tokens
    size: float  # tokens of a block: a mean where blocks are shares of the text

    @property
    def edges(self) -> Array:
        """Begins of the blocks, and the end of the last, as shares of the tokens."""
        edges: Array = np.minimum(np.arange(self.blocks + 1) * self.size / self.length, 1.0)
        return edges

    @property
    def last(self) -> int:
        """Tokens of the last block."""
        return round(self.length - (self.blocks - 1) * self.size)

    @property
    def has_short_end(self) -> bool:
        return self.size == int(self.size) and self.last < self.size

    @property
    def words(self) -> str:
        """The tokens of a block, such as "128, the last of 7"."""
        least, most = math.floor(self.size), math.ceil(self.size)
        number = str(most) if least in (most, 0) else f"{least} to {most}"
        return f"{number}, the last of {self.last}" if self.has_short_end else number


def map_axes(
    scan: HeadScan, layer: LayerScan, shape: Sequence[int]
) -> tuple[MapAxis, MapAxis] | None:
    """Return the queries and the keys of a layer's map of this shape.

    None if places of the map are shares of texts of several lengths, or of unknown texts.
    """
    summary = layer.summaries[MAP]
    if "length" in summary:
        pairs = zip(summary["length"].tolist(), shape, strict=True)
        queries, keys = (MapAxis(n, length, block_size(length, n)) for length, n in pairs)
        return queries, keys
    texts = [sequence_lengths_of_text(scan, text) for text in (layer.query_text, layer.key_text)]
    if any(len(set(lengths)) != 1 for lengths in texts):
        return None
    pairs = zip((lengths[0] for lengths in texts), shape, strict=True)
    queries, keys = (MapAxis(n, length, length / n) for length, n in pairs)
    return queries, keys


def most_blocks_of_page(scan: HeadScan) -> int:
    """Return the most blocks on each side of a map, so that all have at most `MOST_CELLS`.

    A number that was chosen for the scan stays.
    """
    maps = [layer.summaries[MAP] for layer in scan.layer_scans if MAP in layer.summaries]
    sizes = [each["sum"].shape for each in maps if int(each.get("cells", MOST_BLOCKS)) == 0]
    most = MOST_BLOCKS
    while sum(n * min(rows, most) * min(cols, most) for n, rows, cols in sizes) > MOST_CELLS:
        most //= 2
    return most


def head_map_arrays(scan: HeadScan, layer: LayerScan, *, most: int = MOST_BLOCKS) -> Array | None:
    """Return (heads, rows, cols) of the weights of a layer in blocks, NaN for a head without.

    A side has at most ``most`` blocks. A block that no query is in has the weight 0.
    """
    summary = layer.summaries.get(MAP)
    if summary is None:
        return None
    if "length" not in summary:
        return _maps_of_shares(scan, layer, most)
    if not summary["sum"].numel():
        return None
    step = block_size(max(summary["sum"].shape[1:]), most)
    summary = coarsen_map(summary, [size * step for size in block_sizes(summary)])
    maps: Array = (summary["sum"] / summary["count"].clamp(min=1).float()[..., None]).numpy()
    return maps


def _maps_of_shares(scan: HeadScan, layer: LayerScan, most: int) -> Array:
    """Return the map of an earlier version: of a cell for each token, or the finest without gaps.

    A single text of few tokens has a cell for each token. Otherwise each block has a token.
    """
    summary = layer.summaries[MAP]
    cells = summary["count"].shape[-1]
    queries, keys = (
        sequence_lengths_of_text(scan, text) for text in (layer.query_text, layer.key_text)
    )
    if len(queries) == len(keys) == 1 and 0 < max(*queries, *keys) <= min(cells, most):
        total, count = summary["sum"], summary["count"]
        rows, cols = (torch.arange(n) * cells // n for n in (*queries, *keys))
        return (total[:, rows][:, :, cols] / count[:, rows, None]).numpy()
    limit = max(1, min([*queries, *keys, most]))
    size, count = cells, summary["count"]
    while (size > limit or not bool((count > 0).all())) and size % 2 == 0:
        size //= 2
        count = count.unflatten(-1, (size, 2)).sum(-1)
    step = cells // size
    total = summary["sum"].unflatten(1, (size, step)).unflatten(3, (size, step)).sum((2, 4))
    maps: Array = (total / count[..., None]).numpy()
    return maps


def pool_thumbnails(maps: Array, axes: Sequence[MapAxis] | None = None) -> Array:
    """Return (heads, 16, 16): the mean over the queries, the sum over the keys of each cell.

    Without ``axes`` all blocks of a side are equal.
    """
    equal = [np.linspace(0, 1, size + 1) for size in maps.shape[1:]]
    rows, cols = equal if axes is None else [axis.edges for axis in axes]
    mean = THUMB * _block_overlap(rows)
    spread = (_block_overlap(cols) / np.diff(cols)).T
    pooled: Array = mean @ np.fmax(maps, 0) @ spread  # fmax takes 0 instead of NaN
    return pooled


def _block_overlap(others: Array) -> Array:
    """Return (16, blocks): the share of the axis that a cell and a block have in common."""
    edges = np.linspace(0, 1, THUMB + 1)
    low = np.maximum(edges[:-1, None], others[None, :-1])
    high = np.minimum(edges[1:, None], others[None, 1:])
    common: Array = np.clip(high - low, 0, None)
    return common


def _head_distance_steps(scan: HeadScan) -> bytes:
    """Return two bytes for each pair of heads: a row for each head with those before it.

    A step is 1/65534, to which the distance is rounded; one above 0 has at least the step 1.
    """
    values, layers = scan[HEAD_DISTANCE], enumerate(scan.layer_scans)
    whole = torch.cat([values[index, list(layer.heads)] for index, layer in layers]).numpy()
    pairs = whole[np.tril_indices(len(whole), -1)]
    steps = np.fmax(np.rint(pairs * (NO_DISTANCE - 1)), pairs > 0)
    return np.where(np.isnan(pairs), NO_DISTANCE, steps).astype("<u2").tobytes()


# ---- offsets, and what receives most -------------------------------------------------------------


def offset_profile_arrays(layer: LayerScan) -> Array:
    """Return float32 (heads, offsets + 1): the last entry is the weight inside all offsets."""
    summary = layer.summaries.get(OFFSETS)
    if summary is None:
        return np.full((len(layer.heads), 2 * OFFSET_REACH + 2), np.nan, "<f4")
    # Every query has a key at offset 0, its own.
    inside = summary["sum"].sum(-1) / summary["count"][:, OFFSET_REACH]
    values = torch.cat([summary["sum"] / summary["count"], inside[:, None]], 1)
    return values.numpy().astype("<f4")


def offset_weights(layer: LayerScan, head: int) -> tuple[list[tuple[int, float]], float]:
    """Return (offset, weight) of each offset that has a weight, and the weight outside of them."""
    *weights, inside = offset_profile_arrays(layer)[layer.heads.index(head)].tolist()
    pairs = [(place - OFFSET_REACH, x) for place, x in enumerate(weights) if x == x]
    return pairs, max(0.0, 1 - inside)


def most_received_tokens(
    scan: HeadScan, layer: int, rows: Tensor, name_of: Names | None
) -> list[tuple[int, str, float]]:
    """Return (key, its word, the weight that it receives) of a head, the most first."""
    number = scan.layer_scans[layer].key_text
    text = None if number is None else scan.texts[number]
    received = []
    for key, token, weight in rows[:MOST_RECEIVING].tolist():
        if weight > 0:
            if text is not None and len(text.lengths) == scan.sequences == 1:
                word = text.word(0, int(key), name_of)
            else:  # which sequence the key is of is unknown
                word = name_of(int(token)) if name_of is not None and token >= 0 else ""
            received.append((int(key), word, weight))
    return received


# ---- texts and single tokens ---------------------------------------------------------------------


def text_fields(text: ScannedText, name_of: Names | None) -> dict[str, Any]:
    """Return the words of the tokens of a text, and its sequences as they were written."""
    words: list[str] = []
    places: list[int] = []
    if has_known_tokens(text):
        ids, inverse = torch.unique(text.ids, return_inverse=True)
        words = [str(token) if name_of is None else name_of(token) for token in ids.tolist()]
        places = inverse.tolist()
    fields: dict[str, Any] = {"words": words, "ids": places}
    if text.written:
        fields["written"] = [written and _written_fields(written) for written in text.written]
    return fields


def _written_fields(written: WrittenText) -> dict[str, Any]:
    """Return a text with two numbers for each token, in units of UTF-16, as scripts count.

    How far it begins after the last character before it, and how long it is; both are 0 for a
    token without characters.
    """
    codes = np.frombuffer(written.text.encode("utf-32-le", "surrogatepass"), "<u4")
    place = np.concatenate([[0], np.cumsum(1 + (codes > LAST_OF_ONE_UNIT))])
    first, end = place[written.spans.numpy()].T
    is_drawn = end > first
    reached = np.maximum.accumulate(np.where(is_drawn, end, 0))
    before = np.concatenate([[0], reached])[:-1]
    gaps = np.where(is_drawn, first - before, 0)
    return {"text": written.text, "spans": np.stack([gaps, end - first], 1).ravel().tolist()}


def has_known_tokens(text: ScannedText) -> bool:
    return bool((text.ids >= 0).all()) and len(text.ids) > 0


def sequence_lengths_of_text(scan: HeadScan, text: int | None) -> tuple[int, ...]:
    return () if text is None else scan.texts[text].lengths


def count_top_keys(scan: HeadScan, standouts: Collection[tuple[int, int]] | None) -> TopKeyCounts:
    """Return how many keys of every query a page shows, for each head of each layer.

    A scan may have keys of all heads in more than `MOST_ROWS` rows. Then a head (layer, head) that
    is not in ``standouts`` shows its first key alone; None shows all keys.
    """
    lengths = [sequence_lengths_of_text(scan, layer.query_text) for layer in scan.layer_scans]
    counts = [[0] * len(layer.heads) for layer in scan.layer_scans]
    for index, (layer, kept) in enumerate(zip(scan.layer_scans, lengths, strict=True)):
        summary = layer.summaries.get(TOP_KEYS)
        if summary and kept and tuple(summary["lengths"].tolist()[: len(kept)]) == kept:
            ranks = summary["key"].shape[-1]
            counts[index] = [ranks if row >= 0 else 0 for row in summary["row"].tolist()]
    sizes = map(sum, lengths)
    rows = sum(len(each) * size for each, size in zip(counts, sizes, strict=True))
    has_all = all(count for each in counts for count in each)
    if standouts is None or not has_all or rows <= MOST_ROWS:
        return counts
    return [
        [
            count if (index, head) in standouts else 1
            for head, count in zip(layer.heads, counts[index], strict=True)
        ]
        for index, layer in enumerate(scan.layer_scans)
    ]


def queries_of_chunk(queries: int) -> int:
    return max(LEAST_IN_CHUNK, -(-queries // MOST_CHUNKS))


def _top_key_chunks(scan: HeadScan, layer: LayerScan, counts: Sequence[int]) -> Iterator[bytes]:
    """Yield the top keys of a layer, some queries at a time.

    A chunk holds planes: the low bytes of the keys, their higher bytes, the shares. A plane has a
    row of queries for the first key of each head that has one, then for each second key.
    """
    if not any(counts):
        return
    summary = layer.summaries[TOP_KEYS]
    stored = list(zip(summary["row"].tolist(), counts, strict=True))
    rows = [(row, rank) for rank in range(max(counts)) for row, count in stored if rank < count]
    row, rank = torch.tensor(rows).T
    queries = sum(sequence_lengths_of_text(scan, layer.query_text))
    longest = max(sequence_lengths_of_text(scan, layer.key_text), default=0)
    planes, step = 4 if longest > MANY_TOKENS else 2, queries_of_chunk(queries)
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        key = summary["key"][row, part, rank].clamp(min=0).numpy().astype("<u4")
        by_byte = key.reshape(-1, 1).view(np.uint8)[:, :planes]
        share = summary["share"][row, part, rank].numpy()
        yield np.ascontiguousarray(by_byte.T).tobytes() + quantise_square_roots(share)
