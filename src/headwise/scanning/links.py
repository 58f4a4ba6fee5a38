"""Links of a token in every head: what it looks at, and what looks at it."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.layer import LayerScan, ScannedText, ScanReadings
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from headwise.support.tensors import convert_to_int_or_none
from headwise.support.text import describe_count, describe_value

Direction = Literal["keys", "queries"]
Bound = Literal["exact", "at least", "at most"]
LEAST = 0.05  # weight of a link that a page opens with
PARTS = 0.9  # of tokens that are a letter each: of bytes, no words
SIGHT = 400  # characters between two words that a page can show together, in about ten lines
# Words that say little of what a head looks for; pronouns are none of them.
_LITTLE = (
    "a an the of to in on at by for from with into as and or but nor so if that this than then is "
    "are was were be been am do does did has have had will would can could shall should may might "
    "must not no"
)
FUNCTION_WORDS = frozenset(_LITTLE.split())
BLANKS = " \u0120\u2581"  # before a word, as vocabularies write it
MARKS = f"{BLANKS}.,;:!?"
SPECIAL = re.compile(r"\[.*\]$|<.*>$")  # names of tokens such as [SEP] and <s>
MAP, TOP_KEYS = Map.definition.name, TopKeysOfEveryQuery.definition.name


@dataclass(frozen=True, kw_only=True)
class Link:
    """The weight of one query on one key in one head.

    Attributes:
        layer: name of the layer.
        layer_index: row of the layer in the scan, from 0.
        head: number of the head in its layer, from 0.
        query: the token that looks, counted in its sequence.
        key: the token that is looked at, counted in its sequence.
        word: text of the token that was searched; empty if it is unknown. Of a pair, that of the
            key.
        weight: share of the query's weight, 0 to 1.
        bound: "exact" if the weight is that of the scan. "at most" if the pair is not among the
            stored keys: its weight is at most this. "at least" if another query, of which not all
            keys are stored, may give more to the key.
    """

    layer: str
    layer_index: int
    head: int
    query: int
    key: int
    word: str
    weight: float
    bound: Bound


class TokenWeights(NamedTuple):
    """The weights of one token in one head, the largest first.

    Attributes:
        pairs: the other token, counted in its sequence, and the weight, which is above 0.
        ranks: the number of keys that are stored of each query; None if every weight is known.
    """

    pairs: list[tuple[int, float]]
    ranks: int | None


class _HeadLink(NamedTuple):
    """A link of the head at a position of its layer."""

    position: int
    query: int
    key: int
    weight: float
    bound: Bound = "exact"


def find_links(
    scan: ScanReadings,
    token: int,
    key: int | None,
    *,
    direction: Direction,
    sequence: int,
    text: int,
    name_of: Callable[[int], str] | None,
) -> list[Link]:
    """Return a link of each head, as `HeadScan.links` says."""
    _require_direction(direction)
    if key is not None and direction == "queries":
        saw = 'a pair of tokens, and direction="queries"'
        needed = "the query, then the key"
        raise OptionError(saw=saw, needed=needed, do=f"links({key}, {token})")
    reading = [layer for layer in scan.layer_scans if text == _text_of(layer, direction)]
    _require_token(scan, text, sequence, token, name="token")
    for layer in reading:
        if key is not None and layer.key_text is not None:
            _require_token(scan, layer.key_text, sequence, key, name="key")
    links: list[Link] = []
    are_known = False
    for index, layer in enumerate(scan.layer_scans):
        weights = _read_weights(scan, layer, sequence) if layer in reading else None
        are_known |= weights is not None
        for link in () if weights is None else weights.find(token, key, direction):
            number = layer.key_text if direction == "keys" else layer.query_text
            assert number is not None
            other = link.key if direction == "keys" else link.query
            links.append(
                Link(
                    layer=layer.name,
                    layer_index=index,
                    head=layer.heads[link.position],
                    query=link.query,
                    key=link.key,
                    word=scan.texts[number].word(sequence, other, name_of),
                    weight=link.weight,
                    bound=link.bound,
                )
            )
    if not are_known:
        has_several = len(scan.texts) > 1
        raise _not_stored_error(f" of the layers{f' that read text {text}' if has_several else ''}")
    return sorted(links, key=lambda link: (link.bound == "at most", -link.weight))


def find_strongest_link(
    scan: ScanReadings, name_of: Callable[[int], str] | None
) -> tuple[int, int, int] | None:
    """Return (layer, head, query) of the strongest link of two words of the first sequence.

    A link is trivial, and left out, from or to a token that is no whole word of its own, such as a
    special one, a piece of a word, a letter or one of `FUNCTION_WORDS`; to the first token, to the
    own one and to those beside it. Links in `SIGHT` come first, since a page can show both of their
    words. None where no link is left, or where two are the strongest.
    """
    words = [_Words.of(text, name_of) for text in scan.texts]
    longest = max((len(text.places) for text in words), default=0)
    for sight in (SIGHT, None):
        links: list[tuple[float, int, int, int]] = []
        for index, layer in enumerate(scan.layer_scans):
            if layer.query_text is None or layer.key_text is None:
                continue
            if (weights := _read_weights(scan, layer, 0)) is not None:
                queries, keys = words[layer.query_text], words[layer.key_text]
                for link in weights.strongest(partial(_is_worth, queries, keys, sight)):
                    links.append((link.weight, index, layer.heads[link.position], link.query))
        links.sort(reverse=True)
        if links and links[0][0] >= LEAST:
            # A sum over n keys, by halves, is right to log2 n steps of float32.
            rounding = math.log2(max(2, longest)) * torch.finfo(torch.float32).eps
            is_tie = len(links) > 1 and links[0][0] - links[1][0] <= rounding
            return None if is_tie else links[0][1:]
    return None


class _Words(NamedTuple):
    """The tokens of the first sequence of a text."""

    are_words: Tensor  # (tokens,) of bool, False for the first token
    places: Tensor  # (tokens,): the characters before each

    @classmethod
    def of(cls, text: ScannedText, name_of: Callable[[int], str] | None) -> _Words:
        """Return the tokens of a text, by their characters or their names."""
        words = [text.word(0, token, name_of) for token in range(sum(text.lengths[:1]))]
        letters = sum(len(word) == 1 and word.isascii() for word in words)
        are_parts, are_whole = letters > PARTS * len(words), _find_whole_words(text, words)
        are_words = [
            not are_parts
            and place > 0
            and whole
            and not SPECIAL.match(word.strip())
            and _is_content(word.strip())
            for place, (word, whole) in enumerate(zip(words, are_whole, strict=True))
        ]
        lengths = torch.tensor([len(word) for word in words], dtype=torch.int64)
        return cls(torch.tensor(are_words, dtype=torch.bool), lengths.cumsum(0) - lengths)


def _is_content(word: str) -> bool:
    """True of a word of two letters or more, or of one that stands for a word, as in Chinese."""
    letters = [x for x in word if x.isalnum()]
    is_long = len(letters) > 1 or any(unicodedata.category(x) == "Lo" for x in letters)
    return is_long and word.lower().strip(MARKS) not in FUNCTION_WORDS


def _find_whole_words(text: ScannedText, words: list[str]) -> list[bool]:
    """Return for each token whether letters neither precede nor follow it in the written text.

    Without that text, a token is a piece if its name or that of the next one goes on with a word:
    ``##`` in WordPiece, no blank before it where other names have one.
    """
    written = text.written[0] if text.written else None
    if written is not None:
        letters = [x.isalnum() for x in written.text]
        ends = [False, *letters, False]
        return [not (ends[first] or ends[end + 1]) for first, end in written.spans.tolist()]
    has_blanks = any(word[:1] in BLANKS for word in words if word)
    goes_on = [
        word.startswith("##") or (has_blanks and word[:1].isalnum()) for word in [*words, ""]
    ]
    return [not (goes_on[at] or goes_on[at + 1]) for at in range(len(words))]


def _is_worth(
    queries: _Words, keys: _Words, sight: int | None, query: Tensor, key: Tensor
) -> Tensor:
    """Return where a query and a key are words that are apart, and in sight of each other."""
    chosen = queries.are_words[query] & keys.are_words[key]
    if queries is keys:
        chosen &= (query - key).abs() > 1
        if sight is not None:
            chosen &= (queries.places[query] - keys.places[key]).abs() <= sight
    return chosen


def find_answer(
    scan: ScanReadings,
    layer_index: int,
    head: int,
    token: int,
    *,
    direction: Direction,
    sequence: int,
) -> TokenWeights:
    """Return the weights of a token in one head: all from a map of one token a cell, or the stored.

    Raises:
        OptionError: a direction, a token or a sequence that the scan does not have, or a head
            without single tokens.
    """
    _require_direction(direction)
    layer = scan.layer_scans[layer_index]
    text = _text_of(layer, direction)
    answer = None
    if text is not None:
        _require_token(scan, text, sequence, token, name="token")
        weights = _read_weights(scan, layer, sequence)
        answer = weights and weights.read(layer.heads.index(head), token, direction)
    if answer is None:
        raise _not_stored_error(f" of layer {layer_index}, head {head}")
    return answer


def _sort_answer(pairs: Iterable[tuple[int, float]], ranks: int | None) -> TokenWeights:
    real = [(token, weight) for token, weight in pairs if weight > 0]
    return TokenWeights(sorted(real, key=lambda pair: -pair[1]), ranks)


def _require_direction(direction: str) -> None:
    if direction not in ("keys", "queries"):
        saw = f"direction={describe_value(direction)}"
        needed = '"keys" or "queries"'
        raise OptionError(saw=saw, needed=needed, do='direction="keys"')


def _text_of(layer: LayerScan, direction: Direction) -> int | None:
    """Return the text of the token that is given."""
    both = None in (layer.query_text, layer.key_text)
    return None if both else layer.query_text if direction == "keys" else layer.key_text


def _require_token(scan: ScanReadings, text: int, sequence: int, token: int, *, name: str) -> None:
    """Raise OptionError if a sequence has no such token."""
    numbers = {"text": (text, len(scan.texts))}
    if convert_to_int_or_none(text) is not None and 0 <= text < len(scan.texts):
        lengths = scan.texts[text].lengths
        numbers["sequence"] = (sequence, len(lengths))
        if convert_to_int_or_none(sequence) is not None and 0 <= sequence < len(lengths):
            numbers[name] = (token, lengths[sequence])
    for which, (number, count) in numbers.items():
        if convert_to_int_or_none(number) is None or not 0 <= number < count:
            saw = f"{which}={describe_value(number)}"
            are = f"{'is' if count == 1 else 'are'} "
            are += describe_count(count, "token" if which == "key" else which)
            needed = f"a number from 0 to {count - 1:,}: there {are}"
            raise OptionError(saw=saw, needed=needed, do=f"{which}=0")


def _not_stored_error(of_what: str) -> OptionError:
    return OptionError(
        saw=f"no single tokens{of_what}: no top keys, and no map of one token a cell",
        needed="the keys with the largest weights of every query",
        do="from headwise.scanning import TopKeysOfEveryQuery, then headwise.scan(model, inputs, "
        'statistics=["standard", TopKeysOfEveryQuery()])',
    )


# ---- the weights of a sequence that a layer holds ------------------------------------------------


def _read_weights(
    scan: ScanReadings, layer: LayerScan, sequence: int
) -> _AllWeights | _LargestWeights | None:
    """Return the weights of a sequence: all from a map, or the largest; None without either."""
    assert layer.query_text is not None
    assert layer.key_text is not None
    queries, keys = (scan.texts[text].lengths for text in (layer.query_text, layer.key_text))
    statistic = next((each for each in scan.statistics if each.definition.name == MAP), None)
    if scan.sequences == 1 and statistic is not None and MAP in layer.summaries:
        values = statistic.result(layer.summaries[MAP])
        runs = {*layer.summaries[MAP]["count"].flatten().tolist()} - {0}  # of each query
        if values.shape[1:] == (*queries, *keys) and len(runs) < 2:
            return _AllWeights(values)
    summary = layer.summaries.get(TOP_KEYS)
    if summary is None or tuple(summary["lengths"].tolist()[: len(queries)]) != queries:
        return None
    part = slice(first := sum(queries[:sequence]), first + queries[sequence])
    heads = [place for place, row in enumerate(summary["row"].tolist()) if row >= 0]
    rows = summary["row"][heads]
    share, key = (summary[name][:, part][rows] for name in ("share", "key"))
    return _LargestWeights(heads, key.long(), share.double())


class _AllWeights(NamedTuple):
    """Every weight of a sequence: (heads, queries, keys)."""

    values: Tensor

    def read(self, position: int, token: int, direction: Direction) -> TokenWeights:
        """Return the answer of the head at a position of its layer."""
        values = self.values[position]
        row = values[token] if direction == "keys" else values[:, token]
        return _sort_answer(enumerate(row.tolist()), ranks=None)

    def find(self, token: int, key: int | None, direction: Direction) -> Iterator[_HeadLink]:
        """Yield the link of each head whose weights are numbers, and are not all 0."""
        for position, values in enumerate(self.values):
            row = values[token] if direction == "keys" else values[:, token]
            other = int(row.nan_to_num(-1).argmax()) if key is None else key
            weight = float(row[other])
            if weight > 0 or (weight == 0 and key is not None):
                query, looked_at = (token, other) if direction == "keys" else (other, token)
                yield _HeadLink(position, query, looked_at, weight)

    def strongest(self, is_chosen: Callable[[Tensor, Tensor], Tensor]) -> Iterator[_HeadLink]:
        """Yield the two strongest of the chosen links."""
        queries, keys = (torch.arange(length) for length in self.values.shape[1:])
        left = self.values.nan_to_num(0) * is_chosen(queries[:, None], keys)
        for position, query, key, weight in _two_largest(left):
            yield _HeadLink(position, query, key, weight)


class _LargestWeights(NamedTuple):
    """The largest weights of every query of a sequence, with their keys: (heads, queries, ranks).

    A rank without a key has the key and the weight −1.
    """

    heads: list[int]  # positions in the layer
    key: Tensor
    share: Tensor

    def read(self, position: int, token: int, direction: Direction) -> TokenWeights | None:
        """Return the answer of the head at a position of its layer; None if it has no keys."""
        if position not in self.heads:
            return None
        nth = self.heads.index(position)
        keys, shares = self.key[nth], self.share[nth]
        ranks = shares.shape[-1]
        if direction == "keys":
            return _sort_answer(
                zip(keys[token].tolist(), shares[token].tolist(), strict=True), ranks
            )
        given = shares.masked_fill(keys != token, 0).amax(-1)
        return _sort_answer(enumerate(given.tolist()), ranks)

    def find(self, token: int, key: int | None, direction: Direction) -> Iterator[_HeadLink]:
        """Yield the link of each head that has one among the stored keys, or a bound of a pair."""
        # What is not stored has at most the smallest stored weight, and what the stored ones leave
        # up to their rounding; 0 where a rank has no key.
        rounding = self.share.shape[-1] * torch.finfo(torch.float32).eps
        left = (1 - self.share.clamp(min=0).sum(-1)).clamp(min=0) + rounding
        most = torch.minimum(self.share[..., -1].clamp(min=0), left)  # (heads, queries)
        for nth, position in enumerate(self.heads):
            keys, shares, rest = self.key[nth], self.share[nth], most[nth]
            if direction == "queries":  # the query that gives most to the key
                given = shares.masked_fill(keys != token, 0).amax(-1)
                query = int(given.argmax())
                if (weight := float(given[query])) > 0:
                    others = rest.masked_fill(given > 0, 0)
                    bound: Bound = "exact" if weight >= float(others.max()) else "at least"
                    yield _HeadLink(position, query, token, weight, bound)
            elif key is None:
                if shares[token, 0] > 0:
                    yield _HeadLink(position, token, int(keys[token, 0]), float(shares[token, 0]))
            else:
                stored = shares[token][keys[token] == key]
                if len(stored):
                    yield _HeadLink(position, token, key, float(stored[0]))
                else:
                    limit = float(rest[token])
                    yield _HeadLink(position, token, key, limit, "at most" if limit else "exact")

    def strongest(self, is_chosen: Callable[[Tensor, Tensor], Tensor]) -> Iterator[_HeadLink]:
        """Yield the two strongest of the chosen links."""
        key = self.key.clamp(min=0)
        queries = torch.arange(key.shape[1])[:, None]
        for nth, query, rank, weight in _two_largest(self.share * is_chosen(queries, key)):
            yield _HeadLink(self.heads[nth], query, int(key[nth, query, rank]), weight)


def _two_largest(values: Tensor) -> Iterator[tuple[int, int, int, float]]:
    """Yield the places and the values of the two largest that are above 0, of three axes."""
    flat = values.flatten()
    largest, places = flat.topk(min(2, len(flat)))
    for value, place in zip(largest.tolist(), places, strict=True):
        if value > 0:
            first, second, third = (int(x) for x in torch.unravel_index(place, values.shape))
            yield first, second, third, value
