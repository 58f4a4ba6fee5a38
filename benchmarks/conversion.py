"""A checkpoint from one layout to another and back, beside cp: ``python -m benchmarks.conversion``.

Both are whole commands that begin with the source on the disk alone, and end when their bytes are
there. The checkpoint has the shape of Llama 2 7B, with as many layers as are asked for: a third of
it is attention. It needs four times its size on the disk, which is free again afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.support.tensors import same_bytes

HEADS, EMBED, INNER, VOCABULARY = 32, 4096, 11008, 32000
SHARD = 2e9  # bytes of a file, about
TIME_LIMIT, MEMORY_LIMIT = 1.6, 1e9
FIRST, SECOND = "llama", "llama-meta"


def main(
    gb: Annotated[float, typer.Option(help="Size of the checkpoint.")] = 8.0,
    rounds: Annotated[int, typer.Option(help="How often each is timed.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where to work.")] = None,
    shard: Annotated[float, typer.Option(help="Gigabytes of a file, about.")] = 2.0,
) -> None:
    """Print the time of each direction over that of cp, and the peak of anonymous memory."""
    console = Console(width=max(120, Console().width))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        there = Path(place)
        size = generate(there / "first", gb, shard=shard * 1e9)
        console.print(f"{size / 1e9:.2f} GB; load before: {os.getloadavg()[0]:.2f}")
        ratios: dict[str, list[float]] = {"there": [], "back": []}
        peak = 0
        for number in range(rounds):
            used = one_round(there, ratios, console, first=bool(number % 2))
            peak = max(peak, used)
        for name, found in ratios.items():
            console.print(
                f"{name}: {median(found):.2f} of cp ({min(found):.2f}-{max(found):.2f}), "
                f"at most {TIME_LIMIT}"
            )
        console.print(f"anonymous memory: {peak / 1e9:.2f} GB, at most {MEMORY_LIMIT / 1e9:.0f} GB")
        console.print(f"back again: the same files; load after: {os.getloadavg()[0]:.2f}")


def one_round(there: Path, ratios: dict[str, list[float]], console: Console, *, first: bool) -> int:
    """There and back, each beside cp, which is ``first`` or last; the peak of memory."""
    peak = 0
    ways = (("there", "first", "second", FIRST, SECOND), ("back", "second", "third", SECOND, FIRST))
    for name, source, target, stored, wanted in ways:
        before = copy(there / source, there / "copy") if first else 0.0
        seconds, used = convert(there / source, there / target, stored, wanted)
        copied = before or copy(there / source, there / "copy")
        console.print(f"{name}: {seconds:.1f} s, cp {copied:.1f} s")
        ratios[name].append(seconds / copied)
        peak = max(peak, used)
    require_same(there / "first", there / "third")
    for target in ("second", "third"):
        shutil.rmtree(there / target)
    return peak


def generate(folder: Path, gb: float, *, shard: float = SHARD) -> int:
    """A checkpoint of random bits in bfloat16, NaNs among them; its size in bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    layer = 2 * (4 * EMBED**2 + 3 * EMBED * INNER)
    layers = max(1, round((gb * 1e9 - 4 * EMBED * VOCABULARY) / layer))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in _shapes(layers):
        held = sum(2 * torch.Size(s).numel() for s in shards[-1].values())
        if held + 2 * torch.Size(shape).numel() > shard:
            shards.append({})
        shards[-1][name] = shape
    total = 0
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _bits(shape, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    folder.joinpath("model.safetensors.index.json").write_text(text, "utf-8")
    _sync(folder)
    return total


def _shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, EMBED)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight", (EMBED, EMBED)
        yield f"{prefix}mlp.gate_proj.weight", (INNER, EMBED)
        yield f"{prefix}mlp.up_proj.weight", (INNER, EMBED)
        yield f"{prefix}mlp.down_proj.weight", (EMBED, INNER)
        yield f"{prefix}input_layernorm.weight", (EMBED,)
        yield f"{prefix}post_attention_layernorm.weight", (EMBED,)
    yield "model.norm.weight", (EMBED,)
    yield "lm_head.weight", (VOCABULARY, EMBED)


def _bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    words = torch.Size(shape).numel() // 4
    drawn = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator)
    return drawn.view(torch.bfloat16).view(shape)


def convert(source: Path, target: Path, stored: str, wanted: str) -> tuple[float, int]:
    """Seconds of the command, and the most anonymous memory that it was seen to have."""
    options = ["--from", stored, "--to", wanted, "--heads", str(HEADS)]
    command = [sys.executable, "-m", "headwise", "convert", str(source), str(target), *options]
    _forget(source)
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors.decode())
    return seconds, peak


def _anonymous(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(ln.split()[1]) for ln in lines if ln.startswith("RssAnon:")), 0)


def copy(source: Path, target: Path) -> float:
    """Seconds of cp, until all is on the disk."""
    _forget(source)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    _sync(target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def _forget(folder: Path) -> None:
    """Neither finds its source in memory."""
    os.sync()
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def require_same(a: Path, b: Path) -> None:
    """End unless two folders hold the same tensors; a converted file also has a description."""
    for path in sorted(a.glob("*.safetensors")):
        with safe_open(path, "pt") as first, safe_open(b / path.name, "pt") as second:
            other = {*first.keys()} ^ {*second.keys()}
            other |= {
                name
                for name in {*first.keys()} - other
                if not same_bytes(first.get_tensor(name), second.get_tensor(name))
            }
        if other:
            raise SystemExit(f"not the same bytes in {path.name}: {sorted(other)}")


if __name__ == "__main__":
    typer.run(main)
