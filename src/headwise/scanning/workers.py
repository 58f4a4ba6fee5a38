"""Scan of a corpus in several processes of this machine, by the standard library's `spawn`."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.scanning.parts import divide_documents, open_corpus
from headwise.scanning.selection import select_statistics
from headwise.scanning.source import TextToRead, open_model
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.support.progress import Progress, no_progress

READY = -1  # what a process sends once it has loaded the model


class _Worker:
    """A process that runs `_serve`, the pipe to it, and the document that it scans."""

    def __init__(self, *arguments: object) -> None:
        context = get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, *arguments), daemon=True)
        self.process.start()
        there.close()
        self.index: int | None = None


def threads_of_worker(processes: int) -> int:
    """Return OMP_NUM_THREADS, or the cores of this machine divided among processes."""
    if (chosen := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        return max(1, int(chosen))
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // processes)


def scan_in_processes(
    model: Mapping[str, Any],
    texts: Sequence[TextToRead],
    out: str | PathLike[str],
    *,
    processes: int,
    device: str = "cpu",
    notes: Sequence[str] = (),
    progress: Progress = no_progress,
    **options: Any,
) -> dict[str, str]:
    """Scan the documents of a corpus in several processes, each with a model of its own.

    A process takes the next document, longest first, as soon as it is free. One that is killed
    costs its document, and the others go on. The same call scans what is missing. A script that
    makes the call needs `if __name__ == "__main__"`.

    Args:
        model: the arguments of `open_model` without the device, such as ``{"folder": "llama"}``.
        texts: the documents, from `read_texts`.
        out: the folder, as for `scan_part`.
        processes: the number of processes.
        device: where the models run; with "cuda", each process has the device of its number.
        notes: the notes on the model, where they are more than those of its folder.
        progress: called with a document, the number of documents that are done, and of all.
        options: as for `scan_part`.

    Returns:
        The reason for each document that was not scanned, by its name.

    Raises:
        HeadwiseError: as `open_model` and `scan_part`.
    """
    chosen, _ = select_statistics(options.get("statistics"))
    # Those of the standard set hold functions, which cannot be sent.
    options["statistics"] = [s.definition.name if s in STANDARD else s for s in chosen]
    corpus = {"texts": texts, "out": Path(out), **options}
    (order,) = divide_documents([text.ids.numel() for text in texts], 1)
    threads, workers = threads_of_worker(processes), []
    for number in range(min(processes, len(texts))):
        numbered = f"cuda:{number % max(1, torch.cuda.device_count())}"
        place = {"device": numbered if device == "cuda" else device}
        workers.append(_Worker(threads, {**model, **place}, tuple(notes), corpus))
    try:
        return _hand_out_documents(workers, deque(order), texts, progress)
    finally:
        for worker in workers:
            worker.process.kill()  # one that still scans: its document is absent
            worker.process.join()


def _hand_out_documents(
    workers: list[_Worker], waiting: deque[int], texts: Sequence[TextToRead], progress: Progress
) -> dict[str, str]:
    failures: dict[str, str] = {}
    by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in workers}
    done, ended = 0, "no process was left"
    while by_pipe:
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]
            try:
                answer = worker.pipe.recv()
            except (EOFError, ConnectionError):
                del by_pipe[pipe]
                worker.process.join()
                code = worker.process.exitcode or 0
                ended = f"its process ended with status {code}"
                if code < 0:
                    ended = f"its process was ended by {signal.Signals(-code).name}"
                if worker.index is not None:
                    failures[texts[worker.index].name] = ended
                continue
            if isinstance(answer, HeadwiseError):
                if worker.index is None:  # it cannot begin, and no other can
                    raise answer
                failures[texts[worker.index].name] = answer.saw
            elif answer != READY:
                done += 1
                progress(texts[answer].name, done, len(texts))
            worker.index = waiting.popleft() if waiting else None
            with suppress(ConnectionError):  # its end is noticed above
                worker.pipe.send(worker.index)
            if worker.index is None:
                del by_pipe[pipe]
    return failures | {texts[index].name: ended for index in waiting}


def _serve(
    pipe: Connection,
    threads: int,
    opened_with: Mapping[str, Any],
    notes: tuple[str, ...],
    corpus: Mapping[str, Any],
) -> None:
    """Scan the documents whose numbers come through the pipe, until None or its end.

    ``opened_with`` and ``corpus`` are the arguments of `open_model` and of `open_corpus`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    torch.set_num_threads(threads)
    try:
        folder = open_corpus(replace(open_model(**opened_with), notes=notes), **corpus)
    except HeadwiseError as error:
        pipe.send(error)
        return
    pipe.send(READY)
    with suppress(EOFError, ConnectionError):  # the parent has ended
        while (index := pipe.recv()) is not None:
            answer: object = index
            try:
                folder.scan_or_load_document(index)
            except HeadwiseError as error:
                answer = error
            pipe.send(answer)
