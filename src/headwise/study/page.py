"""HTML page of the study: questions, verdicts, pictures, facts.

The pictures are SVG and take their colours from the page.
"""

from __future__ import annotations

from functools import partial

from headwise.reports.pictures import draw_svg
from headwise.reports.templates import secure_page, template_environment
from headwise.study.drawing import Figure
from headwise.study.question import Answer
from headwise.study.run import Study

HEIGHT = 3.4  # inches, of 72 px; a picture may ask for another


def render_study_page(result: Study) -> str:
    pictures = {answer.question.id: answer_svg(answer) for answer in result.answers}
    template = template_environment().get_template("study.html")
    page = template.render(study=result, pictures=pictures, version=result.setting["headwise"])
    return secure_page(page)


def answer_svg(answer: Answer) -> str:
    question = answer.question
    draw = partial(_draw, answer)
    return draw_svg(draw, answer.fill(question.caption), name=question.id, height=HEIGHT)


def _draw(answer: Answer, figure: Figure) -> None:
    answer.question.draw(figure, answer.numbers)
