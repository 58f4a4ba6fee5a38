"""``headwise plan``: the answer, two tables in 80 columns, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli.output import NO, YES
from headwise.cli.plan import plan
from tests.cli.alone import Alone
from tests.root import ROOT

CONFIGS = ROOT / "examples" / "configs"
LLAMA_8B = CONFIGS / "llama-3.1-8b.json"
COMMAND = Alone(plan)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_answer_and_two_tables() -> None:
    done = COMMAND.invoke(LLAMA_8B, "--gpus", "64", "--context", "131072")
    assert done.exit_code == YES
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert "1 sequence of 131,072 tokens on 64 GPUs, bfloat16. Computed, not measured." in text
    assert "Fastest training step that fits: heads 2 x all-to-all 2 x ring 16." in text
    assert "Fastest that headwise runs: heads 4 x ring 16." in text
    rows = [line.split() for line in lines if line.strip().startswith("ring ")]
    assert [row[:2] for row in rows] == [["ring", "64"]] * 2
    assert rows[0][2:] == ["528", "1,057", "93", "8"]
    assert "Not possible: heads 64 does not divide 32 query heads." in text
    assert "Stated: 450 GB/s within a node of 8 GPUs, 50 between nodes" in text


def test_every_row_is_one_line() -> None:
    done = COMMAND.invoke(CONFIGS / "llama-3.1-70b.json", "--gpus", "512", "--context", "131072")
    heads = [line for line in done.stdout.splitlines() if line.strip().startswith("heads x")]
    assert len(heads) == 8
    assert all(len(line.split()) >= 8 for line in heads)


def test_options_change_the_numbers() -> None:
    options = ("--gpus", "8", "--context", "4096", "--json")
    fields = json.loads(COMMAND.invoke(LLAMA_8B, *options).stdout)
    changed = json.loads(
        COMMAND.invoke(
            LLAMA_8B,
            *options,
            *("--batch", "2", "--dtype", "float32", "--bandwidth", "300,25", "--node", "4"),
            *("--memory", "40", "--teraflops", "100", "--bidirectional"),
        ).stdout
    )
    assert changed["machine"] == {
        "within": 300.0,
        "across": 25.0,
        "node": 4,
        "memory": 40.0,
        "teraflops": 100.0,
    }
    ring, other = (
        next(way for way in each["ways"] if way["way"] == "ring 8")["layer"]
        for each in (fields, changed)
    )
    assert other["sent_forward"]["ring"] == 4 * ring["sent_forward"]["ring"]
    assert other["attention_operations"]["forward"] == pytest.approx(
        4 * ring["attention_operations"]["forward"], rel=1e-3
    )


def test_nothing_fits() -> None:
    done = COMMAND.invoke(LLAMA_8B, "--gpus", "1", "--context", "999", "--memory", "9")
    assert done.exit_code == NO
    assert "No forward pass fits in 9 GB." in done.stdout
    text = " ".join(done.stdout.split())
    assert "the smallest, one GPU, takes" in text
    assert "--checkpointing keeps less." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((LLAMA_8B, "--bandwidth", "3"), "a bandwidth of '3'"),
        ((LLAMA_8B, "--bandwidth", "3,x"), "a bandwidth of '3,x'"),
        ((LLAMA_8B, "--bandwidth", "3,0"), "across 0.0"),
        ((ROOT / "docs",), "docs has no config.json"),
    ],
)
def test_refusals(arguments: tuple[Path | str, ...], words: str) -> None:
    done = COMMAND.invoke(*arguments, "--gpus", "8", "--context", "99")
    assert words in str(done.exception)
