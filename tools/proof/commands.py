"""JSON of every command, and the pages that commands write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import headwise
from headwise.cli import app
from tools.proof.digests import Entries, digest
from tools.proof.models import LENGTH, VOCABULARY

LARGEST = 19_000  # letters of an entry; the parts of a longer one are digests

TIME = re.compile(r"\b\d[\d.,]* (?:ms|s|min|h)\b")
FOLDERS = re.compile(r"(?<![\w.:/<])/(?:[\w.+-]+/)+")


def without_times_and_paths(value: Any) -> Any:
    """Return a JSON value without durations, and with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {
            key: without_times_and_paths(entry)
            for key, entry in value.items()
            if key not in ("seconds", "versions")
        }
    if isinstance(value, list):
        return [without_times_and_paths(entry) for entry in value]
    if isinstance(value, str):
        return TIME.sub("(time)", FOLDERS.sub("", value))
    return value


def call_command(*arguments: object) -> tuple[int, str]:
    """Run a command in this process, and return its exit status and its standard output."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(part) for part in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


COMMANDS = {
    "scan": "scan --demo --page scan.html",
    "scan of a folder": "scan llama --tokens tokens.txt --page other.html",
    "convert": "convert llama converted --to llama-meta",
    "verify": "verify converted llama",
    "verify, outputs": "verify rolled llama --outputs",
    "verify, digests written": "verify llama --write-digests digests.json",
    "verify, digests": "verify rolled digests.json",
    "compare": "compare rolled llama",
    "compare, a layer": "compare rolled llama --layer 0 --page diagnosis.html",
    "compare, a model": "compare converted --against-model llama",
    "detect": "detect converted",
    "detect, a reference": "detect rolled --reference llama",
    "detect, a model": "detect converted --against llama",
    "study": "study parameters must-divide weights-of-one gradients --out study.html",
    "demo": "demo --out demo.html",
}


def measure_commands() -> Entries:
    """Run every command; its JSON without times and paths, and its exit status."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
    Path("tokens.txt").write_text(" ".join(map(str, tokens)))
    for name, line in COMMANDS.items():
        status, printed = call_command(*line.split(), "--json")
        answer = without_times_and_paths(json.loads(printed))
        if len(json.dumps(answer)) > LARGEST:
            answer = {key: digest(json.dumps(part).encode()) for key, part in answer.items()}
        yield name, {"status": status, "json": answer}
    for line in ("layouts list", "layouts show llama", "layouts show bloom"):
        yield line, digest(call_command(*line.split())[1].encode())


META = re.compile(r'<script type="application/json" id="headwise-meta">(.*?)</script>', re.S)
BLOB = re.compile(r'<script type="text/plain" data-blob="([^"]+)">(.*?)</script>', re.S)


def measure_pages() -> Entries:
    """Digest the data of the scan's page, and the pages of a diagnosis and of the study."""
    page = Path("scan.html").read_text("utf-8")
    if (meta := META.search(page)) is not None:
        words = without_times_and_paths(json.loads(meta[1]))
        words.pop("headwise")  # the version
        yield "scan: words", {key: digest(json.dumps(words[key]).encode()) for key in words}
    yield "scan: blobs", {name: digest(blob.encode()) for name, blob in BLOB.findall(page)}
    for name in ("diagnosis", "study"):
        text = without_times_and_paths(Path(f"{name}.html").read_text("utf-8"))
        text = text.replace(f"headwise {headwise.__version__}", "headwise")
        yield name, [len(text), digest(text.encode())]
