"""The page of the study: question, verdict, picture, facts."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from headwise.reports import charts
from headwise.reports.template import templates
from headwise.studies.study import Study
from headwise.support.whole_files import write_whole


def save(result: Study, path: Path) -> Path:
    """Write the page, whole or not at all. Returns its absolute path.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    return write_whole(path, render(result))


def render(result: Study) -> str:
    """The page as HTML."""
    # The pictures are drawn by matplotlib, which escapes the text in them.
    pictures = {answer.question.id: Markup(charts.svg(answer)) for answer in result.answers}
    template = templates().get_template("study.html")
    return template.render(study=result, pictures=pictures, version=result.setting["headwise"])
