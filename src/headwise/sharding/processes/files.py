"""Conversion of a checkpoint over the ranks of a job: each rank writes some files of the target.

Rank 0 makes the staging folder and renames it at the end. Each rank has a journal of its own in
it, so that any number of ranks, or a single process, resumes the run.
"""

from __future__ import annotations

from functools import partial

from headwise.checkpoints.conversion import ConversionStream
from headwise.checkpoints.plan import ConversionReport, PlannedConversion
from headwise.checkpoints.staging import (
    StagingDir,
    StagingShare,
    read_finished_steps,
    staging_path,
)
from headwise.errors import LostProcessError
from headwise.sharding.processes.job import Job
from headwise.support.progress import Progress

DONE = "bytes done"  # the counter of a job


def convert_in_job(
    job: Job, conversion: PlannedConversion, progress: Progress, *, lost_status: int
) -> ConversionReport | None:
    """Convert a checkpoint over the ranks of a job, as `convert_checkpoint` does in one process.

    Args:
        job: the job.
        conversion: the plan, the same on every rank.
        progress: called on rank 0 with a file's name, the bytes that all ranks have done, and the
            bytes in all.
        lost_status: the status of a failure after which the files stay for a later run. After a
            failure of another status nothing is left.

    Returns:
        The report on rank 0, and None on the others.

    Raises:
        OptionError: another plan on another rank.
        LostProcessError: another rank is lost or has failed.
        HeadwiseError: as `convert_checkpoint`.
    """
    job.require_same({"source and options": conversion.identity})
    with conversion.explain_os_errors():
        if job.rank != 0:
            _write_share(job, conversion, progress)
            return None
        conversion.require_zero_dropped_biases()
        with StagingDir(conversion.target, conversion.output) as staging:
            try:
                staging.begin(conversion.identity)
                _write_share(job, conversion, progress)
            except LostProcessError:
                if _is_resumable_after_failure(job, lost_status):
                    staging.keep()
                raise
            conversion.complete(staging)
    return conversion.report(staging.earlier_run)


def _is_resumable_after_failure(job: Job, lost_status: int) -> bool:
    """True unless a rank has recorded a failure that would come again."""
    try:
        failure = job.first_failure()
    except LostProcessError:
        return True
    return failure is None or failure.status == lost_status


def _write_share(job: Job, conversion: PlannedConversion, progress: Progress) -> None:
    """Run the steps of this rank, and wait until all ranks have run theirs."""
    job.barrier("folder made")
    done = read_finished_steps(staging_path(conversion.target), conversion.identity)
    job.barrier("journals read")  # before a rank writes into one
    steps = divide_steps(conversion, done, count=job.count)[job.rank]
    names = (name for number in steps for name in conversion.steps[number].outputs)
    files = {file for name in names for file, _ in conversion.output.locate_tensor_in_files(name)}
    shown = _JobBytes(job, conversion, progress)
    with StagingShare(
        conversion.target, files, identity=conversion.identity, number=job.rank, done=done
    ) as share:
        job.barrier("files open")  # before a rank fails, and removes the folder
        stream = ConversionStream(conversion.source, conversion.output, share)
        stream.run(conversion.steps, shown.add_step, chosen=steps)
    if job.arrive("files written"):
        job.announce("files written")
    job.wait_for_announcement(
        "files written", meanwhile=partial(shown.show, "waiting for other ranks")
    )


def divide_steps(
    conversion: PlannedConversion, done: frozenset[int], *, count: int
) -> list[frozenset[int]]:
    """Divide the steps among ranks, so that the bytes that are left to do are balanced.

    All steps of a file go to one rank: the next largest file to the rank with the fewest bytes. If
    every step writes a share into each file, the steps are divided in this way.
    """
    groups: dict[str | int, list[int]] = {}
    left: dict[str | int, int] = {}
    for number, step in enumerate(conversion.steps):
        if step.outputs:
            is_shared = conversion.output.division is not None
            group = number if is_shared else conversion.output.file_of_step(step)
            groups.setdefault(group, []).append(number)
            size = 0 if number in done else _step_size(conversion, number)
            left[group] = left.get(group, 0) + size
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for group in sorted(groups, key=lambda group: -left[group]):  # files in order if equal
        rank = loads.index(min(loads))
        shares[rank] += groups[group]
        loads[rank] += left[group]
    return [frozenset(share) for share in shares]


def _step_size(conversion: PlannedConversion, number: int) -> int:
    headers = conversion.source.headers
    return sum(headers[name].nbytes for name in conversion.steps[number].inputs)


class _JobBytes:
    """Progress over the bytes of all ranks, which rank 0 shows."""

    def __init__(self, job: Job, conversion: PlannedConversion, progress: Progress) -> None:
        self._job, self._progress, self._mine = job, progress, 0
        numbers = (n for n, step in enumerate(conversion.steps) if step.outputs)
        self._total = sum(_step_size(conversion, number) for number in numbers)

    def add_step(self, file: str, done: int, _share: int) -> None:
        """Add a step of this rank.

        Raises:
            LostProcessError: another rank is lost or has failed.
        """
        self._job.require_all_ranks_alive()
        self._job.add_to_counter(DONE, done - self._mine)
        self._mine = done
        self.show(file)

    def show(self, file: str) -> None:
        """Report the bytes that all ranks have done."""
        if self._job.rank == 0:
            self._progress(file, self._job.add_to_counter(DONE, 0), self._total)
