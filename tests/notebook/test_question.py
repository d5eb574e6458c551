"""A question is answered by a click or, where it has a default, after a countdown."""

import threading
import time

import pytest
from jupyter_client.manager import run_kernel
from paths import python_path

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


CELL = f"""
from kit.notebook.question import Question
print(Question("Which?", {ANSWERS!r}).ask())
"""


@pytest.mark.long
def test_a_click_reaches_the_cell_that_waits_for_it(monkeypatch):
    """In a real kernel, which handles no message of the page while a cell runs."""
    monkeypatch.setenv("PYTHONPATH", python_path(__file__))
    printed = ""
    buttons = {}  # comm ids by label
    with run_kernel(kernel_name="python3") as client:
        client.execute(CELL)
        while "\n" not in printed:
            message = client.get_iopub_msg(timeout=120)
            content = message["content"]
            printed += content.get("text", "") if message["msg_type"] == "stream" else ""
            assert message["msg_type"] != "error", content
            if message["msg_type"] == "display_data":
                data = {"method": "custom", "content": {"event": "click"}}
                click = {"comm_id": buttons[ANSWERS["tea"]], "data": data}
                client.shell_channel.send(client.session.msg("comm_msg", click))
            if message["msg_type"] == "comm_open":
                label = content["data"]["state"].get("description")
                buttons[label] = content["comm_id"]
    assert printed == "tea\n"
