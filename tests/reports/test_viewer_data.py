"""The data of the viewer's page: sizes, hostile texts, and values within their quantisation."""

import base64
import gzip
import json
import re
import string
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise import AttentionMatrix, Mask, scan
from headwise.errors import OptionError
from headwise.reports.blobs import THUMB, count_top_keys, head_map_arrays, pool_thumbnails
from headwise.reports.changed import changed_heads, describe_total_change
from headwise.reports.images import ALPHABET, encode_base85
from headwise.reports.page import (
    read_viewer_asset,
    render_diff,
    render_scan_page,
    render_static,
    save_scan_page,
    standout_cards,
    viewer_data,
)
from headwise.reports.report import NO_CHANGE, ScanReport
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.quick import others_slow
from tests.reports.html import Tree, everything
from tests.reports.viewer_scans import (
    HOSTILE,
    RANKS,
    WORDS,
    gpt2_sized,
    incompressible,
    large,
    turned,
    viewer_report,
    viewer_scan,
)
from tests.scanning.models import BATCH, HEADS, LENGTH, SOURCE, t5, tokens
from tests.scanning.scans import changed

FILES = Path(__file__).parents[1] / "scanning" / "files"
QUERIES = 23  # no other axis has this length


def blobs_of(report: ScanReport) -> tuple[dict[str, Any], dict[str, bytes]]:
    meta, deflated = viewer_data(report)
    return meta, {name: zlib.decompress(blob) for name, blob in deflated.items()}


def weights(stored: bytes) -> np.ndarray[Any, Any]:
    return (np.frombuffer(stored, np.uint8) / 255.0) ** 2


def real_scan(length: int = QUERIES, **options: Any) -> tuple[HeadScan, torch.Tensor]:
    """A scan of a small matrix, and its dense weights."""
    generator = torch.Generator().manual_seed(1)
    q, k = (3 * torch.randn(1, HEADS, length, 7, generator=generator) for _ in range(2))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    wanted = ["standard", Map(**options), TopKeysOfEveryQuery(ranks=RANKS)]
    return scan(matrix, torch.zeros_like(q), statistics=wanted), matrix.dense()[0].double()


# ---- values --------------------------------------------------------------------------------------


def test_a_short_text_has_a_cell_for_each_token() -> None:
    read, dense = real_scan()
    meta, blobs = blobs_of(ScanReport.of(read))
    assert meta["scans"][0]["layers"][0]["map"] == [QUERIES, QUERIES]
    shown = weights(blobs["0/map/0"]).reshape(HEADS, QUERIES, QUERIES)
    # The stated quantisation: half a step of 1/255 in the square root.
    assert np.abs(np.sqrt(shown) - dense.sqrt().numpy()).max() <= 0.5 / 255 + 1e-6


def test_blocks_are_those_of_the_pooled_matrix() -> None:
    # 92 tokens in blocks of eight, the last of four.
    read, dense = real_scan(length=4 * QUERIES, cells=16)
    meta, blobs = blobs_of(ScanReport.of(read))
    layer = meta["scans"][0]["layers"][0]
    assert (layer["map"], layer["map_length"]) == ([12, 12], [92, 92])
    member = (torch.arange(4 * QUERIES)[:, None] // 8 == torch.arange(12)).double()
    pooled = torch.einsum("hqk,qr,kc->hrc", dense, member, member) / member.sum(0)[:, None]
    shown = weights(blobs["0/map/0"]).reshape(HEADS, 12, 12)
    assert np.abs(np.sqrt(shown) - pooled.sqrt().numpy()).max() <= 0.5 / 255 + 1e-6


def test_top_keys_are_those_of_the_matrix() -> None:
    read, dense = real_scan()
    meta, blobs = blobs_of(ScanReport.of(read))
    assert meta["scans"][0]["layers"][0]["top"] == [RANKS] * HEADS
    assert meta["scans"][0]["ranks"] == RANKS
    share, key = (x.permute(2, 0, 1).numpy() for x in dense.topk(RANKS))
    planes = np.frombuffer(blobs["0/top/0/0"], np.uint8).reshape(3, RANKS, HEADS, QUERIES)
    stored = weights(planes[2].tobytes()).reshape(RANKS, HEADS, QUERIES)
    assert np.abs(np.sqrt(stored) - np.sqrt(share)).max() <= 0.5 / 255 + 1e-6
    keys = planes[0].astype(int) + 256 * planes[1].astype(int)
    assert (keys == key)[stored > 0].all()


def test_heads_that_stand_out_keep_more_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row of a chunk is the first key of each head, then the second of those that stand out."""
    monkeypatch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
    monkeypatch.setattr("headwise.reports.blobs.LEAST_IN_CHUNK", 9)
    report = viewer_report(viewer_scan(layers=2, heads=3, length=QUERIES, top=3))
    standouts = {(s.head.layer_index, s.head.head) for s in report.scan.standouts()}
    meta, blobs = blobs_of(report)
    layers = meta["scans"][0]["layers"]
    counts = [layer["top"] for layer in layers]
    expected = [[RANKS if (n, head) in standouts else 1 for head in range(3)] for n in range(2)]
    assert counts == expected
    assert {1, RANKS} == set(counts[1])
    assert [layer["chunk"] for layer in layers] == [9, 9]
    for index, layer in enumerate(report.scan.layer_scans):
        summary = layer.summaries["top_keys_of_every_query"]
        rows = [(n, rank) for rank in range(RANKS) for n in range(3) if rank < counts[index][n]]
        for chunk, queries in enumerate((range(9), range(9, 18), range(18, QUERIES))):
            planes = np.frombuffer(blobs[f"0/top/{index}/{chunk}"], np.uint8)
            planes = planes.reshape(3, len(rows), len(queries))
            for row, (head, rank) in enumerate(rows):
                key = summary["key"][head, queries, rank].clamp(min=0).numpy()
                share = summary["share"][head, queries, rank].clamp(min=0).numpy()
                assert (planes[0, row].astype(int) + 256 * planes[1, row].astype(int) == key).all()
                shown = planes[2, row] / 255
                assert np.abs(shown - np.sqrt(share)).max() <= 0.5 / 255 + 1e-6
    whole, _ = blobs_of(replace(report, top_keys="all"))
    assert [layer["top"] for layer in whole["scans"][0]["layers"]] == [[RANKS] * 3] * 2
    saved, _ = data_in(report.scan.save_page(tmp_path / "all.html", top_keys="all").read_text())
    assert [layer["top"] for layer in saved["scans"][0]["layers"]] == [[RANKS] * 3] * 2
    with pytest.raises(OptionError, match="top_keys='some'"):
        report.scan.save_page(tmp_path / "some.html", top_keys="some")  # type: ignore[arg-type]
    few = viewer_report(viewer_scan(layers=2, heads=3, length=QUERIES, top=2))
    assert [layer["top"] for layer in blobs_of(few)[0]["scans"][0]["layers"]] == [[4, 4, 0]] * 2


def test_heads_that_keep_more_keys_are_known_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
    read = viewer_scan(layers=1, heads=3, length=QUERIES, top=3)
    some = changed(read, heads=(4, 0, 2), num_heads=5)
    assert count_top_keys(some, {(0, 4), (0, 1)}) == [[RANKS, 1, 1]]


@pytest.mark.parametrize("length", others_slow([65_536, 65_537], 65_537))
def test_keys_of_a_long_text_take_more_bytes(length: int) -> None:
    report = viewer_report(viewer_scan(layers=1, heads=2, length=length))
    _, blobs = blobs_of(report)
    planes, chunk = 2 if length == 65_536 else 4, 4096 if length == 65_536 else 4097
    stored = np.frombuffer(blobs["0/top/0/1"], np.uint8).reshape(planes + 1, RANKS, chunk)
    keys = sum(stored[plane].astype(np.int64) << (8 * plane) for plane in range(planes))
    key = report.scan.layer_scans[0].summaries["top_keys_of_every_query"]["key"][0]
    assert (keys == key[chunk : 2 * chunk].T.clamp(min=0).numpy()).all()


def test_offsets_end_with_the_weight_inside_of_them() -> None:
    read, dense = real_scan(length=4 * QUERIES)
    _, blobs = blobs_of(ScanReport.of(read))
    profile = np.frombuffer(blobs["0/profile"], "<f4").reshape(HEADS, 34)
    near = torch.arange(4 * QUERIES)
    inside = dense * ((near[:, None] - near).abs() <= 16)
    assert np.allclose(profile[:, -1], inside.sum((1, 2)) / (4 * QUERIES), atol=1e-6)


@pytest.mark.parametrize("cells", [5, 16, 40])
def test_thumbnails_keep_the_weight_of_a_row(cells: int) -> None:
    maps = np.random.default_rng(0).dirichlet([0.3] * cells, (HEADS, cells))
    pooled = pool_thumbnails(maps)
    assert pooled.shape == (HEADS, THUMB, THUMB)
    assert np.allclose(pooled.sum(-1), 1)
    if cells == THUMB:
        assert np.allclose(pooled, maps)


def test_a_shorter_last_block_has_its_part_of_a_thumbnail() -> None:
    # 80 tokens in blocks of 32, the last of 16; a cell of a thumbnail has five tokens.
    read, dense = real_scan(length=80, cells=4)
    _, blobs = blobs_of(ScanReport.of(read))
    member = (torch.arange(80)[:, None] // 32 == torch.arange(3)).double()
    even = member / member.sum(0)
    # Each weight is spread evenly over the tokens of its blocks.
    spread = torch.einsum("hqk,qr,kc,ir,jc->hij", dense, even, member, member, even)
    cells = spread.unflatten(1, (THUMB, 5)).mean(2).unflatten(2, (THUMB, 5)).sum(3)
    shown = weights(blobs["0/thumbs"]).reshape(HEADS, THUMB, THUMB)
    assert np.abs(np.sqrt(shown) - cells.sqrt().numpy()).max() <= 0.5 / 255 + 1e-6


# ---- what a scan may lack ------------------------------------------------------------------------


def test_a_head_without_numbers_has_no_map() -> None:
    read = viewer_scan()
    summary = read.layer_scans[0].summaries["map"]
    summary["sum"][2] = torch.nan
    read.layer_scans[0].summaries["entropy"]["sum"][2] = torch.nan
    meta, blobs = blobs_of(viewer_report(read))
    layer = meta["scans"][0]["layers"][0]
    assert layer["blank"] == [2]
    entropy = next(s for s in meta["scans"][0]["statistics"] if s["name"] == "entropy")
    assert [value is None for value in entropy["rows"][0]] == [False, False, True, False, False]
    assert len(blobs["0/map/0"]) == 5 * layer["map"][0] * layer["map"][1]


def test_cross_attention_has_two_texts() -> None:
    inputs = {"input_ids": tokens(BATCH, SOURCE), "decoder_input_ids": tokens(BATCH, LENGTH)}
    read = scan(t5(), inputs, statistics=["map", TopKeysOfEveryQuery()])
    meta, blobs = blobs_of(ScanReport.of(read))
    texts = meta["scans"][0]["texts"]
    assert [text["lengths"] for text in texts] == [[SOURCE] * BATCH, [LENGTH] * BATCH]
    cross = [layer for layer in meta["scans"][0]["layers"] if layer["kind"] == "cross"]
    assert {(layer["query_text"], layer["key_text"]) for layer in cross} == {(1, 0)}
    assert all(layer["map"] == layer["map_length"] == [LENGTH, SOURCE] for layer in cross)
    index = meta["scans"][0]["layers"].index(cross[0])
    assert len(blobs[f"0/top/{index}/0"]) == 3 * BATCH * LENGTH * 4 * HEADS


def test_what_receives_most_has_the_word_of_its_text() -> None:
    inputs = {"input_ids": tokens(1, SOURCE), "decoder_input_ids": tokens(1, LENGTH)}
    read = scan(t5(), inputs, statistics=["most_received"])
    _, blobs = blobs_of(ScanReport.of(read, name_of=str))
    for layer, heads in zip(read.layer_scans, json.loads(blobs["0/received"]), strict=True):
        assert layer.key_text is not None
        ids = read.texts[layer.key_text].ids.tolist()
        rows = [row for head in heads for row in head]
        assert len(rows) == HEADS * 4
        assert [word for _, word, _ in rows] == [str(ids[key]) for key, _, _ in rows]


@pytest.mark.usefixtures("shapes_unchecked")
def test_words_are_as_written_where_that_is_known() -> None:
    """In the data of the viewer, in the form without script and in figures; else the names."""
    text = "Élan, 🐇 und Größe"
    spans = [(0, 0), (0, 4), (4, 5), (6, 7), (8, 11), (12, 17)]
    q, k, v = torch.randn(3, 1, HEADS, len(spans), 7, generator=torch.Generator().manual_seed(2))
    read = scan(AttentionMatrix(q, k), v, statistics=["standard"], written=(text, spans))
    words = {text[first:end] for first, end in spans if end > first}
    _, blobs = blobs_of(ScanReport.of(read))
    rows = [row for head in json.loads(blobs["0/received"])[0] for row in head]
    assert {word for _, word, _ in rows} - {""} <= words
    assert all(word == text[slice(*spans[key])] for key, word, _ in rows)
    shown = render_static(ScanReport.of(read))
    cards = standout_cards(ScanReport.of(read))
    assert cards
    assert all(
        f"<code>{word}</code>" in shown for card in cards for word, *_ in card.received if word
    )
    named = [ScanReport.of(read, name_of=lambda token: "[CLS]"), ScanReport.of(read)]
    firsts = [json.loads(blobs_of(report)[1]["0/text/0"])["words"] for report in named]
    assert firsts == [[], []]  # an attention matrix has no token ids


def test_an_old_scan_has_no_texts() -> None:
    report = ScanReport.of(HeadScan.load(FILES / "format_1.safetensors"))
    meta, blobs = blobs_of(report)
    assert meta["scans"][0]["texts"] == []
    assert all(layer["query_text"] is None for layer in meta["scans"][0]["layers"])
    assert not [name for name in blobs if "/text/" in name]
    assert render_scan_page(report)


def test_other_scans_are_pages_too() -> None:
    read = viewer_scan(layers=1, heads=1, length=1, top=1)
    assert blobs_of(viewer_report(read))[0]["scans"][0]["layers"][0]["map"] == [1, 1]
    empty = replace(read, layer_scans=(), texts=())
    assert render_scan_page(viewer_report(empty))
    assert head_map_arrays(read, replace(read.layer_scans[0], summaries={})) is None


def test_two_scans_and_their_matched_heads() -> None:
    before = viewer_scan()
    order = torch.tensor([1, 2, 0, 4, 3])
    after = turned(before, order)
    report = viewer_report(before, second=after, names=("here", "there"), match=True)
    meta, blobs = blobs_of(report)
    assert [each["name"] for each in meta["scans"]] == ["here", "there"]
    assert meta["matched"] == [order.argsort().tolist()] * 3  # of each head of the first scan
    assert meta["changes"] == []
    total = next(x for x in meta["scans"][0]["statistics"] if x["is_change"])
    assert torch.tensor(total["rows"]).abs().max() < 1e-6
    moved = viewer_scan()
    moved.layer_scans[1].summaries["entropy"]["sum"][4] += 2.0
    meta, blobs = blobs_of(viewer_report(moved, second=after, match=True))
    total = next(x for x in meta["scans"][0]["statistics"] if x["is_change"])
    assert int(torch.tensor(total["rows"]).argmax()) == 5 + 4
    assert blobs_of(viewer_report(before, second=after))[0]["matched"] is None
    assert {name.split("/")[0] for name in blobs} == {"0", "1"}


def test_what_changed_is_told_alike_everywhere() -> None:
    before, after = viewer_scan(), viewer_scan()
    after.layer_scans[1].summaries["induction"]["sum"][2] = 0.12
    after.layer_scans[2].summaries["entropy"]["sum"][4] += 1.5
    report = viewer_report(before, second=after, names=("early", "late"))
    meta, _ = blobs_of(report)
    sentences = [change.sentence for change in before.diff(after).changes(names=("early", "late"))]
    assert sentences[0] == "induction of layer 1, head 2: 92 % in early, 12 % in late"
    assert len(sentences) == 2
    # A card a head, the largest total change first.
    cards = {(x["layer"], x["head"]): (x["statistic"], x["sentence"]) for x in meta["changes"]}
    apart = before.diff(after).apart
    assert [*cards] == sorted(cards, key=lambda head: -float(apart[head])) == [(1, 2), (2, 4)]
    assert cards[1, 2] == ("induction", "induction 92 % to 12 %")
    values = (float(each["entropy"][2, 4]) for each in (before, after))
    assert cards[2, 4] == ("entropy", "entropy {:.2f} nats to {:.2f} nats".format(*values))
    assert "of 15 heads changed by more than 1" in meta["headline"]
    record = report.as_json()
    assert record["compared"] == {"first": "early", "second": "late"}
    assert [row["sentence"] for row in record["changes"]] == sentences
    assert record["changes"][0]["first"] == pytest.approx(0.92)
    assert record["changes"][0]["second"] == pytest.approx(0.12)
    static = Tree(render_scan_page(report)).root.all("main")[0].text
    printed = " ".join(str(before.diff(after)).split())
    for sentence in sentences:
        assert sentence in static
        assert sentence.replace(" in early", " before").replace(" in late", " after") in printed


def test_first_is_the_scan_before_and_a_change_is_after_less_before() -> None:
    before, after = viewer_scan(), viewer_scan()
    for each, share in ((before, 0.25), (after, 0.75)):
        induction = each.layer_scans[1].summaries["induction"]
        induction["sum"][2], induction["count"][2] = share, 1
    report = viewer_report(before, second=after, names=("early", "late"))
    assert report.diff is not None
    assert float(report.diff["induction"][1, 2]) == 0.5
    change = report.as_json()["changes"][0]
    assert (change["first"], change["second"]) == (0.25, 0.75)
    assert change["sentence"] == "induction of layer 1, head 2: 25 % in early, 75 % in late"
    meta, _ = blobs_of(report)
    assert [scan["name"] for scan in meta["scans"]] == ["early", "late"]
    induction = [
        next(x for x in scan["statistics"] if x["name"] == "induction") for scan in meta["scans"]
    ]
    assert [each["rows"][1][2] for each in induction] == [0.25, 0.75]
    assert meta["changes"][0]["sentence"] == "induction 25 % to 75 %"
    page = render_diff(before.diff(after), names=("early", "late"))
    stored, _ = data_in(page)
    assert [scan["name"] for scan in stored["scans"]] == ["early", "late"]
    assert stored["changes"] == meta["changes"]


def changed_width(*, to: float, missing: bool = False) -> tuple[HeadScan, HeadScan]:
    """Scans of which head 1.2 attends to another number of keys, and 0.3 to slightly more."""
    before, after = viewer_scan(), viewer_scan()
    for each, keys in ((before, 12.0), (after, to)):
        width = each.layer_scans[1].summaries["effective_keys"]
        width["sum"][2], width["count"][2] = keys, 1
    after.layer_scans[0].summaries["induction"]["sum"][3] += 0.01
    if missing:
        after.layer_scans[1].summaries["entropy"]["sum"][2] = torch.nan
    return before, after


@pytest.mark.parametrize(
    ("to", "says"),
    [
        (640.0, "now attends evenly: 12 to 640 keys"),
        (200.0, "now attends to more keys: 12 to 200 keys"),
        (2.0, "now attends to fewer keys: 12 to 2.0 keys"),
    ],
)
@pytest.mark.parametrize("missing", [False, True])
def test_each_changed_head_has_one_card(to: float, says: str, missing: bool) -> None:
    """A value that one scan lacks leads neither the cards nor the changes."""
    before, after = changed_width(to=to, missing=missing)
    diff = before.diff(after)
    cards = changed_heads(diff, n=8, names=("A", "B"))
    assert [(x.before.layer_index, x.before.head) for x in cards] == [(1, 2), (0, 3)]
    assert cards[0].sentence == says
    sentences = [change.sentence for change in diff.changes()]
    assert ["no value" in each for each in sentences] == [False] * (len(sentences) - missing) + (
        [True] * missing
    )


def test_the_headline_counts_the_heads_that_changed() -> None:
    before, after = changed_width(to=640.0)
    diff = before.diff(after)
    least, most = sorted(diff.apart.flatten().tolist())[-2:]
    assert most > 1 > least > 0
    words = describe_total_change(diff)
    assert words.startswith("1 of 15 heads changed by more than 1; the rest by at most ")
    assert least <= float(words.split()[-1]) < 1.1 * least
    assert describe_total_change(before.diff(before)) == NO_CHANGE
    small = viewer_scan()
    small.layer_scans[0].summaries["induction"]["sum"][3] += 0.001
    assert describe_total_change(viewer_scan().diff(small)).startswith("None of 15 heads")


def test_each_of_two_scans_has_its_words() -> None:
    scan = viewer_scan()
    report = viewer_report(scan, second=scan, second_name_of=lambda token: f"w{token}")
    _, blobs = blobs_of(report)
    first, second = (json.loads(blobs[f"{n}/text/0"])["words"] for n in (0, 1))
    assert first[:3] == list(WORDS[:3])
    assert second[:3] == ["w0", "w1", "w2"]


def test_the_total_change_is_the_distance_of_python() -> None:
    before, after = viewer_scan(), viewer_scan()
    after.layer_scans[1].summaries["induction"]["sum"][2] = 0.12
    meta, _ = blobs_of(viewer_report(before, second=after))
    first, second = ({each["name"]: each for each in scan["statistics"]} for scan in meta["scans"])
    assert "apart" not in second
    assert [x["name"] for x in meta["scans"][0]["statistics"] if x["is_change"]] == ["apart"]
    rows = before.diff(after).apart
    assert torch.allclose(torch.tensor(first["apart"]["rows"]), rows.float(), rtol=1e-5)
    assert first["apart"]["rows"][1][2] > 0
    assert first["apart"]["high"] == max(0.1, float(rows.max()))
    # Both scans are drawn on one scale.
    for name, each in second.items():
        assert (each["low"], each["high"]) == (first[name]["low"], first[name]["high"])


# ---- the page ------------------------------------------------------------------------------------


def from_base85(text: str) -> bytes:
    """Read with Python's own alphabet, which has other characters in the same order of digits."""
    theirs = (
        string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
    )
    return base64.b85decode(text.translate(str.maketrans(ALPHABET, theirs)))


@pytest.mark.parametrize("size", range(9))
def test_bytes_as_text(size: int) -> None:
    for content in (bytes(size), b"\xff" * size, bytes(range(250, 250 - size, -1))):
        assert from_base85(encode_base85(content)) == content
    assert not set(ALPHABET) & set("<>&\"'\\`/-")


def data_in(page: str) -> tuple[Any, dict[str, str]]:
    root = Tree(page).root
    (meta,) = (e for e in everything(root) if e.attributes.get("id") == "headwise-meta")
    blobs = {
        e.attributes["data-blob"]: e.text for e in root.all("script") if "data-blob" in e.attributes
    }
    return json.loads(meta.text), blobs


def test_the_page_holds_the_data_and_a_policy() -> None:
    report = viewer_report(viewer_scan())
    page = render_scan_page(report)
    meta, blobs = data_in(page)
    expected_meta, expected = viewer_data(report)
    assert meta == json.loads(json.dumps(expected_meta))
    assert {name: from_base85(text) for name, text in blobs.items()} == expected
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; img-src data:; style-src 'sha256-[\w+/=]+'"
        r"; script-src 'sha256-[\w+/=]+'",
        policy[1],
    )
    outside_of_data = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\sstyle=|\son\w+=", outside_of_data)


def test_several_reports_are_one_page() -> None:
    page = render_scan_page(
        viewer_report(viewer_scan(), title="one"), viewer_report(viewer_scan(top=0))
    )
    meta, blobs = data_in(page)
    assert [report["title"] for report in meta["reports"]] == ["one", "made-up"]
    assert "0:0/map/0" in blobs
    assert "1:0/map/2" in blobs
    assert [h.text for h in Tree(page).root.all("h1")] == [
        "What 15 attention heads of one attend to",
        "What 15 attention heads of made-up attend to",
    ]


def test_hostile_words_stay_words() -> None:
    words = (*HOSTILE, *WORDS)
    page = render_scan_page(viewer_report(viewer_scan(words=words), words=words, title=HOSTILE[1]))
    assert page.count("<script") == page.count("</script>")
    data = page.partition('id="headwise-meta">')[2].partition("</script>")[0]
    assert not set(data) & set("<>&")  # as in `</script x` and `<!-- <script`, which need no >
    assert 'onerror="' not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    meta, blobs = data_in(page)
    assert meta["title"] == HOSTILE[1]
    text = json.loads(zlib.decompress(from_base85(blobs["0/text/0"])))
    assert [text["words"][n] for n in text["ids"][: len(words)]] == list(words)


def test_a_page_is_written_as_a_whole(tmp_path: Path) -> None:
    report = viewer_report(viewer_scan())
    written = save_scan_page(tmp_path / "new" / "page.html", report)
    assert written.read_text("utf-8") == render_scan_page(report)


@pytest.mark.slow
def test_sizes() -> None:
    parts = (read_viewer_asset("viewer.js") + read_viewer_asset("viewer.css")).encode()
    assert len(gzip.compress(parts)) <= 120_000
    assert "</script" not in read_viewer_asset("viewer.js")
    assert len(render_scan_page(gpt2_sized()).encode()) <= 12_000_000


@pytest.mark.slow
def test_noise_fits_too() -> None:
    assert len(render_scan_page(incompressible()).encode()) <= 12_500_000


@pytest.mark.slow
def test_the_largest_page_that_is_promised_fits() -> None:
    assert len(render_scan_page(large()).encode()) <= 25_000_000
