"""``headwise scan`` of a corpus by parts and in several processes, also where one is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from headwise.cli.output import NO, YES
from headwise.errors import OptionError
from headwise.scanning import merge_parts, open_model, read_texts, scan_part, workers
from tests.cli.scan_command import invoke, refused, run
from tests.quick import others_extra
from tests.root import ROOT

TEXTS, LONGEST = 8, 240.0  # seconds that anything may take on a busy machine
OPTIONS = ("--demo", "--text", "texts", "--length", 600, "--stats", "entropy")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with texts, each of which takes a fraction of a second, and one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    tmp_path.joinpath("texts").mkdir()
    write_texts(range(TEXTS))


def write_texts(numbers: range) -> None:
    words, draw = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"], random.Random(0)
    for number in numbers:
        content = " ".join(draw.choices(words, k=30 + 15 * (number % TEXTS)))
        Path("texts", f"{number}.txt").write_text(content, "utf-8")


def parts(out: str = "out") -> list[Path]:
    return sorted(Path(out).glob("parts/[0-9]*"))


def content(out: str) -> dict[str, bytes]:
    folder = Path(out)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_parts_and_their_merge_are_one_scan_with_one_page() -> None:
    whole, _ = run(*OPTIONS, "--out", "one", "--page", "one.html", "--json")
    for number in (2, 1):
        out, err = run(*OPTIONS, "--out", "out", "--part", f"{number}/2")
        assert f", part {number}/2: about" in " ".join(err.split())
        assert out.startswith(f"Part {number} of 2 is done: ")
        assert not Path("headwise-scan").exists()
    assert out.endswith("8 of 8 texts are in out. To merge them: headwise scan --merge out\n")
    merged, _ = run("--merge", "out", "--page", "out.html", "--json")
    assert content("out") == content("one")
    assert json.loads(merged) == json.loads(whole)


@pytest.mark.slow
def test_python_resumes_what_the_command_began() -> None:
    run(*OPTIONS, "--out", "out", "--part", "1/2")
    before = {path: path.stat().st_mtime_ns for path in parts()}
    assert 0 < len(before) < TEXTS
    model = open_model()
    texts = read_texts(model, ["texts"], length=600)
    scan_part(model, texts, "out", statistics="entropy", length=600)
    merge_parts("out")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    run(*OPTIONS, "--out", "one")
    assert content("out") == content("one")


@pytest.mark.slow
def test_parts_in_a_folder_each_are_merged_and_faults_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for number in (1, 2):
        run(*OPTIONS, "--out", f"part {number}", "--part", f"{number}/2")
    missing = invoke("--merge", "part 1")
    assert missing.exit_code == NO
    assert f"headwise: {len(parts('part 2'))} of 8 documents missing: " in missing.stderr
    assert not Path("headwise-scan").exists()
    run("--merge", "part 2", "--merge", "part 1", "--out", "merged", "--page", "a.html")
    run(*OPTIONS, "--out", "one", "--page", "b.html")
    assert Path("merged/scan.safetensors").read_bytes() == content("one")["scan.safetensors"]
    assert Path("merged/table.csv").read_bytes() == content("one")["table.csv"]


@pytest.mark.slow
def test_the_environment_numbers_parts_only_with_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    out, _ = run(*OPTIONS, "--out", "out", "--part", "auto", "--json")
    result = json.loads(out)
    assert result["part"] == [2, 4]
    assert sorted(result["files"]) == [str(path.absolute()) for path in parts()]
    run(*OPTIONS, "--out", "out")
    assert len(parts()) == TEXTS


def test_work_that_cannot_be_shared_is_refused() -> None:
    for options, saw in (
        (("--text", "texts", "--processes", 2), "2 processes without --out"),
        (("--text", "texts", "--part", "1/2"), "--part 1/2 without --out"),
        (("--text", "texts/0.txt", "--out", "o", "--processes", 3), "3 processes for one text"),
        (("--processes", 2, "--out", "o"), "2 processes for one text"),
        ((*OPTIONS[1:], "--out", "o", "--part", "1/2", "--processes", 2), "--part and --processes"),
        (("--merge", "o"), "--merge and --demo"),
        ((*OPTIONS[1:], "--out", "o", "--part", "1-2"), "--part 1-2"),
        ((*OPTIONS[1:], "--out", "o", "--part", "3/2"), "--part 3/2"),
        ((*OPTIONS[1:], "--out", "o", "--part", "auto"), "--part auto without the numbers"),
    ):
        assert refused("--demo", *options).saw.startswith(saw)
    assert not Path("o").exists()


# ---- several processes ---------------------------------------------------------------------------


def begun(*options: object) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A scan over two processes, once one of them has done a text; the other one is suspended.

    So the command cannot end before the test goes on, on whatever machine. And it can be
    interrupted, also where the tests run in the background of a shell: there SIGINT is ignored, and
    so in all that they start. A signal with a handler has its default in a new process.
    """
    command = [sys.executable, "-m", "headwise", "scan", *OPTIONS, "--out", "out", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: len(workers_of(child)) == 2)
    running, held = workers_of(child)
    held.suspend()
    wait_until(lambda: bool(parts()))
    return child, [running, held]


def wait_until(is_so: object) -> None:
    end = time.monotonic() + LONGEST
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.005)


def workers_of(child: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that scan, without the tracker of multiprocessing."""
    children = psutil.Process(child.pid).children()
    return [p for p in children if any("spawn_main" in word for word in p.cmdline())]


@pytest.mark.slow
def test_a_killed_process_costs_its_text_and_the_same_command_resumes() -> None:
    child, [killed, held] = begun("--processes", 2)
    killed.kill()
    held.resume()
    _, err = child.communicate(timeout=LONGEST)
    assert child.returncode in (YES, NO), err  # it may have been between two texts
    lost = [f"{n}.txt" for n in range(TEXTS) if not list(Path("out").glob(f"parts/0000{n}-*"))]
    assert len(lost) <= 1
    if lost:
        assert f"1 of 8 texts were not scanned: {lost[0]} (its process was ended by SIGKILL)" in err
        assert "run the same command again: it scans what is missing" in err
    kept = {path: path.stat().st_mtime_ns for path in parts()}
    run(*OPTIONS, "--out", "out", "--processes", 2, "--page", "again.html")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    run(*OPTIONS, "--out", "one", "--page", "one.html")
    assert content("out") == content("one")


@pytest.mark.parametrize("number", others_extra([signal.SIGINT, signal.SIGKILL]))
def test_no_process_outlives_the_command(number: signal.Signals) -> None:
    child, running = begun("--processes", 2)
    child.send_signal(number)
    with suppress(psutil.NoSuchProcess):  # killed, the command ends none: each sees it gone
        running[1].resume()
    _, err = child.communicate(timeout=LONGEST)
    wait_until(lambda: not any(process.is_running() for process in running))
    if number == signal.SIGINT:
        assert child.returncode == 130
        assert "of 8 texts are in out. Run the same command again to resume." in err
    run(*OPTIONS, "--out", "out", "--page", "again.html")
    run(*OPTIONS, "--out", "one", "--page", "one.html")
    assert content("out").keys() - content("one").keys() <= {
        name for name in content("out") if name.endswith(".part")
    }


@pytest.mark.slow
def test_an_error_of_a_text_is_named_and_one_of_the_model_is_raised() -> None:
    model = open_model()
    texts = read_texts(model, ["texts"], length=600)
    options = {"processes": 2, "statistics": "entropy"}
    Path("out/parts").mkdir(parents=True)
    scan_part(model, texts, "out", statistics="entropy")
    damaged = parts()[3]
    damaged.write_bytes(b"half")
    failures = workers.scan_in_processes(model.opened_with, texts, "out", **options)
    assert list(failures) == ["3.txt"]
    assert "is damaged or was edited" in failures["3.txt"]
    with pytest.raises(OptionError, match="nowhere does not exist"):
        workers.scan_in_processes({"folder": "nowhere"}, texts, "out", **options)
