"""HTML page of a diagnosis: the verdict, the causes with their repair, and the evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from markupsafe import Markup, escape

from headwise.diagnosis.catalogue import Page
from headwise.diagnosis.comparison import FunctionComparison, LayerComparison
from headwise.diagnosis.results import Diagnosis, Verdict
from headwise.reports import images, stages
from headwise.reports.report import library_versions
from headwise.reports.stages import StageTables
from headwise.reports.templates import secure_page, template_environment
from headwise.support.files import write_whole
from headwise.support.text import describe_count

MOST_TENSORS = 200  # in a list; more are only counted
MOST_GROUPS = 4  # of layers with tables of their own
MOST_NAMES = 8  # of layers in a heading


@dataclass(frozen=True, eq=False, kw_only=True)
class DiagnosisReport:
    """A diagnosis with the names of what was compared.

    Attributes:
        diagnosis: the result.
        first: the name of the first; "" if it has none.
        second: likewise.
        call: the command or the call that compares them again.
        versions: versions of the libraries.
    """

    diagnosis: Diagnosis
    first: str = ""
    second: str = ""
    call: str = "headwise.compare(first, second)"
    versions: Mapping[str, str] = field(default_factory=library_versions)

    @property
    def verdict_css_class(self) -> str:
        """The class of the box with the verdict: "", "note" or "bad"."""
        if self.diagnosis.verdict is Verdict.INCONCLUSIVE:
            return "note"
        return "" if self.diagnosis else "bad"

    @property
    def output_difference_sentence(self) -> str:
        """A sentence on the difference of the outputs; "" where they are equal to the last bit."""
        comparison = self.diagnosis.function or self.diagnosis.model
        if comparison is None or self.diagnosis.verdict is Verdict.SAME:
            return ""
        if self.diagnosis.model is not None and self.diagnosis.model.uncompared:
            return f"The outputs were not compared: {self.diagnosis.model.uncompared}."
        if not isfinite(comparison.output_gap):
            return "The outputs have other shapes."
        size = stages.difference_percent_text(comparison.output_gap)
        return f"The outputs differ by {size} of their size at most."

    @property
    def compared_side_labels(self) -> tuple[str, str]:
        """The two in words: the name, and the kind or the layout."""
        comparison = self.diagnosis.function or self.diagnosis.model
        layouts = self.diagnosis.layouts
        if comparison is not None:
            kinds = comparison.kinds
        else:
            names = ("?", "?") if layouts is None else (layouts[0].name, layouts[1].name)
            kinds = (f"layout {names[0]}", f"layout {names[1]}")
        first, second = (
            f"{name}: {kind}" if name else kind
            for name, kind in zip((self.first, self.second), kinds, strict=True)
        )
        return first, second

    @property
    def differing_layer_groups(self) -> list[tuple[list[LayerComparison], FunctionComparison]]:
        """The attentions that differ, with their comparison; no layers for a single attention."""
        function, model = self.diagnosis.function, self.diagnosis.model
        if model is not None:
            return [(layers, layers[0].comparison) for layers in model.differing_layers_by_causes]
        return [([], function)] if function is not None and function.parted else []

    @property
    def shown_stage_tables(self) -> list[StageTables]:
        """The tables of a single attention, or of the first of each group of layers."""
        if self.diagnosis.function is not None:
            return [stages.stage_tables(self.diagnosis.function)]
        return [
            stages.stage_tables(function, layers[0].name)
            for layers, function in self.differing_layer_groups[:MOST_GROUPS]
        ]


def save_diagnosis_page(report: DiagnosisReport, path: Path) -> Path:
    """Write the page as a whole, and return its absolute path."""
    return write_whole(path, render_diagnosis_page(report))


def render_diagnosis_page(report: DiagnosisReport) -> str:
    """Return the page as HTML."""
    environment = template_environment()
    environment.filters |= {
        "css": images.css_colour,
        "ink": images.text_colour_on,
        "quoted": mark_quoted_as_code,
    }
    model = report.diagnosis.model
    page = environment.get_template("diagnosis.html").render(
        report=report,
        version=report.versions["headwise"],
        diagnosis=report.diagnosis,
        sides=report.compared_side_labels,
        function=report.diagnosis.function,
        model=model,
        layers=[] if model is None else stages.layer_rows(model),
        stages=[] if model is None else stages.compared_stages_of_model(model),
        cause_count=sum(len(function.causes) for _, function in report.differing_layer_groups),
        cause_pages=read_cause_pages(report),
        most=MOST_TENSORS,
        most_names=MOST_NAMES,
        gradient=Markup(images.css_gradient()),
        ticks=[(size, 100 * stages.difference_scale_position(size)) for size in stages.TICKS],
        describe_count=describe_count,
    )
    return secure_page(page)


def read_cause_pages(report: DiagnosisReport) -> dict[str, Page]:
    """Return the pages about the causes of a diagnosis, by path."""
    paths = [cause.page for _, each in report.differing_layer_groups for cause in each.causes]
    paths += [page for module in report.diagnosis.moves or () for page in module.pages if page]
    return {path: Page.read(path) for path in dict.fromkeys(paths)}


def mark_quoted_as_code(text: str) -> Markup:
    """Return a sentence as HTML, with quoted names of tensors as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def render_in_frame(diagnosis: Diagnosis) -> str:
    """Return the page in a frame for a notebook, so that styles do not mix."""
    page = escape(render_diagnosis_page(DiagnosisReport(diagnosis=diagnosis)))
    return f'<iframe srcdoc="{page}" width="100%" height="600" frameborder="0"></iframe>'
