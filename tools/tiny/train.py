"""Train the model that ships with the package: ``python -m tools.tiny.train --out F``.

It learns from the standard library of the Python that runs it (`corpus`), with one row in eight of
repeated slices (`batches`), in bfloat16 where autocast takes it. The folder then holds the weights
in float16 and ``training.json``; until then a checkpoint, from which an interrupted training goes
on when it is started again.
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
from torch import Tensor

from headwise.bundled_models.tiny import weights
from headwise.bundled_models.tiny.model import Tiny, TinySizes, parameters_of
from headwise.errors import OptionError
from tools.tiny import batches, corpus, measures
from tools.tiny.batches import IGNORED
from tools.tiny.corpus import Corpus

CHECKPOINT = "checkpoint.pt"
Point = dict[str, Any]
log = logging.getLogger("headwise.bundled_models.tiny")


@dataclass(frozen=True)
class Plan:
    """All that a training is told. Its end is a number of minutes, or of steps where one is given.

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
    every: int = 100  # steps from one measurement, and one checkpoint, to the next
    windows: int = 64  # held-out ones that are measured on the way
    final_windows: int = 1024
    sizes: TinySizes = field(default_factory=TinySizes)

    def progress(self, step: int, seconds: float) -> float:
        """How much of the training is done, from 0 to 1."""
        return step / self.steps if self.steps else seconds / (60 * self.minutes)

    def rate(self, progress: float) -> float:
        """The learning rate at this progress."""
        if progress < self.warm_up:
            return self.peak * progress / self.warm_up
        rest = min(1.0, (progress - self.warm_up) / (1 - self.warm_up))
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * rest)) / 2)


@dataclass
class State:
    """Where a training stands."""

    model: Tiny
    optimizer: torch.optim.AdamW
    step: int = 0
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)

    def save(self, file: Path, plan: Plan) -> None:
        """Write a checkpoint, all of it or none."""
        written = file.with_suffix(".part")
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        rest = {"step": self.step, "seconds": self.seconds, "curve": self.curve}
        torch.save({**parts, **rest, "plan": json.dumps(asdict(plan))}, written)
        written.replace(file)


def train(
    folder: Path,
    *,
    plan: Plan,
    source: Path | None = None,
    report: Callable[[Point], None] | None = None,
) -> dict[str, Any]:
    """Train as planned, or go on from the folder's checkpoint; write the weights and what was seen.

    Args:
        folder: where checkpoint, weights and training.json go; it is made where it is missing.
        plan: sizes, seed and length of the training.
        source: a folder of Python files; the standard library by default.
        report: told of every point of the curve, after its checkpoint was written.

    Raises:
        OptionError: too few files, or a checkpoint of another plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = corpus.read(source or corpus.standard_library())
    state = start(folder / CHECKPOINT, plan)
    losses: list[Tensor] = []
    while (progress := plan.progress(state.step, state.seconds)) < 1:
        began = time.monotonic()
        losses.append(_step(state, plan, read, plan.rate(progress)))
        state.seconds += time.monotonic() - began
        if state.step % plan.every == 0:
            state.curve.append(_point(state, plan, read, losses))
            losses = []
            state.save(folder / CHECKPOINT, plan)
            if report:
                report(state.curve[-1])
    weights.write_weights(state.model, folder / weights.WEIGHTS)
    summary = _summary(state, plan, read, folder / weights.WEIGHTS)
    folder.joinpath(weights.TRAINING).write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    return summary


def start(checkpoint: Path, plan: Plan) -> State:
    """A new model, or what a checkpoint holds."""
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
            saw=f"{checkpoint}, of the plan {saved['plan']}",
            needed=f"a checkpoint of the plan {json.dumps(asdict(plan))}",
            do="give the options that it was started with, or another folder",
        )
    state.model.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"])
    state.step, state.seconds, state.curve = saved["step"], saved["seconds"], saved["curve"]
    return state


def _step(state: State, plan: Plan, read: Corpus, rate: float) -> Tensor:
    """One step; the mean loss on the rows that are text, in bits."""
    # Each step has random numbers of its own, so that one that is done again is the same.
    generator = torch.Generator().manual_seed(plan.seed * 1_000_000_007 + state.step)
    drawn = batches.draw(read.train, generator, batch=plan.batch, length=plan.length)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = state.model(drawn.ids)
    asked = drawn.targets != IGNORED
    losses = measures.losses(logits, drawn.targets)
    state.optimizer.zero_grad()
    (losses.sum() / asked.sum()).backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.step()
    state.step += 1
    text = plan.batch - drawn.repeated
    return losses.detach()[:text].sum() / asked[:text].sum() / math.log(2)


def _point(state: State, plan: Plan, read: Corpus, losses: list[Tensor]) -> Point:
    state.model.eval()
    seen = measures.measured(state.model, read.held_out, windows=plan.windows, length=plan.length)
    state.model.train()
    return {
        "step": state.step,
        "minutes": round(state.seconds / 60, 2),
        "tokens": state.step * plan.batch * plan.length,
        "training_bits_per_byte": round(float(torch.stack(losses).mean()), 4),
        **seen,
    }


def _summary(state: State, plan: Plan, read: Corpus, file: Path) -> dict[str, Any]:
    shipped = weights.read_weights(file.read_bytes(), plan.sizes)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus": {
            "what": "the .py files of Python's standard library",
            "left_out": sorted(corpus.LEFT_OUT),
            "files": read.files,
            "bytes": read.bytes,
            "held_out_files": read.held_out_files,
            "held_out_bytes": read.held_out_bytes,
        },
        "repeated_slices": f"one row in {batches.REPEATED_ONE_IN}, half of them of random bytes; "
        "their first copy is not asked for",
        "arithmetic": "bfloat16 under autocast, weights in float32; stored and measured as float16",
        "plan": asdict(plan) | {"sizes": plan.sizes._asdict()},
        "parameters": parameters_of(shipped),
        "file_bytes": file.stat().st_size,
        "steps": state.step,
        "minutes": round(state.seconds / 60, 1),
        "tokens": state.step * plan.batch * plan.length,
        **measures.measured(shipped, read.held_out, windows=plan.final_windows, length=plan.length),
        "curve": state.curve,
    }


def _log(point: Point) -> None:
    log.info("%s", json.dumps(point))


def main(
    out: Annotated[Path, typer.Option(help="Where weights, figures and checkpoint go.")],
    *,
    minutes: Annotated[float, typer.Option(help="How long to train, on a clock.")] = 40.0,
    steps: Annotated[int | None, typer.Option(help="How long to train, instead.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
) -> None:
    """Train the small language model on the standard library of this Python."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(out, plan=Plan(minutes=minutes, steps=steps, seed=seed), report=_log)


if __name__ == "__main__":
    typer.run(main)
