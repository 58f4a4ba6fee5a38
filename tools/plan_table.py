"""Table of `headwise plan` in docs/sharding.md, computed: ``python -m tools.plan_table``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headwise.sharding.costs.cost_plan import CostPlan, plan_costs
from headwise.sharding.costs.step_costs import GIGA, StepCosts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sharding.md"
CONFIGS = ROOT / "examples" / "configs"
BEGIN, END = "<!-- the plan -->", "<!-- end of the plan -->"
MODELS = ("llama-3.1-8b", "qwen2.5-32b", "llama-3.1-70b")
GPUS, CONTEXT = (8, 64, 512), 131_072
KINDS = ("heads", "all-to-all", "gather", "ring", "heads x all-to-all", "heads x ring")


def table() -> str:
    """Return the table: a row for each model and number of GPUs, a column for each way."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield f"| model | GPUs | {' | '.join(KINDS)} | fastest of all mixtures |"
    yield "|" + " --- |" * (len(KINDS) + 3)
    for model in MODELS:
        for gpus in GPUS:
            plan = plan_costs(
                CONFIGS / f"{model}.json", gpus=gpus, context=CONTEXT, checkpointing=True
            )
            cells = [_cell(plan, kind) for kind in KINDS]
            yield f"| {model} | {gpus} | {' | '.join(cells)} | {_fastest(plan)} |"


def _cell(plan: CostPlan, kind: str) -> str:
    step = next((step for step in plan.best_step_of_each_kind if step.way.kind == kind), None)
    if step is None:
        return "-"
    ranks = "x".join(map(str, step.way.groups.values()))
    title = f"{ranks}: " if " x " in kind else ""
    text = f"{title}{_numbers(step)}" if step.fits_step else f"{title}needs {_gigabytes(step)}"
    return f"**{text}**" if step is plan.fastest_step_in_headwise else text


def _fastest(plan: CostPlan) -> str:
    step = plan.fastest_step
    if step is None:
        return f"none fits; {plan.smallest_step.way} needs {_gigabytes(plan.smallest_step)}"
    return f"{step.way}: {_numbers(step)}"


def _numbers(step: StepCosts) -> str:
    seconds = step.step_seconds
    return (
        f"{seconds:.2g} s, {_gigabytes(step)}"
        if seconds < 10
        else (f"{seconds:.0f} s, {_gigabytes(step)}")
    )


def _gigabytes(step: StepCosts) -> str:
    size = step.step_bytes / GIGA
    return f"{size:.1f} GB" if size < 10 else f"{size:.0f} GB"


def replace_table(page: str) -> str:
    """Return the page with the current table."""
    pattern = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.S)
    text, count = pattern.subn(lambda _: f"\n{table()}\n\n", page)
    assert count == 1, f"{PAGE.name} has {count} markers of the plan, not one"
    return text


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8")), "utf-8")
