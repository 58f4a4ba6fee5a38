"""The page of the study, from the numbers that are recorded in the documentation."""

from functools import cache

from headwise.study.output import render_study_page
from headwise.study.question import Study
from tools.study import answers_of, read_record


@cache
def recorded_study() -> str:
    record = read_record()
    return render_study_page(Study(tuple(answers_of(record)), (), record["setting"]))
