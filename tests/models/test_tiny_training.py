"""The training of the small language model: its text, its batches, and that it can be resumed."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwise.errors import OptionError
from headwise.models.tiny import BEGIN, TRAINING, WEIGHTS, TinySizes
from tools.tiny import batches, corpus, train
from tools.tiny.batches import IGNORED
from tools.tiny.train import CHECKPOINT, Plan

pytestmark = pytest.mark.slow  # it trains

PLAN = Plan(
    steps=6,
    batch=16,
    length=29,
    every=2,
    windows=5,
    final_windows=5,
    sizes=TinySizes(embed_dim=24, num_layers=2, num_heads=3, wide=40),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sixty files of Python, and what must not be read."""
    folder = tmp_path / "lib"
    for name in (*(f"part/m{i}.py" for i in range(60)), "test/test_a.py", "_sysconfigdata_x.py"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}\ndef f{random.randint(1, 99)}(x):\n    return x + 1\n" * 3)
    folder.joinpath("part/notes.txt").write_text("no Python")
    return folder


# ---- the corpus --------------------------------------------------------------------------------


def test_each_file_is_on_one_side_and_begins_with_the_symbol(source: Path) -> None:
    read = corpus.read_corpus(source)
    names = sorted(f"part/m{i}.py" for i in range(60))
    kept = [name for name in names if corpus.is_held_out(name)]
    assert (read.files, read.held_out_files) == (60 - len(kept), len(kept))
    assert len(kept) > 0
    for stream, side in (
        (read.held_out, kept),
        (read.train, [name for name in names if name not in kept]),
    ):
        expected = [[BEGIN, *source.joinpath(name).read_bytes()] for name in side]
        assert stream.tolist() == [i for ids in expected for i in ids]
    assert read.bytes == sum(len(source.joinpath(n).read_bytes()) for n in names if n not in kept)


def test_a_file_is_held_out_by_its_name_alone() -> None:
    # Of this library's names in 2026: the same ones for everybody.
    share = sum(corpus.is_held_out(f"{i}.py") for i in range(4000)) / 4000
    assert abs(share - 1 / 20) < 0.01
    assert not corpus.is_in_corpus("test/test_os.py")
    assert not corpus.is_in_corpus("_sysconfigdata__x.py")
    assert corpus.is_in_corpus("json/decoder.py")


def test_refuses_a_folder_without_python(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="0 training and 0 held-out Python files"):
        corpus.read_corpus(tmp_path)


# ---- the batches -------------------------------------------------------------------------------


def test_windows_are_text_or_repeated_slices(source: Path) -> None:
    stream = corpus.read_corpus(source).train
    drawn = batches.draw_batch(stream, torch.Generator().manual_seed(1), batch=16, length=61)
    assert drawn.repeated == 2
    assert drawn.ids.shape == drawn.targets.shape == (16, 61)
    assert drawn.ids[:, 0].tolist() == [BEGIN] * 16
    whole = bytes(i % 256 for i in stream.tolist())  # the begin symbol as 0
    for ids, targets in zip(drawn.ids[:14], drawn.targets[:14], strict=True):
        assert bytes(i % 256 for i in [*ids[1:].tolist()]) in whole
        asked = targets != IGNORED
        assert torch.equal(targets[:-1][asked[:-1]], ids[1:][asked[:-1]])
        assert BEGIN not in targets
    for ids, targets in zip(drawn.ids[14:], drawn.targets[14:], strict=True):
        first = int((targets == IGNORED).sum())  # the slice, unless it holds a begin symbol
        size = next(n for n in range(8, 31) if torch.equal(ids[1 + n :], ids[1:-n]))
        assert size <= first <= 60
        assert (targets[:size] == IGNORED).all()


def test_windows_to_measure_on_are_fixed_and_reach_both_ends() -> None:
    stream = torch.arange(200) % 256
    sample = batches.evenly_spaced_batch(stream, batch=3, length=20)
    again = batches.evenly_spaced_batch(stream, batch=3, length=20)
    assert torch.equal(sample.ids, again.ids)
    assert sample.ids[0, 1:].tolist() == list(range(19))
    assert sample.targets[0].tolist() == list(range(20))
    assert int(sample.targets[2, -1]) >= 198


def test_copies_hold_no_byte_twice() -> None:
    ids = batches.repeated_bytes(batch=3, bytes=41)
    assert ids.shape == (3, 83)
    assert torch.equal(ids[:, 1:42], ids[:, 42:])
    assert all(len(set(row.tolist())) == 42 for row in ids[:, :42])


# ---- the training ------------------------------------------------------------------------------


def without_clock(summary: dict[str, Any]) -> dict[str, Any]:
    curve = [{k: v for k, v in point.items() if k != "minutes"} for point in summary["curve"]]
    return {k: v for k, v in summary.items() if k != "minutes"} | {"curve": curve}


class StoppedError(Exception):
    """What ends a training here."""


def test_an_interrupted_training_ends_where_a_whole_one_does(source: Path, tmp_path: Path) -> None:
    whole = train.train(tmp_path / "whole", plan=PLAN, source=source)

    def stop(point: dict[str, Any]) -> None:
        if point["step"] == 4:
            raise StoppedError

    parts = tmp_path / "parts"
    with pytest.raises(StoppedError):
        train.train(parts, plan=PLAN, source=source, report=stop)
    assert not parts.joinpath(WEIGHTS).exists()
    torch.rand(3)  # the state of the global generator is of no account
    steps: list[int] = []
    resumed = train.train(
        parts, plan=PLAN, source=source, report=lambda point: steps.append(point["step"])
    )
    assert steps == [6]
    assert without_clock(resumed) == without_clock(whole)
    one, other = (load_file(folder / WEIGHTS) for folder in (tmp_path / "whole", parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_learns_and_tells_what_it_saw(source: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=60, every=20)
    summary = train.train(tmp_path / "out", plan=plan, source=source)
    assert json.loads(tmp_path.joinpath("out", TRAINING).read_text()) == json.loads(
        json.dumps(summary)
    )
    first, *_, last = summary["curve"]
    assert last["training_bits_per_byte"] < first["training_bits_per_byte"]
    assert last["held_out_bits_per_byte"] < first["held_out_bits_per_byte"]
    assert summary["tokens"] == 60 * 16 * 29
    state = load_file(tmp_path / "out" / WEIGHTS)
    assert summary["parameters"] == sum(t.numel() for t in state.values())
    assert summary["file_bytes"] == tmp_path.joinpath("out", WEIGHTS).stat().st_size


def test_refuses_a_checkpoint_of_another_plan(source: Path, tmp_path: Path) -> None:
    train.train(tmp_path, plan=PLAN, source=source)
    assert tmp_path.joinpath(CHECKPOINT).exists()
    with pytest.raises(OptionError, match='"seed": 1'):
        train.train(tmp_path, plan=replace(PLAN, seed=1), source=source)


def test_the_rate_rises_and_falls() -> None:
    plan = Plan(minutes=10.0)
    assert plan.progress(5, 300.0) == 0.5
    assert replace(plan, steps=20).progress(5, 300.0) == 0.25
    rates = [plan.rate(i / 1000) for i in range(1001)]
    top = rates.index(max(rates))
    assert top == 30
    assert rates[top] == plan.peak
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(plan.peak * plan.floor)
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)


def test_the_command_line_makes_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Path, Plan]] = []
    monkeypatch.setattr(train, "train", lambda out, *, plan, report: seen.append((out, plan)))
    train.main(tmp_path, minutes=1.5, steps=None, seed=3)
    train.main(tmp_path, steps=7)
    assert seen == [(tmp_path, Plan(minutes=1.5, seed=3)), (tmp_path, Plan(steps=7))]
