"""The text as it was written, with the characters of each token."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.support.text import describe_value

EXAMPLE = "written=(text, encoded.offset_mapping[0])"


@dataclass(frozen=True, eq=False)
class WrittenText:
    """Text of one sequence as it was written, with the characters of each token.

    Attributes:
        text: the text that the tokenizer read, in its own case, with its accents and line breaks.
        spans: (tokens, 2) in int32: the first character of each token, and the one after its last.
            Both are equal for a token without characters, such as a special one. Tokens may share
            a character, such as the bytes of an emoji. Given as pairs or as a tensor, such as the
            ``offset_mapping`` of a fast tokenizer of transformers.

    Raises:
        OptionError: no text, or spans that lie outside of it or go back in it.
    """

    text: str
    spans: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise _written_error(describe_value(self.text), "the text of a sequence")
        spans = torch.as_tensor(self.spans)
        if not spans.numel():
            spans = torch.zeros(0, 2, dtype=torch.int32)
        if spans.dim() != 2 or spans.shape[1] != 2 or spans.is_floating_point():
            saw = f"spans of shape {tuple(spans.shape)} in {spans.dtype}"
            raise _written_error(saw, "a pair of whole numbers for each token: (tokens, 2)")
        object.__setattr__(self, "spans", spans.to("cpu", torch.int32, copy=True))
        if (fault := span_fault(self.text, self.spans)) is not None:
            raise _written_error(fault, "spans in the order of the text, counted in characters")

    def __repr__(self) -> str:
        return f"WrittenText({len(self.text):,} characters, {len(self.spans):,} tokens)"

    def word(self, token: int) -> str:
        """Return the characters of a token; empty for one without."""
        first, end = self.spans[token].tolist()
        return self.text[first:end]

    def of_tokens(self, kept: Tensor) -> WrittenText | None:
        """Return the text of the tokens that are kept; None if the spans fit neither number.

        Args:
            kept: (positions,) of bool: False at padding, for which there may be spans or not.
        """
        count = int(kept.sum())
        if len(self.spans) != count and len(self.spans) != len(kept):
            return None
        spans = self.spans if len(self.spans) == count else self.spans[kept.cpu()]
        end = int(spans.max()) if len(spans) else 0
        # What is left of a text that was cut has not been read.
        rest = self.text[end:]
        is_cut = any(unicodedata.category(character)[0] not in "ZC" for character in rest)
        return WrittenText(self.text[:end] if is_cut else self.text, spans)

    def one_later(self) -> WrittenText:
        """Return the text of tokens that are one place later, after a token without characters."""
        return WrittenText(
            self.text, torch.cat([torch.zeros_like(self.spans[:1]), self.spans])[:-1]
        )


GivenText = WrittenText | tuple[str, Any]  # or a text and its spans


def span_fault(text: str, spans: Tensor) -> str | None:
    """Return what is wrong with the spans of a text, or None."""
    starts, ends = spans.long().unbind(1)
    outside = ((starts < 0) | (ends < starts) | (ends > len(text))).nonzero().flatten().tolist()
    if outside:
        span = tuple(spans[outside[0]].tolist())
        return f"token {outside[0]} with span {span} in a text of {len(text):,} characters"
    drawn = (ends > starts).nonzero().flatten()  # tokens without characters have any place
    back = (starts[drawn].diff() < 0).nonzero().flatten().tolist()
    if back:
        before, token = drawn[back[0] : back[0] + 2].tolist()
        begins = f"begins at {int(starts[token])}, token {before} at {int(starts[before])}"
        return f"spans that go back: token {token} {begins}"
    return None


def list_written(
    written: Sequence[GivenText | None] | GivenText | None,
) -> list[WrittenText | None]:
    """Return the texts of ``scan(written=)``, one for each sequence; an empty list for None."""
    if written is None:
        return []
    is_one = isinstance(written, WrittenText) or _is_pair(written)
    values: Any = [written] if is_one else written
    if isinstance(written, str) or not isinstance(values, Sequence):
        raise _written_error(describe_value(written), "a text with its spans for each sequence")
    texts: list[WrittenText | None] = []
    for value in values:
        is_made = value is None or isinstance(value, WrittenText)
        if not is_made and not _is_pair(value):
            raise _written_error(describe_value(value), "a WrittenText, or a text and its spans")
        texts.append(value if is_made else WrittenText(*value))
    return texts


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _written_error(saw: str, needed: str) -> OptionError:
    return OptionError(saw=f"written= with {saw}", needed=needed, do=EXAMPLE)
