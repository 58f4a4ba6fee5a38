"""The text as it was written: from tokenizers, through scans and files, to the page's data."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import AttentionMatrix
from headwise import scan as scan_model
from headwise.checkpoints.transformers import StoredTokenizer
from headwise.errors import OptionError
from headwise.models import tiny
from headwise.reports.blobs import text_fields
from headwise.reports.page import viewer_data
from headwise.reports.report import ScanReport
from headwise.scanning import (
    HeadScan,
    WrittenText,
    merge_parts,
    open_model,
    plan_scan,
    read_texts,
    scan_part,
)
from headwise.scanning.layer import ScannedText, TextRecorder
from tests.scanning.edited import Edit, edit, fields_in
from tests.scanning.models import bert, t5
from tests.scanning.written_texts import KINDS, TEXTS, tokenizer_of

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
ENTROPY: dict[str, Any] = {"statistics": "entropy"}


def same(one: WrittenText | None, two: WrittenText | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.text == two.text and torch.equal(one.spans, two.spans)


def written_of(scan: HeadScan) -> list[WrittenText | None]:
    (text,) = scan.texts
    return list(text.written)


# ---- the value -----------------------------------------------------------------------------------


def test_a_token_is_its_characters() -> None:
    written = WrittenText("Élan 🐇", [(0, 0), (0, 4), (4, 6), (5, 6)])  # type: ignore[arg-type]
    assert [written.word(token) for token in range(4)] == ["", "Élan", " 🐇", "🐇"]
    assert repr(written) == "WrittenText(6 characters, 4 tokens)"
    assert written.spans.dtype == torch.int32
    assert WrittenText("", []).spans.shape == (0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "spans", "saw"),
    [
        (7, [], "written= with 7"),
        ("abc", [0, 1], r"spans of shape \(2,\) in torch.int64"),
        ("abc", [(0.0, 1.0)], r"spans of shape \(1, 2\) in torch.float32"),
        ("abc", [(0, 1), (1, 4)], r"token 1 with span \(1, 4\) in a text of 3 characters"),
        ("né", [(0, 3)], r"token 0 with span \(0, 3\) in a text of 2 characters"),
        ("abc", [(2, 1)], r"token 0 with span \(2, 1\)"),
        ("abc", [(1, 2), (0, 0), (0, 1)], "token 2 begins at 0, token 0 at 1"),
    ],
)
def test_spans_that_are_none_are_refused(text: Any, spans: Any, saw: str) -> None:
    with pytest.raises(OptionError, match=saw):
        WrittenText(text, spans)


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_spans_are_those_of_the_ids(kind: str, name: str) -> None:
    tokenizer, text = StoredTokenizer(tokenizer_of(kind)), TEXTS[name]
    spans = tokenizer.spans(text, None)
    assert spans is not None
    assert len(spans) == len(tokenizer.ids(text))
    written = WrittenText(text, torch.tensor(spans))
    # Every character but blanks and what a normaliser drops belongs to a token.
    read = {place for first, end in spans for place in range(first, end)}
    left = {text[place] for place in range(len(text)) if place not in read}
    assert all(not character.isalnum() for character in left)
    special = {*tokenizer.specials} - {tokenizer_of(kind).unk_token_id}
    for token, number in enumerate(tokenizer.ids(text)):
        assert (written.word(token) == "") == (number in special)
    cut = tokenizer.spans(text, 5)
    assert cut is not None
    assert len(cut) == 5


def test_a_tokenizer_without_spans_has_none() -> None:
    class Slow:
        is_fast = False
        bos_token_id = cls_token_id = sep_token_id = unk_token_id = None
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 3

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1] * len(text)

    assert StoredTokenizer(Slow()).spans("abc", None) is None


@pytest.mark.parametrize("text", TEXTS.values())
def test_bytes_of_the_small_model_have_their_characters(text: str) -> None:
    written = WrittenText(text, tiny.spans(text))
    assert len(written.spans) == len(tiny.encode(text))
    characters = [written.word(token) for token in range(1, len(written.spans))]
    assert [c.encode()[n] for n, c in _bytes_by_place(characters)] == tiny.encode(text)[1:].tolist()
    assert written.word(0) == ""


def _bytes_by_place(characters: list[str]) -> list[tuple[int, str]]:
    places, at = [], 0
    while at < len(characters):
        size = len(characters[at].encode())
        places += [(n, characters[at]) for n in range(size)]
        at += size
    return places


# ---- scans ---------------------------------------------------------------------------------------


def batch(kind: str = "word-piece", *, side: str = "right") -> tuple[dict[str, Any], list[Any]]:
    tokenizer, texts = tokenizer_of(kind), [TEXTS["accents"], TEXTS["emoji"]]
    options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    offsets = encoded.pop("offset_mapping")
    inputs = {"input_ids": encoded["input_ids"] % 97, "attention_mask": encoded["attention_mask"]}
    return inputs, list(zip(texts, offsets, strict=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_scan_keeps_the_texts_without_padding(side: str) -> None:
    inputs, written = batch(side=side)
    scan = scan_model(bert(), inputs, written=written, **ENTROPY)
    (text,) = scan.texts
    for number, (whole, offsets) in enumerate(written):
        kept = text.written[number]
        assert kept is not None
        assert kept.text == whole
        assert (
            len(kept.spans) == text.lengths[number] == int(inputs["attention_mask"][number].sum())
        )
        assert torch.equal(kept.spans.long(), offsets[inputs["attention_mask"][number].bool()])


@pytest.mark.parametrize(
    ("text", "spans", "kept"),
    [
        ("ab  cd ef", [(0, 2), (4, 6), (0, 0)], "ab  cd"),
        ("ab  cd ef", [(0, 2), (4, 9)], "ab  cd ef"),
        ("ab \u200b\n", [(0, 2)], "ab \u200b\n"),
        ("ab", [], ""),
    ],
)
def test_a_text_that_was_cut_ends_with_its_last_token(text: str, spans: Any, kept: str) -> None:
    written = WrittenText(text, spans).of_tokens(torch.ones(len(spans), dtype=torch.bool))
    assert written is not None
    assert written.text == kept
    assert written.spans.tolist() == [list(span) for span in spans]


def test_a_decoder_that_reads_the_same_tokens_later_has_the_text_later() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    text = ("abcd", [(0, 1), (1, 2), (2, 3), (3, 4)])
    later = torch.tensor([[0, 5, 6, 7]])
    scan = scan_model(t5(), {"input_ids": ids, "decoder_input_ids": later}, written=text, **ENTROPY)
    encoder, decoder = scan.texts
    assert same(encoder.written[0], WrittenText(*text))  # type: ignore[arg-type]
    assert decoder.written[0] is not None
    assert decoder.written[0].spans.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    other = torch.tensor([[0, 6, 5, 7]])
    scan = scan_model(t5(), {"input_ids": ids, "decoder_input_ids": other}, written=text, **ENTROPY)
    assert scan.texts[1].written == ()


def test_an_attention_matrix_has_a_text_without_ids() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 7)
    spans = [(n, n + 1) for n in range(5)]
    scan = scan_model(AttentionMatrix(q, k), v, written=("größe", spans), **ENTROPY)
    assert (scan.texts[0].ids < 0).all()
    assert same(written_of(scan)[0], WrittenText("größe", torch.tensor(spans)))


@pytest.mark.parametrize(
    ("written", "saw"),
    [
        ("text", "written= with 'text'"),
        ([("text", [(0, 4)]), "text"], "written= with 'text'"),
        (("ab", [(0, 1)]), "1 text, whose numbers of tokens are 1"),
        ([("ab", [(0, 1)] * 3), ("c", [(0, 1)])], "2 texts, whose numbers of tokens are 3, 1"),
    ],
)
def test_texts_that_are_none_of_the_sequences_are_refused(written: Any, saw: str) -> None:
    with pytest.raises(OptionError, match=saw):
        scan_model(tiny.load(), tiny.encode("ab")[None], written=written, **ENTROPY)


def test_several_inputs_and_an_unknown_text() -> None:
    inputs = [tiny.encode(text)[None] for text in ("ab", "cde")]
    second = WrittenText("cde", tiny.spans("cde"))
    scan = scan_model(tiny.load(), inputs, written=[None, second], **ENTROPY)
    kept = written_of(scan)
    assert kept[0] is None
    assert same(kept[1], second)


def test_texts_merge_and_come_back_from_a_file(tmp_path: Path) -> None:
    inputs, written = batch()
    whole = scan_model(bert(), inputs, written=written, **ENTROPY)
    bare = scan_model(bert(), inputs, **ENTROPY)
    assert bare.texts[0].written == ()
    merged = whole.merge(bare, whole)
    expected = [*written_of(whole), None, None, *written_of(whole)]
    loaded = HeadScan.load(merged.save(tmp_path / "scan.safetensors"))
    for scan in (merged, loaded):
        assert all(map(same, written_of(scan), expected))
        assert len(written_of(scan)) == 6
    assert HeadScan.load(bare.save(tmp_path / "bare")).texts[0].written == ()


def test_a_text_of_any_characters_comes_back(tmp_path: Path) -> None:
    text = "\ud83d\x00\u202e \U0001f407"
    scan = scan_model(
        tiny.load(), tiny.encode("ab")[None], written=(text, [(0, 1), (1, 3), (3, 5)])
    )
    assert same(*written_of(scan), *written_of(HeadScan.load(scan.save(tmp_path / "a"))))
    meta, blobs = viewer_data(ScanReport.of(scan))
    fields = json.loads(zlib.decompress(blobs["0/text/0"]))
    assert fields["written"] == [{"text": text, "spans": [0, 1, 0, 2, 0, 3]}]
    assert meta["scans"][0]["texts"][0]["lengths"] == [3]


def test_a_file_of_format_2_has_no_written_texts(tmp_path: Path) -> None:
    path = scan_model(tiny.load(), tiny.encode("ab")[None], **ENTROPY).save(tmp_path / "a")
    edit(path, lambda about, _: about.update(version=2))
    assert HeadScan.load(path).texts[0].written == ()
    assert fields_in(path)["version"] == 2


EDITS: dict[str, Edit] = {
    "its tokens": lambda _, tensors: tensors.pop("texts/0/sizes"),
    "its tokens ": lambda _, tensors: tensors.update({"texts/0/spans": torch.zeros(2, 2).int()}),
    "its tokens  ": lambda _, tensors: tensors["texts/0/sizes"].add_(1),
    "no text in UTF-8": lambda _, tensors: tensors["texts/0/characters"].fill_(255),
    "has token 1 with span": lambda _, tensors: tensors["texts/0/spans"].add_(2),
}


@pytest.mark.parametrize("fault", EDITS)
def test_an_edited_text_is_refused(tmp_path: Path, fault: str) -> None:
    written = ("ab", tiny.spans("ab"))
    scan = scan_model(tiny.load(), tiny.encode("ab")[None], written=written, **ENTROPY)
    path = scan.save(tmp_path / "a")
    edit(path, EDITS[fault])
    with pytest.raises(OptionError, match=fault.strip()):
        HeadScan.load(path)


def test_a_corpus_keeps_the_texts(tmp_path: Path) -> None:
    model, texts = open_model(), {"a": "Ärger, \n  mit Tabs", "b": "Émile 🐇"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    read = read_texts(model, [tmp_path])
    scan_part(model, read, tmp_path / "out", statistics="entropy")
    for text, name in zip(written_of(merge_parts(tmp_path / "out")), texts, strict=True):
        assert same(text, WrittenText(texts[name], tiny.spans(texts[name])))
    # Other characters of the same tokens are another document.
    other = [
        each.written and WrittenText(each.written.text.lower(), each.written.spans) for each in read
    ]
    for each, changed in zip(read, other, strict=True):
        object.__setattr__(each, "written", changed)
    with pytest.raises(OptionError, match=r"made from other content of 'a\.txt'"):
        scan_part(model, read, tmp_path / "out", statistics="entropy")


@pytest.mark.slow
def test_a_planned_scan_keeps_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text := "Grüße, 🐇!", "utf-8")
    model = open_model()
    plan = plan_scan(model, read_texts(model, [tmp_path / "a.txt"]), statistics=["entropy"])
    scan = plan.scan_text(plan.texts[0])
    assert same(written_of(scan)[0], WrittenText(text, tiny.spans(text)))


# ---- the data of the page ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_page_has_the_spans_in_units_of_utf_16(kind: str, name: str) -> None:
    text = TEXTS[name]
    spans = StoredTokenizer(tokenizer_of(kind)).spans(text, None)
    assert spans is not None
    ids = torch.arange(3, 3 + len(spans))[None] % 90
    scan = scan_model(bert(), {"input_ids": ids}, written=(text, spans), **ENTROPY)
    _, blobs = viewer_data(ScanReport.of(scan))
    (fields,) = json.loads(zlib.decompress(blobs["0/text/0"]))["written"]
    assert fields["text"] == text
    units, at = text.encode("utf-16-le"), 0
    for (first, end), gap, size in zip(
        spans, fields["spans"][::2], fields["spans"][1::2], strict=True
    ):
        begin = at + gap
        drawn = units[2 * begin : 2 * (begin + size)].decode("utf-16-le")
        assert drawn == text[first:end]
        at = max(at, begin + size)


@pytest.mark.parametrize(
    ("spans", "stored"),
    [
        ([(0, 2), (0, 0), (3, 5)], [0, 2, 0, 0, 1, 2]),
        ([(0, 5), (1, 2), (6, 7)], [0, 5, -4, 1, 1, 1]),
        ([(1, 3), (2, 4), (9, 9)], [1, 2, -1, 2, 0, 0]),
    ],
)
def test_a_span_begins_after_the_last_character_before_it(spans: Any, stored: list[int]) -> None:
    text = ScannedText(torch.arange(3).int(), (3,), (WrittenText("ab cd efgh", spans),))
    (fields,) = text_fields(text, None)["written"]
    assert fields["spans"] == stored


def test_inputs_of_a_function_keep_their_own_texts() -> None:
    """Its last call is complete before the next input begins."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    inputs = [tuple(torch.randn(3, 1, 2, 4, 7)) for _ in range(3)]
    spans = torch.arange(4)[:, None] + torch.arange(2)
    written = [WrittenText(text, spans) for text in ("abcd", "efgh", "ijkl")]
    scan = scan_model(attend, inputs, written=written, **ENTROPY)
    assert [text and text.text for text in written_of(scan)] == ["abcd", "efgh", "ijkl"]
    assert scan.texts[0].lengths == (4, 4, 4)


def test_a_recorder_names_the_lengths_that_it_read() -> None:
    recorder = TextRecorder([WrittenText("a", torch.tensor([[0, 1]]))])
    with pytest.raises(OptionError, match="1 text, whose numbers of tokens are 1"):
        recorder.require_written_texts_read()
