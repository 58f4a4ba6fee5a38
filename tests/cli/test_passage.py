"""What a scan reads: the very tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.scanning import source as passage
from headwise.scanning.source import ModelToScan, make_model_title


def letters(vocabulary: int = 40, **changes: object) -> ModelToScan:
    """A is token 0; 26 begins a text and is special."""
    plain = ModelToScan(
        title="letters",
        model=torch.nn.Linear(2, 3),
        inputs=lambda ids: (ids,),
        vocabulary=vocabulary,
        positions=30,
        begin=26,
        separators={".": 27},
        specials=(26,),
        encode=lambda text, most: [26, *(ord(c) - 65 for c in text)][:most],
        name_of=lambda token: chr(token + 65),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_text_is_cut_and_says_so() -> None:
    found = passage.tokenize_text(letters(), "ABCDE", 3, name="a.txt")
    assert found.ids.tolist() == [[26, 0, 1]]
    assert found.description == "a.txt, the first 3 of 6 tokens"
    assert (
        passage.tokenize_text(letters(), "ABCDE", None, name="a.txt").description
        == "a.txt, all 6 tokens"
    )


def test_how_much_is_read_where_nothing_is_said() -> None:
    assert passage.largest_text_length(letters(), None, default=512) == 30
    assert passage.largest_text_length(letters(positions=None), None, default=512) == 512
    assert passage.largest_text_length(letters(usual=9), None, default=512) == 9
    assert passage.largest_text_length(letters(usual=9), 20, default=512) == 20


@pytest.mark.parametrize("length", [6, 11, 30])
def test_repeats_stand_exactly_twice(length: int) -> None:
    ids = passage.make_repeated_tokens(letters(), length).ids[0].tolist()
    half = (length - 1) // 2
    assert ids[0] == 26
    assert ids[1 : 1 + half] == ids[1 + half :]
    assert len({*ids[1:]}) == half  # none twice within a half
    assert 26 not in ids[1:]


def test_repeats_without_a_begin_and_with_few_tokens() -> None:
    ids = (
        passage.make_repeated_tokens(letters(vocabulary=3, begin=None, specials=(1,)), 12)
        .ids[0]
        .tolist()
    )
    assert ids[:6] == ids[6:]
    assert {*ids} == {0, 2}


def test_a_begin_outside_of_the_vocabulary_is_left_out() -> None:
    ids = passage.make_repeated_tokens(letters(begin=50256), 12).ids[0].tolist()
    assert ids[:6] == ids[6:]


def test_repeats_are_the_same_every_time() -> None:
    once, again = (passage.make_repeated_tokens(letters(), 30).ids for _ in range(2))
    assert torch.equal(once, again)


def test_tokens_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text("[1, 2,\n 3]\n", "utf-8")
    assert passage.read_stored_tokens(letters(), path, None).ids.tolist() == [[1, 2, 3]]
    assert passage.read_stored_tokens(letters(), path, 2).ids.tolist() == [[1, 2]]


def test_the_files_of_a_folder_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "in/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = passage.list_text_files([tmp_path, tmp_path / "c.md"])
    assert [path.name for path in found] == ["a.txt", "b.txt", "d.txt", "c.md"]


def test_titles(tmp_path: Path) -> None:
    for place, title in (
        ("small-bert", "small-bert"),
        ("package/model", "package/model"),
        ("models--owner--name/snapshots/0123abcd", "owner/name"),
    ):
        assert make_model_title(tmp_path / place) == title


def test_many_special_tokens_are_not_all_named() -> None:
    said = letters(specials=tuple(range(9))).separators_and_specials_in_words
    assert said.startswith("Separators: “.”. Special tokens: “A”, “B”")
    assert said.endswith("“F” and 3 more.")
