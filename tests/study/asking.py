"""Asking a question again after something was broken."""

from __future__ import annotations

from headwise.study.question import Answer, answer_question, load_question


def ask(name: str) -> Answer:
    """The answer to a question, measured now."""
    return answer_question(load_question(name))


def failed_facts(name: str) -> list[str]:
    """The facts that do not hold, each of which the verdict names."""
    return failing(ask(name))


def failing(answer: Answer) -> list[str]:
    """The same of an answer."""
    found = [words for held, words in answer.facts if not held]
    assert answer.holds == (not found)
    assert all(words in answer.verdict for words in found)
    return found
