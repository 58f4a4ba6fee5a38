"""``headwise scan``: statistics of every attention head of a stored model."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from headwise.cli import output
from headwise.errors import OptionError, join_error_lines
from headwise.support.files import make_parent_and_require_writable
from headwise.support.text import describe_count, escape_unprintable, list_some

if TYPE_CHECKING:
    from headwise.reports.report import ScanReport
    from headwise.scanning.parts import Part, Words
    from headwise.scanning.plan import PlannedScan
    from headwise.scanning.result import HeadScan


def _split_names(values: list[str] | None) -> tuple[str, ...] | None:
    """Split names at commas, so that ``a,b`` and ``a --stats b`` are the same."""
    if not values:
        return None
    return tuple(name for part in values for name in part.replace(" ", "").split(",") if name)


def _names(words: str, default: str = "all") -> Any:
    return Option(callback=_split_names, help=words, show_default=default)


MODEL_HELP = (
    "A folder with a model of transformers, or weights that headwise converted. Nothing is "
    "downloaded."
)
PART_HELP = (
    "Scan part I of N of a corpus, such as 3/8; auto for the numbers of torchrun or of a Slurm "
    "array. Without a page: --merge writes it."
)
WITH_HELP = (
    "Show what changed in another model, which reads the same input, or in a scan in a folder that "
    "--out wrote."
)
TOP_KEYS_HELP = (
    "Heads of which the page shows the 4 largest weights of every token: 3.7,4.0 (layer.head), all "
    "or none."
)
FEW = "the largest of all heads, and 4 of those that stand out"
MAP_SIZE = "one token a block up to 512 tokens, else 160; 128 for a corpus"
MOST_BLOCKS = 1024  # that a map may have, as in headwise.scanning.Map


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The options of ``headwise scan``, from which typer reads them."""

    model_dir: Annotated[
        Path | None, Argument(metavar="MODEL_DIR", show_default=False, help=MODEL_HELP)
    ] = None
    demo: Annotated[
        bool, Option("--demo", help="Scan the small model that ships with headwise.")
    ] = False
    text: Annotated[
        list[Path] | None,
        Option(help="A text file to read; several files or a folder are read as a corpus."),
    ] = None
    tokens: Annotated[Path | None, Option(help="A file of token ids to read.")] = None
    random_repeats: Annotated[
        bool,
        Option("--random-repeats", help="Read random tokens twice, to show induction and copying."),
    ] = False
    length: Annotated[
        int | None,
        Option(help="Most tokens to read.", show_default="those of the model, up to 4,096"),
    ] = None
    stats: Annotated[list[str] | None, _names("Statistics by name, separated by commas.")] = None
    layers: Annotated[list[str] | None, _names("Layers by number or pattern: '*layer.3.*'.")] = None
    skip_empty: Annotated[
        bool, Option("--skip-empty", help="Leave out texts of fewer than two tokens.")
    ] = False
    device: Annotated[str, Option(help="Where the model runs: cpu, cuda or cuda:1.")] = "cpu"
    dtype: Annotated[
        str | None,
        Option(
            help="Run the model in float64, float32, bfloat16 or float16.",
            show_default="as its weights are stored",
        ),
    ] = None
    top_keys: Annotated[list[str] | None, _names(TOP_KEYS_HELP, FEW)] = None
    map_cells: Annotated[
        int | None, Option(help="Most blocks of a map on each side.", show_default=MAP_SIZE)
    ] = None
    out: Annotated[
        Path | None, Option(help="A folder for the scan, in which a run can be resumed.")
    ] = None
    page: Annotated[Path, Option(help="The HTML page to write.")] = Path("headwise-scan/index.html")
    trust_remote_code: output.TrustRemoteCode = False
    force: Annotated[bool, Option("--force", help="Write over an earlier page.")] = False
    skip_memory_check: Annotated[
        bool, Option("--skip-memory-check", help="Start even if the memory may not suffice.")
    ] = False
    processes: Annotated[
        int | None,
        Option(help="Processes on this machine that share a corpus.", show_default="one", min=1),
    ] = None
    part: Annotated[
        str | None, Option("--part", metavar="I/N", help=PART_HELP, show_default="all")
    ] = None
    merge: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Merge the parts in these folders, and write the page."),
    ] = None
    other: Annotated[
        Path | None, Option("--with", metavar="DIR", show_default=False, help=WITH_HELP)
    ] = None
    as_json: Annotated[
        bool, Option("--json", help="Print every number as JSON instead of pictures.")
    ] = False

    def command_with_top_keys(self, scan: HeadScan) -> str:
        """Return the same command for more single tokens, with {heads} for their heads.

        Its scan goes to another folder, unless the one here holds the top keys of all heads.
        """
        summaries = [layer.summaries.get("top_keys_of_every_query") for layer in scan.layer_scans]
        holds_all = all(x is not None and bool((x["row"] >= 0).all()) for x in summaries)
        chosen = self
        if self.out is not None and not holds_all:
            chosen = replace(self, out=self.out.with_name(f"{self.out.name}-top-keys"))
        words = ["headwise", "scan", "--demo" if self.demo else str(self.model_dir)]
        for path in self.text or ():
            words += ["--text", str(path)]
        names = ("tokens", "random_repeats", "length", "out", "skip_empty", "device", "dtype")
        for name in (*names, "trust_remote_code"):
            value, default = getattr(chosen, name), getattr(ScanOptions, name)
            if value != default:
                words += [output.option_text(name), *([] if value is True else [str(value)])]
        words += [] if self.other is None else ["--with", str(self.other)]
        words += ["--page", str(self.page), "--force"]
        return " ".join([*map(shlex.quote, words), "--top-keys", "{heads}"])

    def require_sense(self) -> None:
        """Raise OptionError if options contradict each other, are missing or misspelt."""
        self._require_one_way()
        if not self.merge and (self.model_dir is None) != self.demo:
            raise OptionError(
                saw="no MODEL_DIR" if not self.demo else f"{self.model_dir} and --demo",
                needed="one model: a folder, or the one that ships with headwise",
                do="headwise scan MODEL_DIR, or headwise scan --demo",
            )
        if self.part is None and self.page.is_file() and not self.force:
            raise OptionError(
                saw=f"--page {self.page}, which is there already",
                needed="a new file for the page of this scan",
                do="--page with another name, or --force to write over the earlier page",
            )
        self._require_one_input()
        self._require_comparison()
        if self.map_cells is not None and not 0 < self.map_cells <= MOST_BLOCKS:
            raise OptionError(
                saw=f"--map-cells {self.map_cells}",
                needed=f"the most blocks on each side, from 1 to {MOST_BLOCKS:,}",
                do="--map-cells 128",
            )
        if self.stats is not None:
            from headwise.scanning.statistics.catalogue import STANDARD, unknown_statistic_error

            known = [statistic.definition.name for statistic in STANDARD]
            if unknown := [name for name in self.stats if name not in known]:
                do = "choose from these"
                raise unknown_statistic_error(unknown[0], known, do=do, parameter="stats")

    def _given(self, *names: str) -> list[str]:
        given = [name for name in names if getattr(self, name)]
        return ["MODEL_DIR" if name == "model_dir" else output.option_text(name) for name in given]

    @property
    def _is_corpus(self) -> bool:
        texts = self.text or ()
        return len(texts) > 1 or any(path.is_dir() for path in texts)

    def _require_one_way(self) -> None:
        shared = (self.processes or 1) > 1
        used = self._given("merge", "part", *(["processes"] if shared else []))
        if self.merge:
            used += self._given("model_dir", "demo", "text", "tokens", "random_repeats")
        if len(used) > 1:
            raise OptionError(
                saw=" and ".join(used[:2]),
                needed="parts or processes, or folders that hold all texts already",
                do=f"leave {used[1]} out",
            )
        what = f"{self.processes} processes" if shared else f"--part {self.part}"
        if used and not self.merge and self.out is None:
            raise OptionError(
                saw=f"{what} without --out",
                needed="a folder, into which every process writes the scans of its texts",
                do="--out DIR",
            )
        if shared and not self._is_corpus:
            raise OptionError(
                saw=f"{what} for one text",
                needed="several texts, since a text is read by one process",
                do="--text with a folder or with several files, or a single process",
            )

    def _require_comparison(self) -> None:
        """Raise OptionError for what --with cannot be compared with."""
        if self.other is None:
            return
        if self.part is not None:
            raise OptionError(
                saw="--part and --with",
                needed="a page, which --part does not write",
                do="--with together with --merge",
            )
        if (self.merge or self._is_corpus) and not self.saved_other:
            raise OptionError(
                saw=f"several texts, and --with {self.other}, which holds no scan",
                needed="a scan of the same texts",
                do="scan that model with --out FOLDER first, then --with FOLDER",
            )

    @property
    def saved_other(self) -> Path | None:
        """The saved scan in the folder of --with, if there is one."""
        from headwise.scanning.parts import SCAN

        path = None if self.other is None else self.other / SCAN
        return path if path is not None and path.is_file() else None

    def _require_one_input(self) -> None:
        """Raise OptionError for several inputs, or for a place that cannot hold their scans."""
        inputs = self._given("text", "tokens", "random_repeats")
        if len(inputs) > 1:
            raise OptionError(
                saw=" and ".join(inputs),
                needed="a single input",
                do=f"leave {inputs[1]} out, or scan twice",
            )
        if self.out is None and self._is_corpus:
            raise OptionError(
                saw="several texts, and no --out",
                needed="a folder for the scan of each text, in which the run can be resumed",
                do="--out DIR",
            )
        model, out = self.model_dir, self.out
        if model is not None and out is not None and out.resolve() == model.resolve():
            raise OptionError(
                saw=f"--out {out}, which is the folder of the model",
                needed="a folder for the scan alone: its .safetensors would be read as weights",
                do="--out with the path of another folder",
            )
        if out is not None and out.exists() and not out.is_dir():
            raise OptionError(
                saw=f"--out {out}, which is a file",
                needed="a folder to write into",
                do="--out with the path of a folder",
            )


def scan(**options: Any) -> None:
    """Run a model on a text, and show statistics of every attention head.

    Prints the heads that stand out, and writes a page with everything. To resume an
    interrupted corpus, run the same command again. --processes N shares a corpus among
    N processes; --part I/N and --merge share it among machines.
    """
    start, given = time.perf_counter(), ScanOptions(**options)
    given.require_sense()
    if given.part is not None:
        _scan_and_print_part(given)
        return
    merges = given.merge
    report = _merge_and_report(merges, given) if merges else run_scan_with_progress(given)
    if given.other is not None:
        report = _compare_with(report, given, given.other)
    _print_report(report, given, start=start)


scan.__signature__ = signature(ScanOptions, eval_str=True)  # type: ignore[attr-defined]


def _print_report(report: ScanReport, options: ScanOptions, *, start: float) -> None:
    from headwise.reports import page, terminal
    from headwise.scanning import parts

    output.print_result(
        page.save_scan_page(options.page, report),
        start=start,
        show=lambda console: terminal.print_input_and_standouts(report, console),
        as_json=report.as_json if options.as_json else None,
        details=lambda console: terminal.print_statistic_grid(report, console),
    )
    if (out := options.out or next(iter(options.merge or ()), None)) is not None:
        console = output.make_console(stderr=options.as_json)
        files = f"{parts.SCAN} and {parts.TABLE}"
        if not options.merge:
            files = f"{parts.SCAN}, {parts.TABLE} and {parts.PARTS}, with a file for each text"
        kept = f"The scan is saved as {files}:"
        console.print(kept, str(out.absolute()), sep="\n", markup=False, soft_wrap=True)


# ---- the run ------------------------------------------------------------------------------------


def run_scan_with_progress(options: ScanOptions) -> ScanReport:
    """Run the scan, with the estimate and the progress on standard error."""
    from headwise.scanning.parts import words_of_model

    make_parent_and_require_writable(options.page)
    with _planned(options) as (plan, console), output.progress_bar(console, "reading") as progress:
        steps = _count_calls(progress, plan.calls, len(plan.texts))
        if options.out is None:
            (text,) = plan.texts
            words = words_of_model(plan.model, plan.texts)
            return _report(plan.scan_text(text, steps), words, options)
        if (options.processes or 1) > 1:
            _scan_in_processes(plan, options, progress)
        else:
            _scan_part(plan, options, (1, 1), steps)
    return _merge_and_report([options.out], options)


def _scan_and_print_part(options: ScanOptions) -> None:
    from headwise.scanning import parts

    words = (options.part or "").split("/")
    given: Any = tuple(int(word) if word.isdecimal() else word for word in words)
    given = "auto" if options.part == "auto" else given  # `number_part` checks them
    numbers, device = parts.number_part(given, options.device)
    options = replace(options, device=device or "cpu")
    with _planned(options) as (plan, console), output.progress_bar(console, "reading") as progress:
        files = _scan_part(plan, options, numbers, progress)
    assert options.out is not None
    done, count = len(parts.list_parts(options.out)), len(plan.texts)
    merge = f" To merge them: headwise scan --merge {options.out}" if done == count else ""
    lines = [
        f"Part {numbers[0]} of {numbers[1]} is done: {describe_count(len(files), 'text')}.",
        f"{done} of {describe_count(count, 'text')} are in {options.out}.{merge}",
    ]
    result = {"part": list(numbers), "files": [str(file) for file in files], "lines": lines}
    output.print_lines(lines, result if options.as_json else None)


def _merge_and_report(folders: Sequence[Path], options: ScanOptions) -> ScanReport:
    """Merge a corpus; exit with status 1 if documents are missing, doubled or foreign."""
    from headwise.scanning import parts

    folder_parts = parts.find_parts(folders)
    if folder_parts.faults:
        _exit_with_no(
            "; ".join(folder_parts.faults),
            "one scan of each document",
            "scan the missing documents, or leave out the folder with other documents",
        )
    merged = parts.merge_parts(folders, options.out)
    report = _report(merged, folder_parts.corpus.words, options)
    return replace(report, saved=str((options.out or folders[0]) / parts.SCAN))


def _compare_with(report: ScanReport, options: ScanOptions, folder: Path) -> ScanReport:
    from headwise.scanning import parts
    from headwise.scanning.result import HeadScan

    alone = replace(options, model_dir=folder, demo=False, other=None, out=None, merge=None)
    if (saved := options.saved_other) is None:
        other = run_scan_with_progress(alone)
    else:
        words = parts.find_parts([folder]).corpus.words
        other = _report(HeadScan.load(saved), words, alone)
    name = escape_unprintable(folder.resolve().name)
    name = next((x for x in (other.title, name) if x != report.title), str(folder))
    texts = report.read if other.read == report.read else f"{report.read}; {name}: {other.read}"
    return replace(
        report,
        second=other.scan,
        second_name_of=other.name_of,
        names=(report.title, name),
        read=texts,
        notes=(*report.notes, *(f"{name}: {note}" for note in other.all_notes)),
    )


def _exit_with_no(*lines: str) -> None:
    output.print_error(join_error_lines(*lines))
    raise typer.Exit(output.NO)


def _report(scan: HeadScan, words: Words, options: ScanOptions) -> ScanReport:
    from headwise.reports.report import ScanReport

    tokens = words["tokens"]
    return ScanReport(
        scan=scan,
        title=escape_unprintable(words["title"]),
        about=words["about"],
        read=escape_unprintable(words["read"]),
        chosen=words["chosen"],
        notes=tuple(words["notes"]),
        name_of=(lambda token: str(tokens.get(str(token), token))) if tokens else None,
        command=None if options.merge else options.command_with_top_keys(scan),
        top_keys="all" if list(options.top_keys or ()) == ["all"] else "standouts",
    )


@contextmanager
def _planned(options: ScanOptions) -> Iterator[tuple[PlannedScan, output.Console]]:
    """Yield the plan of the scan, once its opening lines are printed, and the console of progress.

    If the user interrupts, print a line on the saved files, and exit with status 130.
    """
    console, plan = output.make_console(stderr=True), None
    try:
        plan = _plan(options, console)
        yield plan, console
    except KeyboardInterrupt:
        message = "Interrupted before the scan began."
        if plan is not None:
            message = "Interrupted; nothing is saved without --out."
        if plan is not None and options.out is not None:
            from headwise.scanning.parts import list_parts

            done = f"{len(list_parts(options.out))} of {describe_count(len(plan.texts), 'text')}"
            message = f"Interrupted; {done} are in {options.out}. "
            message += "Run the same command again to resume."
        console.print(message, markup=False)
        raise typer.Exit(output.INTERRUPTED) from None


def _plan(options: ScanOptions, console: output.Console) -> PlannedScan:
    with output.progress_bar(console, "loading the model"):
        import torch

        from headwise.scanning import parts, plan, source, workers

        processes, length = options.processes or 1, options.length
        if processes > 1:
            torch.set_num_threads(workers.threads_of_worker(processes))
        if options.model_dir is not None and not options.skip_memory_check:
            plan.require_room_for_model(options.model_dir, copies=processes)
        model = source.open_model(
            options.model_dir,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
        if options.text:
            empty = options.skip_empty
            texts = source.read_texts(model, options.text, length=length, skip_empty=empty)
        elif options.tokens is not None:
            texts = [source.read_stored_tokens(model, options.tokens, length)]
        elif options.random_repeats:
            texts = [source.make_repeated_tokens(model, length)]
        else:
            texts = [source.read_default_text(model, length)]
        planned = plan.plan_scan(
            model,
            texts,
            statistics=options.stats,
            # A number stands for layers with this number in the name, which may end with the
            # number of the run or call in brackets.
            layers=options.layers
            and tuple(
                pattern.format(name)
                for name in options.layers
                for pattern in (("*.{}.*", "*.{}", "*.{} (*") if name.isdecimal() else ("{}",))
            ),
            top_keys=options.top_keys,
            map_cells=options.map_cells or (parts.MAP_CELLS if len(texts) > 1 else None),
            processes=processes,
            checks_memory=not options.skip_memory_check,
        )
    console.print(_opening_lines(planned, options), markup=False)
    return planned


def _opening_lines(plan: PlannedScan, options: ScanOptions) -> str:
    from headwise.scanning import parts

    read = parts.words_of_model(plan.model, plan.texts)["read"]
    begins = escape_unprintable(f"{plan.model.title} reads {read}")
    begins += f", in {options.processes} processes" if (options.processes or 1) > 1 else ""
    begins += f", part {options.part}" if options.part else ""
    begins += "." if plan.estimate is None else f": {plan.estimate}, by estimate."
    done, texts = len(parts.list_parts(options.out)) if options.out else 0, len(plan.texts)
    if not done:
        return begins
    if done < texts:
        return f"{begins}\n{done} of {texts} texts are in {options.out} already."
    which = "The text is" if texts == 1 else f"All {describe_count(texts, 'text')} are"
    return f"{begins}\n{which} in {options.out} already; nothing is read again."


def _scan_part(
    plan: PlannedScan, options: ScanOptions, part: Part, progress: output.Progress
) -> Sequence[Path]:
    from headwise.scanning.parts import scan_part

    assert options.out is not None
    chosen: dict[str, Any] = {"statistics": plan.statistics, "layers": plan.layers}
    chosen["length"] = options.length
    return scan_part(plan.model, plan.texts, options.out, part=part, progress=progress, **chosen)


def _scan_in_processes(plan: PlannedScan, options: ScanOptions, progress: output.Progress) -> None:
    from headwise.scanning.workers import scan_in_processes

    assert options.out is not None
    plan.model.model.to("meta")  # the processes have models of their own
    failures = scan_in_processes(
        plan.model.opened_with,
        plan.texts,
        options.out,
        processes=options.processes or 1,
        device=options.device,
        statistics=plan.statistics,
        layers=plan.layers,
        length=options.length,
        notes=plan.model.notes,
        progress=progress,
    )
    if failures:
        shown = list_some([f"{name} ({reason})" for name, reason in failures.items()], 5)
        _exit_with_no(
            f"{len(failures)} of {len(plan.texts)} texts were not scanned: {shown}",
            "a scan of each text",
            "run the same command again: it scans what is missing",
        )


def _count_calls(progress: output.Progress, calls: int, documents: int) -> output.Progress:
    """Return progress over the attention calls of all documents, from that of `scan_part`."""
    name, before = "", 0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal name, before
        if total:  # a document begins or is done; else an attention call of it
            name, before, done = stage, done, 0
        steps = min(calls * documents, before * calls + done)
        progress((name or stage)[-26:], steps, calls * documents)

    return report
