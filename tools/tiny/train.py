"""Train the model that ships with the package: ``python -m tools.tiny.train --out F``.

The corpus is the standard library of the running Python (`corpus`). One row in eight is a repeated
slice (`batches`). Training uses bfloat16 autocast. The folder then holds the weights in float16 and
``training.json``. Before the end the folder holds a checkpoint; run the same command again to
resume.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import OptionError
from headwise.models.tiny import (
    TRAINING,
    WEIGHTS,
    Tiny,
    TinySizes,
    load_model_from_bytes,
)
from headwise.study.measures import count_parameters
from tools.tiny import batches, corpus, measures
from tools.tiny.batches import IGNORED
from tools.tiny.corpus import Corpus

CHECKPOINT = "checkpoint.pt"
Point = dict[str, Any]
log = logging.getLogger("headwise.models.tiny")


@dataclass(frozen=True)
class Plan:
    """Options of a training, which ends after ``minutes``, or after ``steps`` if given.

    The learning rate rises over the first ``warm_up`` of the training, then falls to ``floor``
    times its peak as half a cosine.
    """

    minutes: float = 40.0
    steps: int | None = None
    seed: int = 0
    batch: int = 16
    length: int = 256
    peak: float = 2e-3
    floor: float = 0.02
    warm_up: float = 0.03
    weight_decay: float = 0.1
    every: int = 100  # steps between measurements, and between checkpoints
    windows: int = 64  # held-out windows of each measurement
    final_windows: int = 1024
    sizes: TinySizes = field(default_factory=TinySizes)

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done, from 0 to 1."""
        return step / self.steps if self.steps else seconds / (60 * self.minutes)

    def rate(self, progress: float) -> float:
        """Return the learning rate at this progress."""
        if progress < self.warm_up:
            return self.peak * progress / self.warm_up
        rest = min(1.0, (progress - self.warm_up) / (1 - self.warm_up))
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * rest)) / 2)


@dataclass
class State:
    """State of a training: model, optimizer, progress and measurements."""

    model: Tiny
    optimizer: torch.optim.AdamW
    step: int = 0
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)

    def save(self, file: Path, plan: Plan) -> None:
        """Write a checkpoint atomically."""
        partial = file.with_suffix(".part")
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        rest = {"step": self.step, "seconds": self.seconds, "curve": self.curve}
        torch.save({**parts, **rest, "plan": json.dumps(asdict(plan))}, partial)
        partial.replace(file)


def train(
    folder: Path,
    *,
    plan: Plan,
    source: Path | None = None,
    report: Callable[[Point], None] | None = None,
) -> dict[str, Any]:
    """Train, or resume from the folder's checkpoint, and write weights and measurements.

    Args:
        folder: the folder of checkpoint, weights and training.json; created if missing.
        plan: sizes, seed and length of the training.
        source: a folder of Python files; the standard library by default.
        report: called with every measurement, after its checkpoint is written.

    Raises:
        OptionError: there are too few files, or the checkpoint has another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = corpus.read_corpus(source or corpus.standard_library())
    state = load_state(folder / CHECKPOINT, plan)
    losses: list[Tensor] = []
    while (progress := plan.progress(state.step, state.seconds)) < 1:
        start = time.monotonic()
        losses.append(_step(state, plan, texts, plan.rate(progress)))
        state.seconds += time.monotonic() - start
        if state.step % plan.every == 0:
            state.curve.append(_point(state, plan, texts, losses))
            losses = []
            state.save(folder / CHECKPOINT, plan)
            if report:
                report(state.curve[-1])
    state_dict = state.model.state_dict()
    half = {name: t.detach().half().contiguous() for name, t in state_dict.items()}
    save_file(half, folder / WEIGHTS)
    summary = _summary(state, plan, texts, folder / WEIGHTS)
    folder.joinpath(TRAINING).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    return summary


def load_state(checkpoint: Path, plan: Plan) -> State:
    """Return the state of a checkpoint, or of a new model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = Tiny(plan.sizes)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    state = State(model, torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
    if not checkpoint.exists():
        return state
    saved = torch.load(checkpoint, weights_only=True)
    if saved["plan"] != json.dumps(asdict(plan)):
        raise OptionError(
            saw=f"{checkpoint} with the plan {saved['plan']}",
            needed=f"a checkpoint with the plan {json.dumps(asdict(plan))}",
            do="pass the options of the first run, or another folder",
        )
    state.model.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"])
    state.step, state.seconds, state.curve = saved["step"], saved["seconds"], saved["curve"]
    return state


def _step(state: State, plan: Plan, texts: Corpus, rate: float) -> Tensor:
    """Train one step, and return the mean loss of the rows with text in bits."""
    # Each step has its own seed, so that a repeated step is the same.
    generator = torch.Generator().manual_seed(plan.seed * 1_000_000_007 + state.step)
    drawn = batches.draw_batch(texts.train, generator, batch=plan.batch, length=plan.length)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = state.model(drawn.ids)
    counted = drawn.targets != IGNORED
    losses = measures.token_losses(logits, drawn.targets)
    state.optimizer.zero_grad()
    (losses.sum() / counted.sum()).backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.step()
    state.step += 1
    text = plan.batch - drawn.repeated
    return losses.detach()[:text].sum() / counted[:text].sum() / math.log(2)


def _point(state: State, plan: Plan, texts: Corpus, losses: list[Tensor]) -> Point:
    state.model.eval()
    measurements = measures.measure_model(
        state.model, texts.held_out, windows=plan.windows, length=plan.length
    )
    state.model.train()
    return {
        "step": state.step,
        "minutes": round(state.seconds / 60, 2),
        "tokens": state.step * plan.batch * plan.length,
        "training_bits_per_byte": round(float(torch.stack(losses).mean()), 4),
        **measurements,
    }


def _summary(state: State, plan: Plan, texts: Corpus, file: Path) -> dict[str, Any]:
    shipped = load_model_from_bytes(file.read_bytes(), plan.sizes)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus": {
            "what": "the .py files of Python's standard library",
            "left_out": sorted(corpus.LEFT_OUT),
            "files": texts.files,
            "bytes": texts.bytes,
            "held_out_files": texts.held_out_files,
            "held_out_bytes": texts.held_out_bytes,
        },
        "repeated_slices": f"one row in {batches.REPEATED_ONE_IN}, half of them of random bytes; "
        "their first copy is not asked for",
        "arithmetic": "bfloat16 under autocast, weights in float32; stored and measured as float16",
        "plan": asdict(plan) | {"sizes": plan.sizes._asdict()},
        "parameters": count_parameters(shipped),
        "file_bytes": file.stat().st_size,
        "steps": state.step,
        "minutes": round(state.seconds / 60, 1),
        "tokens": state.step * plan.batch * plan.length,
        **measures.measure_model(
            shipped, texts.held_out, windows=plan.final_windows, length=plan.length
        ),
        "curve": state.curve,
    }


def _log(point: Point) -> None:
    log.info("%s", json.dumps(point))


def main(
    out: Annotated[Path, typer.Option(help="Folder for weights, figures and checkpoint.")],
    *,
    minutes: Annotated[float, typer.Option(help="Length of the training in minutes.")] = 40.0,
    steps: Annotated[
        int | None, typer.Option(help="Length of the training in steps, instead of minutes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.")] = 0,
) -> None:
    """Train the small language model on the standard library of this Python."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(out, plan=Plan(minutes=minutes, steps=steps, seed=seed), report=_log)


if __name__ == "__main__":
    typer.run(main)
