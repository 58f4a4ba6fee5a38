"""``headwise prune`` and ``headwise regroup``: cuts of a stored model, measured on a text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli import output
from headwise.errors import CheckpointError
from headwise.support.files import make_parent_and_require_writable, write_whole

if TYPE_CHECKING:
    from headwise.surgery._prune import PruningPlan
    from headwise.surgery._regroup import RegroupPlan
    from headwise.surgery.folders import Written
    from headwise.surgery.stored import StoredSubject

SCHEMA = 1  # version of the JSON form

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", show_default=False, help="A folder from save_pretrained, with a tokenizer."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A text file, a sequence on each line: the lines in turns to fit on, and held out.",
        show_default="400 English sentences that ship with headwise",
    ),
]
Out = Annotated[Path, typer.Option(help="A new folder for the smaller model.", show_default=False)]
Form = Annotated[
    Literal["auto", "plain", "code", "full", "headwise"],
    typer.Option(
        help="What loads the folder: plain transformers, and so with the same number of heads in "
        "each layer; transformers with a file of code in the folder; plain transformers at full "
        "size, with zeros; or headwise.surgery.load. auto is plain where that costs no more, else "
        "code."
    ),
]
Length = Annotated[int, typer.Option(min=2, help="Most tokens of a line.")]
Page = Annotated[Path | None, typer.Option(help="The HTML page to write.", show_default="OUT.html")]
Keep = Annotated[
    float, typer.Option(help="The share of heads that stays; 1.0 takes none, and measures nothing.")
]
By = Annotated[
    Literal["ablation", "gradient"], typer.Option(help="How the importance of a head is measured.")
]
Repair = Annotated[
    Literal["mean", "zero", "refit"],
    typer.Option(
        help="What stands in for a head: its mean output, nothing, or an output projection that "
        "is fitted where held-out tokens agree."
    ),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="1, or more to measure again without the heads that are gone.")
]
Take = Annotated[
    Literal["groups", "heads"] | None,
    typer.Option(
        help="What goes at once: a kv head with its query heads, or one query head of each.",
        show_default="groups where the share takes one, else heads",
    ),
]
DryPrune = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the plan and stop. Nothing is written but a hidden file of effects beside OUT, "
        "so that the run itself need not measure them again.",
    ),
]
KvHeads = Annotated[
    int,
    typer.Option(
        help="The number of kv heads in each layer, a divisor of the present one.",
        show_default=False,
    ),
]
Merge = Annotated[
    Literal["fitted", "aligned", "mean"],
    typer.Option(
        help="How several kv heads become one: by the maps that lose least; by their mean, after "
        "each is turned towards the others; or by their mean."
    ),
]
DryRegroup = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")
]


def prune(
    model: Model,
    *,
    data: Data = None,
    out: Out,
    keep: Keep = 0.75,
    by: By = "ablation",
    rounds: Rounds = 1,
    take: Take = None,
    repair: Repair = "mean",
    form: Form = "auto",
    length: Length = 128,
    page: Page = None,
    trust_remote_code: output.TrustRemoteCode = False,
    dry_run: DryPrune = False,
    as_json: output.AsJson = False,
) -> None:
    """Take the heads out of a stored model that matter least.

    First the plan with its predicted effect, then the measurement on held-out
    lines, the folder and its check in a new process, and a page with the curve.
    To resume an interrupted run, repeat the command: a hidden file beside OUT
    keeps the effects of batches of lines with which all heads were measured.
    """

    def make_plan(
        opened: StoredSubject, progress: output.Progress
    ) -> tuple[StoredSubject, PruningPlan]:
        with _saying_how_to_resume(opened.journal):
            return opened.plan_prune(keep, by, repair, progress, rounds=rounds, take=take)

    call = f"prune(model, inputs, {keep=}, {by=}, {rounds=}, {repair=}, even={form == 'plain'})"
    shared = _Command(model, data, out, form, length, page, trust_remote_code, dry_run, as_json)
    if keep == 1:
        shared.write_whole_model()
    else:
        shared.run(call, make_plan)


def regroup(
    model: Model,
    *,
    kv_heads: KvHeads,
    out: Out,
    data: Data = None,
    merge: Merge = "fitted",
    form: Form = "auto",
    length: Length = 128,
    page: Page = None,
    trust_remote_code: output.TrustRemoteCode = False,
    dry_run: DryRegroup = False,
    as_json: output.AsJson = False,
) -> None:
    """Make fewer kv heads, which more query heads share.

    First the plan with what each layer loses, then the measurement on held-out
    lines, the folder and its check in a new process, and a page with the curve.
    """

    def make_plan(
        opened: StoredSubject, progress: output.Progress
    ) -> tuple[StoredSubject, RegroupPlan]:
        return opened.plan_regroup(kv_heads, merge, progress)

    shared = _Command(model, data, out, form, length, page, trust_remote_code, dry_run, as_json)
    shared.run(f"regroup(model, inputs, {kv_heads=}, {merge=})", make_plan)


@dataclass(frozen=True)
class _Command:
    """The arguments that both commands take, by the names of their options."""

    model: Path
    data: Path | None
    out: Path
    form: Literal["auto", "plain", "code", "full", "headwise"]
    length: int
    page: Path | None
    trust_remote_code: bool
    dry_run: bool
    as_json: bool

    def run(
        self,
        call: str,
        make_plan: Callable[
            [StoredSubject, output.Progress], tuple[StoredSubject, PruningPlan | RegroupPlan]
        ],
    ) -> None:
        """Print a plan, measure it, write folder and page; ``call`` does the same from Python."""
        start, console = time.perf_counter(), output.make_console(stderr=True)
        with output.progress_bar(console, "loading torch") as progress:
            from headwise.reports.surgery import render_cut
            from headwise.scanning.source import make_model_title
            from headwise.surgery import stored

            page = self._prepare_page()
            options: Any = {"form": self.form, "length": self.length, "call": call}
            options["trust_remote_code"] = self.trust_remote_code
            opened = stored.open_for_cut(self.model, self.data, self.out, **options)
            opened, plan = make_plan(opened, progress)
        folder = str(opened.plan_folder(plan.cut))  # a plan holds the last attention that it cut
        if not self.as_json:
            output.print_lines([opened.note, str(plan), folder])
        if self.dry_run:
            self._report_plan(plan, opened.journal)
            return
        with output.progress_bar(console, "measuring") as progress:
            result = plan.measure(progress, share=True)
            written = opened.write(result.cut, progress)
            difference = opened.check(result.cut)
            costs = opened.measure_costs(plan.heads, result.cut, result.model, written)
        loading = self._list_loading_lines(result.model, written)
        facts = [str(costs), f"form {written.form}", result.way, f"headwise.surgery.{call}"]
        page = write_whole(page, render_cut(result, make_model_title(self.model), loading, facts))
        lines = [
            *result.result_lines(),
            str(costs),
            f"{written.folder}: a new process loads it; its outputs are within {difference:.1e} of "
            "the same cut at full size",
            f"form {written.form}: {'; '.join(loading)}",
        ]
        values = {"schema": SCHEMA, **result.values(), "costs": costs.values(), "loading": loading}
        values |= {"folder": str(written.folder), "form": written.form, "changes": written.changes}
        values |= {"bytes": written.nbytes, "bytes_before": written.nbytes_before}
        output.print_result(
            page,
            start=start,
            show=lambda console: console.print(*lines, sep="\n", markup=False, soft_wrap=True),
            as_json=(lambda: values) if self.as_json else None,
        )

    def write_whole_model(self) -> None:
        """Write the folder without a cut: one with ``pruned_heads`` then loads again."""
        from headwise.surgery import Cut, load, plan_folder, write

        options: Any = {"form": self.form, "trust_remote_code": self.trust_remote_code}
        plan = plan_folder(Cut(), self.model, **options)
        lines = [f"no head is taken, and nothing measured: {plan}"]
        values: dict[str, Any] = {"schema": SCHEMA}
        if not self.dry_run:
            written = write(Cut(), self.model, self.out, **options)
            model = load(written.folder, trust_remote_code=self.trust_remote_code)
            loading = self._list_loading_lines(model, written)
            lines.append(f"form {written.form}: {'; '.join(loading)}")
            values |= {"folder": str(written.folder), "form": written.form, "loading": loading}
        output.print_lines(lines, values if self.as_json else None)

    def _prepare_page(self) -> Path:
        """Return the path of the page; raise where it could not be written in the end."""
        from headwise.reports.pictures import require_matplotlib

        page = self.out.with_name(f"{self.out.name}.html") if self.page is None else self.page
        if not self.dry_run:
            require_matplotlib()
            if page.exists():
                raise CheckpointError(
                    saw=f"{page} exists already",
                    needed="a new file, so that no page is lost",
                    do="name another one with --page, or remove this one",
                )
            make_parent_and_require_writable(page)
        return page

    def _report_plan(self, plan: PruningPlan | RegroupPlan, journal: Path) -> None:
        from headwise.surgery import PruningPlan

        lines, values = list[str](), {"schema": SCHEMA, "layers": plan.table()}
        if isinstance(plan, PruningPlan):
            kept = str(journal) if journal.is_file() else None  # gradients are not kept
            values |= {"predicted": -plan.choice.predicted, "journal": kept}
            effects = f"the effects of heads, in {kept}, which the run itself reads."
            lines = [f"Nothing is written but {effects}"] if kept else []
        output.print_lines(lines, values if self.as_json else None)

    def _list_loading_lines(self, model: Any, written: Written) -> list[str]:
        """Return the lines of Python that load the folder."""
        from headwise.surgery.folders import find_loader

        kind, given = find_loader(written.folder, model), repr(str(written.folder))
        if self.trust_remote_code or written.form == "code":
            given += ", trust_remote_code=True"
        if written.form == "headwise":
            return ["import headwise.surgery", f"model = headwise.surgery.load({given})"]
        lines = [f"from transformers import {kind}", f"model = {kind}.from_pretrained({given})"]
        if written.form == "code" and (written.folder / "tokenizer_config.json").is_file():
            lines[0] += ", AutoTokenizer"  # which asks without the flag, and waits for an answer
            lines.append(f"tokenizer = AutoTokenizer.from_pretrained({given})")
        return lines


@contextmanager
def _saying_how_to_resume(journal: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = f"effects of whole batches are in {journal}" if journal.is_file() else "nothing kept"
        output.make_console(stderr=True).print(
            f"interrupted; {kept}; to go on, repeat the command", markup=False, soft_wrap=True
        )
        raise
