"""A saved scan that was damaged or edited is refused, in format 2 and in format 1."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as tensors_in
from safetensors.torch import save as safetensors_of
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.file import FORMAT_1_NOTE, KEY
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import MostReceived
from headwise.scanning.statistics.outputs import TotalVariation
from headwise.scanning.statistics.statistic import Summary
from tests.scanning.edited import Edit, as_format_1, edit, fields_in, json_of
from tests.scanning.scans import Own, head_scan, layer_scan, matrix, random_scan, standard

FORMAT_1 = Path(__file__).parent / "files" / "format_1.safetensors"
HEADS = 5  # of the scans here


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, of which one has two of its heads and lacks a statistic."""
    statistics = (standard("previous_token"), MostReceived(), TotalVariation())
    calls = [matrix(seed, heads=HEADS) for seed in (0, 1)]
    scan = head_scan(
        layer_scan(calls[:1], name="a", statistics=statistics),
        layer_scan(calls[1:], name="b/ü", statistics=statistics, heads=(4, 1), is_cross=True),
        statistics=statistics,
        notes=("one", "zwei: ä"),
    )
    return scan.save(tmp_path_factory.mktemp("scans") / "scan.safetensors")


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """A copy of the file, to be edited."""
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(saved.read_bytes())
    return copy


def test_a_flipped_bit_is_noticed_wherever_it_is(path: Path) -> None:
    raw = path.read_bytes()
    about, tensors = 8 + int.from_bytes(raw[:8], "little"), len(raw)
    # Every bit of the header's length; of the header and of the tensors a sample.
    draw = random.Random(0)
    bits = [
        *range(64),
        *draw.sample(range(64, 8 * about), 150),
        *draw.sample(range(8 * about, 8 * tensors), 80),
    ]
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(OptionError):
            HeadScan.load(path)
    path.write_bytes(raw)
    HeadScan.load(path)


def test_a_number_of_another_value_is_named_as_damage(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(OptionError) as error:
        HeadScan.load(path)
    assert error.value.saw == (
        f"the file {path} is damaged or was edited: its content does not have the digest that was "
        "saved with it"
    )
    assert error.value.do == "copy it again from where it was saved, or scan again"


def of_layer(**changes: Any) -> Edit:
    return lambda about, _: about["layers"][1].update(changes)


def of_statistic(**changes: Any) -> Edit:
    return lambda about, _: about["statistics"][0].update(changes)


def of_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def without(*keys: Any) -> Edit:
    def edited(about: Any, _: dict[str, Tensor]) -> None:
        *way, last = keys
        for key in way:
            about = about[key]
        del about[last]

    return edited


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


EDITS: dict[str, tuple[Edit, str]] = {
    "tokens negative": (lambda about, _: about.update(tokens=-1), "tokens is -1 and no whole"),
    "tokens a text": (lambda about, _: about.update(tokens="72"), "tokens is '72' and no whole"),
    "tokens a fraction": (lambda about, _: about.update(tokens=72.0), "tokens is 72.0 and no"),
    "tokens endless": (lambda about, _: about.update(tokens=10**30), "a number of 100 bits and no"),
    "sequences true": (lambda about, _: about.update(sequences=True), "sequences is True and no"),
    "no sequences": (without("sequences"), "its JSON has no field 'sequences'"),
    "model a list": (lambda about, _: about.update(model=["a"]), "model is a list of 1 entries"),
    "headwise null": (lambda about, _: about.update(headwise=None), "headwise is None and no text"),
    "notes a text": (lambda about, _: about.update(notes="one"), "notes is 'one' and no list"),
    "a note a number": (lambda about, _: about["notes"].append(3), "notes[2] is 3 and no text"),
    "document a list": (lambda about, _: about.update(document=[]), "document is a list of 0"),
    "a field too many": (lambda about, _: about.update(seed=3), "its JSON has a field 'seed'"),
    "version a text": (lambda about, _: about.update(version="2"), "version is '2' and no whole"),
    "no version": (without("version"), "version is None and no whole number"),
    "layers a mapping": (lambda about, _: about.update(layers={}), "layers is a mapping of 0"),
    "a layer a text": (lambda about, _: about["layers"].append("a"), "layers[2] is 'a' and no"),
    "no layer": (without("layers", 1), "it holds a tensor '1/most_received/key' that no layer"),
    "kind odd": (of_layer(kind="both"), "layers[1].kind is 'both' and none of self, cross"),
    "calls a text": (of_layer(calls="1"), "layers[1].calls is '1' and no whole number"),
    "name a number": (of_layer(name=1), "layers[1].name is 1 and no text"),
    "heads too few": (of_layer(heads=[4]), "shape (2, 8), where (heads 1, 8) is needed"),
    "heads too large": (of_layer(heads=[5, 1]), "layers[1].heads[0] is 5 and no whole number"),
    "a head twice": (of_layer(heads=[1, 1]), "layers[1].heads has a head twice"),
    "heads a text": (of_layer(heads="41"), "layers[1].heads is '41' and no list"),
    "no num_heads": (without("layers", 1, "num_heads"), "layers[1] has no field 'num_heads'"),
    "num_heads huge": (of_layer(num_heads=2**40), "layers[1].num_heads is 1099511627776 and no"),
    "missing a list": (of_layer(missing=[]), "layers[1].missing is a list of 0 entries and no"),
    "a reason a number": (of_layer(missing={"previous_token": 1}), "missing.previous_token is 1"),
    "no reason": (of_layer(missing={}), "layers[1] needs either a summary of previous_token"),
    "a reason too many": (
        of_layer(missing={"previous_token": "", "odd": ""}),
        "layers[1] has 'odd', which is not in statistics",
    ),
    "a statistic twice": (
        lambda about, _: about["statistics"].append(about["statistics"][0]),
        "statistics has two entries of one name",
    ),
    "no statistic": (without("statistics", 1), "'most_received', which is not in statistics"),
    "a statistic a text": (
        lambda about, _: about["statistics"].insert(0, "entropy"),
        "statistics[0] is 'entropy' and no mapping",
    ),
    "axes a text": (of_statistic(axes="rank"), "statistics[0].axes is 'rank' and no list"),
    "name a list": (of_statistic(name=[]), "statistics[0].name is a list of 0 entries"),
    "parts a text": (
        of_layer(summaries={"most_received": "key", "total_variation": []}),
        "summaries.most_received is 'key' and no list",
    ),
    "no part": (
        without("layers", 0, "summaries", "previous_token", 0),
        "layers[0].summaries.previous_token.",
    ),
    "no tensor": (
        lambda _, tensors: tensors.pop("0/previous_token/sum"),
        "it lacks the tensor '0/previous_token/sum'",
    ),
    "a tensor too many": (
        lambda _, tensors: tensors.update(x=torch.ones(1)),
        "it holds a tensor 'x' that no layer has",
    ),
    "a wide sum": (
        of_tensor("0/previous_token/sum", lambda sums: sums[:, None].expand(-1, 3).contiguous()),
        "previous_token.sum has the shape (5, 3), where (heads 5) is needed",
    ),
    "a short count": (
        of_tensor("0/total_variation/count", lambda count: count[:, :3].contiguous()),
        "total_variation.count has the shape (5, 3), where (heads 5, heads 5) is needed",
    ),
    "a sum in float32": (
        of_tensor("0/previous_token/sum", Tensor.float),
        "previous_token.sum has the dtype torch.float32, where torch.float64 is needed",
    ),
    "a key in float64": (
        of_tensor("0/most_received/key", Tensor.double),
        "most_received.key has the dtype torch.float64, where torch.int64 is needed",
    ),
    "a count that is NaN": (
        of_tensor("0/previous_token/count", filled(torch.nan)),
        "previous_token.count holds a number that is no count",
    ),
    "a count below 0": (of_tensor("0/previous_token/count", filled(-1.0)), "that is no count"),
    "a count and a half": (of_tensor("0/previous_token/count", filled(1.5)), "that is no count"),
    "an infinite count": (of_tensor("0/previous_token/count", filled(torch.inf)), "is no count"),
    "a negative weight": (
        of_tensor("0/most_received/received", filled(-0.5)),
        "most_received.received holds a negative weight",
    ),
}


EDITS_OF_FORMAT_2: dict[str, tuple[Edit, str]] = {
    "format 1": (lambda about, _: about.update(version=1), "has a field 'digest' that no scan has"),
    "no digest": (without("digest"), "its content does not have the digest"),
    "a digest of 0": (lambda about, _: about.update(digest=0), "its content does not have the"),
    "no id": (without("statistics", 0, "id"), "statistics[0] has no field 'id'"),
    "id a number": (of_statistic(id=1), "statistics[0].id is 1 and no text"),
}


@pytest.mark.parametrize("name", [*EDITS, *EDITS_OF_FORMAT_2])
def test_an_edit_with_a_digest_of_its_own_is_refused(name: str, path: Path) -> None:
    change, said = {**EDITS, **EDITS_OF_FORMAT_2}[name]
    edit(path, change, digest="digest" not in name)
    with pytest.raises(OptionError) as error:
        HeadScan.load(path)
    assert error.value.saw.startswith(f"the file {path} is damaged or was edited: ")
    assert said in error.value.saw
    assert len(error.value.saw) < len(str(path)) + 200


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_format_1_is_refused(name: str, path: Path) -> None:
    change, said = EDITS[name]
    edit(path, as_format_1)
    assert HeadScan.load(path).notes[-1] == FORMAT_1_NOTE
    edit(path, change)
    with pytest.raises(OptionError) as error:
        HeadScan.load(path)
    assert said in error.value.saw


def test_a_message_shows_no_long_text_of_the_file(path: Path) -> None:
    odd = "\x1b[31m" + 9999 * "long "
    edit(path, of_statistic(formula=odd, id=odd))
    with pytest.raises(OptionError, match="previous_token as \ufffd\\[31mlong") as error:
        HeadScan.load(path)
    assert len(str(error.value)) < len(str(path)) + 1300
    assert "\x1b" not in str(error.value)


def test_an_edit_that_changes_nothing_loads(path: Path, saved: Path) -> None:
    edit(path, lambda *_: None)
    assert path.read_bytes() == saved.read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "2",
        '"a text"',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"version": 2, "tokens": 1e310}',
        '{"version": 1e310}',
        '{"version": NaN}',
        '{"version": ' + "9" * 5000 + "}",
        '{"version": 2, "version": 2}',
        '{"version": 2}',
        '{"version": 1}',
        '{"version": -1}',
        '{"version": {"version": 2}}',
    ],
    ids=lambda text: text[:20],
)
def test_other_json_is_refused(text: str, path: Path) -> None:
    path.write_bytes(safetensors_of(tensors_in(path.read_bytes()), metadata={KEY: text}))
    with pytest.raises(OptionError, match=r"is damaged or was edited|a scan in format") as error:
        HeadScan.load(path)
    assert len(str(error.value)) < len(str(path)) + 300


def test_another_spelling_of_the_json_is_refused(path: Path) -> None:
    about, tensors = fields_in(path), tensors_in(path.read_bytes())
    for text in (json.dumps(about, sort_keys=True), json_of(about).replace(": 3", ":3", 1)):
        path.write_bytes(safetensors_of(tensors, metadata={KEY: text}))
        with pytest.raises(OptionError, match="does not have the digest"):
            HeadScan.load(path)


def test_a_size_that_no_tensor_has_is_refused(path: Path) -> None:
    entry = {"dtype": "F64", "shape": [2**63, 0], "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {KEY: "{}"}, "x": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(OptionError, match=r"it is no whole \.safetensors file"):
        HeadScan.load(path)


def test_a_summary_of_ones_own_is_checked_by_its_result(tmp_path: Path) -> None:
    class Doubled(Own):
        def make_summary(self, gathered: Any, observation: Any) -> Summary:
            summary = super().make_summary(gathered, observation)
            return {"double": 2 * summary["sum"], "rows": summary["count"]}

        def result(self, summary: Summary) -> Tensor:
            return summary["double"] / summary["rows"]

    assert Doubled.parts is None
    path = random_scan(0, statistics=(Doubled(),)).save(tmp_path / "a")
    assert torch.isfinite(HeadScan.load(path, [Doubled()])["own"]).all()
    raw = path.read_bytes()
    for change, said in (
        (of_tensor("0/own/double", lambda double: double[:4].clone()), "own gives no result: "),
        (
            of_tensor("0/own/double", lambda double: double[:, None].clone()),
            "gives a result (6, 6)",
        ),
        (without("layers", 0, "summaries", "own", 0), "own gives no result: "),
    ):
        path.write_bytes(raw)
        edit(path, change)
        with pytest.raises(OptionError) as error:
            HeadScan.load(path, [Doubled()])
        assert said in error.value.saw


def test_a_scan_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    scan = random_scan(0, layers=1)
    scan.layer_scans[0].summaries["entropy"]["count"][2] = torch.nan
    with pytest.raises(OptionError) as error:
        scan.save(tmp_path / "a")
    assert error.value.saw == (
        "a scan that cannot be saved: layers[0].summaries.entropy.count holds a number that is no "
        "count: a count is a whole number from 0 on"
    )
    assert not (tmp_path / "a").exists()
