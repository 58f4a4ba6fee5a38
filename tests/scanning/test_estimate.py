"""The estimate of a scan: sizes by hand, memory against a run, and that more costs more."""

import subprocess
import sys

import pytest
import torch

from headwise.errors import OptionError
from headwise.models.tiny import Tiny
from headwise.scanning import plan as module
from headwise.scanning.plan import (
    CallSizes,
    Speed,
    estimate_memory,
    estimate_scan,
    measure_speed,
    record_call_sizes,
    require_memory,
)
from headwise.scanning.statistics.catalogue import STANDARD, find_standard_statistics
from tests.huggingface.stored import bert, gpt2, masked_lm

SPEED = Speed(1e-10, ((5, 1e-6), (20, 4e-6)), 2e-9)


def test_entries_by_hand() -> None:
    assert CallSizes(6, 20, is_causal=False, span=None).count_weights_read(10) == 6 * 10 * 10
    assert CallSizes(6, 20, is_causal=True, span=None).count_weights_read(10) == 6 * 10 * 10 / 2
    assert CallSizes(6, 20, is_causal=True, span=4).count_weights_read(10) == 6 * 10 * 4


def test_the_calls_of_a_model() -> None:
    ids = torch.arange(12)[None]
    found = bert()
    assert record_call_sizes(found, lambda: found(ids)) == 2 * [
        CallSizes(6, 16, is_causal=False, span=None)
    ]
    causal = gpt2()
    assert record_call_sizes(causal, lambda: causal(ids)) == 2 * [
        CallSizes(6, 16, is_causal=True, span=None)
    ]


def test_seconds_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(60, 48), torch.nn.Linear(48, 50))
    call = CallSizes(6, 16, is_causal=False, span=None)
    found = estimate_scan(model, [call], (), [10, 20], held_bytes=0, trial_seconds=0.5, speed=SPEED)
    products = 48 * 50 * 30 + 16 * 6 * (10 * 10 + 20 * 20)
    rows = 6 * (10 * 2e-6 + 20 * 4e-6)
    assert found.seconds == pytest.approx(2 * 0.5 + 1e-10 * products + rows)


def test_a_comparison_of_heads_by_hand() -> None:
    """Two layers of 6 heads: 36 pairs within the first, 72 of the second with all so far."""
    call = CallSizes(6, 16, is_causal=True, span=None)
    compared = find_standard_statistics(["head_distance"])

    def of(length: int) -> tuple[float, int]:
        found = [
            estimate_scan(
                torch.nn.Linear(8, 8), 2 * [call], some, [length], held_bytes=0, speed=SPEED
            )
            for some in (compared, ())
        ]
        return found[0].seconds - found[1].seconds, found[0].extra_bytes - found[1].extra_bytes

    kept, layer = 12 * 4, 6 * 4
    assert of(300) == pytest.approx((2e-9 * 108 * 300**2, (kept + layer) * 300 * 300))
    assert of(512) == pytest.approx((2e-9 * 108 * 512**2, (kept + layer) * 512 * 512))
    # 108 pairs and 256 rows are more than a tenth of 12 heads' weights at 18 differences each.
    at_1500 = max(0.1 * 18 * 12 * 1500**2 / 2, 108 * 512**2)
    assert of(1500) == pytest.approx((2e-9 * at_1500, (kept + layer) * 256 * 1500))
    whole = 2e-9 * 108 * 256 * 20_000
    assert of(20_000) == pytest.approx((whole, (kept + layer) * 256 * 20_000))
    assert of(200_000)[1] == 2 * 500_000_000


def test_seconds_of_a_row_between_and_beyond_the_measured_ones() -> None:
    assert [SPEED.row(keys) for keys in (1, 5, 8, 20, 50)] == pytest.approx(
        [1e-6, 1e-6, 1.6e-6, 4e-6, 1e-5]
    )


def test_rows_are_measured_with_the_keys_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURED_SECONDS", 0)
    plain = CallSizes(6, 16, is_causal=True, span=None)
    windowed = CallSizes(6, 16, is_causal=True, span=8)
    speed = measure_speed([plain, windowed], (), 90)
    assert [keys for keys, _ in speed.rows] == [8, 11, 45]
    assert speed.product > 0
    assert all(seconds > 0 for _, seconds in speed.rows)
    assert [keys for keys, _ in measure_speed([windowed], (), 90).rows] == [2, 8]
    both = CallSizes(6, 16, is_causal=False, span=None)
    assert [keys for keys, _ in measure_speed([both], (), 90).rows] == [22, 90]


def test_what_is_held_counts() -> None:
    model = bert()
    call = CallSizes(6, 16, is_causal=False, span=None)
    found = estimate_scan(model, [call], STANDARD, [30], held_bytes=10**9, speed=SPEED)
    assert found.total_bytes == 10**9 + found.extra_bytes
    assert found.extra_bytes == estimate_memory(model, [call], STANDARD, 30)


def test_more_costs_more() -> None:
    model = bert()
    call = CallSizes(6, 16, is_causal=False, span=None)

    def of(calls: int, length: int) -> tuple[float, int]:
        found = estimate_scan(model, calls * [call], STANDARD, [length], held_bytes=0, speed=SPEED)
        return found.seconds, found.extra_bytes

    (few, small), (many, large), (deep, _) = of(2, 1000), of(2, 4000), of(4, 1000)
    assert few < deep < many
    assert small < large


def test_scores_of_the_whole_vocabulary_count_where_they_are_made() -> None:
    call = CallSizes(6, 16, is_causal=False, span=None)
    plain, with_head = (
        estimate_memory(bert(), [call], (), 1000),
        estimate_memory(masked_lm(), [call], (), 1000),
    )
    assert with_head - plain == 4 * 1000 * 60
    # A causal model is asked for those of one token.
    causal = gpt2()
    assert estimate_memory(causal, [call], (), 1000) == estimate_memory(
        causal.transformer, [call], (), 1000
    )


@pytest.mark.slow
def test_the_speed_of_this_machine_is_measured() -> None:
    call = CallSizes(6, 16, is_causal=True, span=None)
    found = estimate_scan(bert(), [call], STANDARD, [100], held_bytes=0)
    assert 0 < found.seconds < 3600


PEAK = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from headwise.scanning.plan import estimate_scan, record_call_sizes
from headwise.support.memory import process_memory
from headwise.scanning.statistics.catalogue import STANDARD, find_standard_statistics
from headwise.models.tiny import Tiny
from headwise.scanning._scan import scan

torch.manual_seed(0)
model = Tiny().eval()
ids = torch.randint(256, (1, 3000))
scan(model, ids[:, :16])
calls = record_call_sizes(model, lambda: model(ids[:, :16]))
expected = estimate_scan(model, calls, STANDARD, [3000], held_bytes=process_memory())
scan(model, ids, statistics=["entropy", "previous_token", "map", "most_received"])
# Not getrusage's peak: that one remembers what the parent held when it started this process.
peak = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
print(expected.total_bytes, 1024 * int(peak.split()[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it in /proc")
def test_memory_against_a_run() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, found = map(int, done.stdout.split())
    assert found / 2 < expected < 2 * found


def test_how_it_reads() -> None:
    found = estimate_scan(
        Tiny(),
        [CallSizes(8, 64, is_causal=True, span=None)],
        (),
        [2],
        held_bytes=2 * 10**9,
        speed=SPEED,
    )
    assert str(found).startswith("about 1 s, 2.")


def left(monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    """This machine has so many bytes left."""
    monkeypatch.setattr(module, "available_memory", lambda: there)


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, 5)
    require_memory(5, what="it", do="less")
    left(monkeypatch, 10**9)
    with pytest.raises(OptionError, match=r"about 2\.0 GB more memory") as refused:
        require_memory(2 * 10**9, what="it", do="less")
    assert "at most 1.0 GB" in refused.value.needed


@pytest.mark.parametrize(
    ("needed", "there", "words"),
    [
        (1_300, 900, ("1.3 kB", "900 B")),
        (2_010_000_000, 1_990_000_000, ("2,010,000,000 B", "1,990,000,000 B")),
    ],
)
def test_both_sizes_are_shown_so_that_they_differ(
    monkeypatch: pytest.MonkeyPatch, needed: int, there: int, words: tuple[str, str]
) -> None:
    left(monkeypatch, there)
    with pytest.raises(OptionError) as refused:
        require_memory(needed, what="it", do="less")
    assert refused.value.saw == f"it: about {words[0]} more memory"
    assert refused.value.needed.startswith(f"at most {words[1]}, ")
