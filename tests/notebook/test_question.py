"""A question is answered by a click or, where it has a default, after a countdown."""

import threading
import time
from types import SimpleNamespace

import pytest
from jupyter_client.manager import run_kernel
from paths import python_path

from kit.notebook.question import ask_question

ANSWERS = {"tea": "Tea, please", "coffee": "Coffee"}


@pytest.fixture
def shown(monkeypatch) -> SimpleNamespace:
    """The widgets of a question, and the values of its status, once it is asked."""
    shown = SimpleNamespace(said=[])

    def display(box):
        status, row, _ = box.children
        status.observe(lambda change: shown.said.append(change["new"]), "value")
        shown.buttons = dict(zip(ANSWERS, row.children))

    monkeypatch.setattr("kit.notebook.question.display", display)
    return shown


def test_the_countdown_can_be_seen_and_ends_with_the_default(shown):
    assert ask_question("Which?", ANSWERS, "coffee", countdown_s=0.5) == "coffee"
    assert "In 0 s: Coffee" in shown.said[0]
    assert "Which? Coffee." in shown.said[-1]
    assert all(press.disabled for press in shown.buttons.values())


@pytest.mark.parametrize("default", ["", "coffee"])
def test_a_click_answers_and_without_a_default_nothing_else_does(shown, default):
    began_s = time.monotonic()
    threading.Timer(0.6, lambda: shown.buttons["tea"].click()).start()
    answer = ask_question("Which?", ANSWERS, default, countdown_s=60 if default else 0.3)
    assert answer == "tea" and time.monotonic() - began_s >= 0.6
    shown.buttons["coffee"].click()
    assert "Which? Tea, please." in shown.said[-1], "the first click counts"


CELL = f"""
from kit.notebook.question import ask_question
print(ask_question("Which?", {ANSWERS!r}))
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
