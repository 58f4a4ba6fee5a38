"""A conversion in two processes that a fault interrupts, as a program.

    python -m tests.sharding.processes.held_conversion SOURCE TARGET [FAULT]

With the fault "held" a process makes a file beside TARGET and waits at its fourth step. With
"broken" the second process raises an error there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from headwise.checkpoints import conversion
from headwise.checkpoints.conversion import ConversionStream
from headwise.checkpoints.plan import plan_checkpoint_conversion
from headwise.checkpoints.source import open_source
from headwise.cli.output import LOST, PrintedErrors
from headwise.cli.processes import CommandJob, launch_command, rank_count
from headwise.layouts._convert import RoundTripError
from headwise.sharding.processes.files import convert_in_job
from headwise.support.progress import no_progress
from tests.checkpoints import llamas

STEPS = 3  # that a rank does before the fault
TIMEOUT = 3.0  # a process that begins five times later is lost


def convert(source: Path, target: Path, fault: str) -> None:
    conversion.FLUSH_SIZE = 1  # every step is made sure of
    with CommandJob(TIMEOUT, ends_at_once=False) as job:
        run_step, done = ConversionStream._run_step, 0

        def step(self: ConversionStream, *arguments: Any) -> None:
            nonlocal done
            done += 1
            if done > STEPS and fault == "held":
                target.with_name(f"rank-{job.rank}").touch()
                time.sleep(600)
            if done > STEPS and fault == "broken" and job.rank == 1:
                raise RoundTripError(saw="a step", needed="the same bytes", do="nothing")
            run_step(self, *arguments)

        if fault:
            ConversionStream._run_step = step  # type: ignore[method-assign]
        counts = {**llamas.COUNTS, "head_dim": llamas.HEAD_DIM}  # as the command finds them
        plan = plan_checkpoint_conversion(
            open_source(source), target, "llama", "llama-meta", **counts
        )
        report = convert_in_job(job, plan, no_progress, lost_status=LOST)
        if report is not None:
            print(report.earlier_run, report.tensors)


if __name__ == "__main__":
    with PrintedErrors():
        if rank_count() > 1:
            convert(Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:]))
            sys.exit(0)
        command = [sys.executable, "-m", "tests.sharding.processes.held_conversion", *sys.argv[1:]]
        sys.exit(launch_command(command, count=2, interrupted=lambda: "Interrupted."))
