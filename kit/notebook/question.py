"""A question that a click answers, while its cell waits."""

import time

import ipywidgets as widgets
from IPython.display import display

from kit.notebook.train_panel import Clicks
from kit.notebook.widgets import boxed, button, message


def ask_question(
    text: str, answers: dict[str, str], default: str = "", countdown_s: float = 20.0
) -> str:
    """Show `text` above a button for each of `answers`, its label by name; return the name clicked.

    After `countdown_s` it is `default`; without one only a click ends the waiting, or an interrupt.
    """
    clicked = []
    status = widgets.HTML(message(text, "info"))

    def choose(name: str) -> None:
        clicked.append(name)  # the first counts
        for press in row.children:
            press.disabled = True
        status.value = message(f"{text} {answers[clicked[0]]}.", "good")

    row = widgets.HBox(layout={"flex_flow": "row wrap"})
    for name, label in answers.items():
        press = button(label, "check", "success" if name == default else "", label)
        press.layout.width = "auto"
        press.on_click(lambda _, name=name: choose(name))
        row.children += (press,)
    display(boxed(status, row))
    until_s = time.monotonic() + countdown_s
    with Clicks() as clicks:
        while not clicked:
            left_s = until_s - time.monotonic()
            if default and left_s <= 0:
                choose(default)
            elif default:
                status.value = message(f"{text} In {left_s:.0f} s: {answers[default]}.", "info")
            clicks.poll()
            time.sleep(0.1)
    return clicked[0]
