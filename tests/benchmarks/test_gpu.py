"""`make gpu` says what it would do without a card, and its measurements run on any device."""

from typing import Any

import pytest
import torch

from benchmarks import gpu


def test_without_a_card_the_plan_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "No CUDA card here. On one, `make gpu` would:"
    assert lines[1:] == [f"- {line}" for line in gpu.plan()]


def test_every_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "ROUNDS", 1)
    sizes: dict[str, Any] = {"HEADS": 2, "WIDTH": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(gpu, name, size)
    rows = [*gpu.measure((40,), "cpu"), *gpu.measure_tiles(40, "cpu")]
    assert [row.split(" | ")[1] for row in rows] == ["40"] * len(rows)
    ours = [row for row in rows if row.startswith(("| A", "| ten"))]
    assert not [row for row in ours if "did not run" in row]
