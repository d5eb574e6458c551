"""A question is answered by a click or, where it has a default, after a countdown."""

import threading
import time

import pytest

from kit.notebook.question import Question

ANSWERS = {"tea": "Tea, please", "coffee": "Coffee"}


@pytest.fixture
def shown(monkeypatch) -> list:
    boxes = []
    monkeypatch.setattr("kit.notebook.question.display", boxes.append)
    return boxes


def test_the_countdown_can_be_seen_and_ends_with_the_default(shown):
    question = Question("Which?", ANSWERS, default="coffee", countdown_s=0.5)
    said = []
    question.status.observe(lambda change: said.append(change["new"]), "value")
    assert question.ask() == "coffee" and shown == [question.box]
    assert "In 0 s: Coffee" in said[0], said
    assert "Which? Coffee." in said[-1]
    assert all(press.disabled for press in question.buttons.values())


@pytest.mark.parametrize("default", ["", "coffee"])
def test_a_click_answers_and_without_a_default_nothing_else_does(shown, default):
    question = Question("Which?", ANSWERS, default=default, countdown_s=0.3 if not default else 60)
    began_s = time.monotonic()
    threading.Timer(0.6, question.buttons["tea"].click).start()
    assert question.ask() == "tea" and time.monotonic() - began_s >= 0.6
    question.buttons["coffee"].click()
    assert question.answer == "tea", "the first click counts"
