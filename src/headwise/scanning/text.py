"""The tokens that a scan read, kept so that a page can show the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.scanning.call import CapturedCall

MOST_TOKENS = 2**18  # of all texts of a scan together


class ScannedText(NamedTuple):
    """Named tuple: the tokens of the sequences that one part of a model read, without padding.

    An encoder-decoder model reads two texts.

    Attributes:
        ids: (tokens,) in int32, one sequence after another; below 0 where a token is unknown.
        lengths: number of tokens of each sequence.
    """

    ids: Tensor
    lengths: tuple[int, ...]


def concatenate_texts_by_number(
    texts: Sequence[tuple[ScannedText, ...]],
) -> tuple[ScannedText, ...]:
    """Return the texts of several scans of a model, one after another, up to `MOST_TOKENS`."""
    if len({len(each) for each in texts}) != 1:
        return ()
    merged = [_TextBuffer() for _ in texts[0]]
    room = MOST_TOKENS
    for each in texts:
        for text, target in zip(each, merged, strict=True):
            start = 0
            for length in text.lengths:
                room -= target.add_sequence_and_count_tokens(
                    text.ids[start : start + length], room=room
                )
                start += length
    return tuple(text.to_scanned_text for text in merged)


class _TextBuffer:
    """The sequences of a text so far, up to the first that there was no room for."""

    def __init__(self) -> None:
        self.sequences: list[Tensor] = []
        self.is_cut = False

    def add_sequence_and_count_tokens(self, ids: Tensor, *, room: int) -> int:
        """Add a sequence if there is room, and return the number of tokens that were added."""
        self.is_cut = self.is_cut or len(ids) > room
        if self.is_cut:
            return 0
        self.sequences.append(ids.to("cpu", torch.int32))
        return len(ids)

    @property
    def to_scanned_text(self) -> ScannedText:
        ids = torch.cat(self.sequences) if self.sequences else torch.zeros(0, dtype=torch.int32)
        return ScannedText(ids, tuple(map(len, self.sequences)))


class TextRecorder:
    """Records the texts of a running model from its attention calls.

    The keys of a call are one text. A further call of the same input with the same tokens reads
    the same text, another call reads another one.
    """

    def __init__(self) -> None:
        self._texts: list[_TextBuffer] = []
        self._now: list[list[Tensor]] = []  # the sequences of each text, of this input
        self._room = MOST_TOKENS
        self._last_queries: int | None = None

    def begin_input(self) -> None:
        """Start another input, with other sequences."""
        self._now, self._last_queries = [], None

    def record(self, call: CapturedCall) -> tuple[int | None, int | None]:
        """Record the text of a call, and return the number of its queries' text and keys' text.

        None stands for an unknown text: that of queries that continue a cache, or that attend to
        the output of another model.
        """
        if call.own_key not in (0, None):
            return None, None
        keys = self._find_or_add_text(_token_sequences(call))
        if call.own_key == 0 and not call.is_cross:
            self._last_queries = keys
            return keys, keys
        lengths = call.real_queries.sum(-1).tolist()
        queries = self._last_queries
        is_known = queries is not None and [len(ids) for ids in self._now[queries]] == lengths
        return (queries if is_known else None), keys

    def _find_or_add_text(self, sequences: list[Tensor]) -> int:
        for number, known in enumerate(self._now):
            if _sequences_are_equal(known, sequences):
                return number
        number = len(self._now)
        self._now.append(sequences)
        if number == len(self._texts):
            self._texts.append(_TextBuffer())
        for ids in sequences:
            self._room -= self._texts[number].add_sequence_and_count_tokens(ids, room=self._room)
        return number

    @property
    def texts(self) -> tuple[ScannedText, ...]:
        """The texts so far."""
        return tuple(text.to_scanned_text for text in self._texts)


def _token_sequences(call: CapturedCall) -> list[Tensor]:
    tokens, real = call.tokens, call.real_keys
    if tokens is None:
        tokens = torch.full(real.shape, -1, device=real.device)
    return [ids[chosen] for ids, chosen in zip(tokens, real, strict=True)]


def _sequences_are_equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    first, second = list(a), list(b)
    return len(first) == len(second) and all(map(torch.equal, first, second))
