"""A question that a click answers, while its cell waits."""

import time

import ipywidgets as widgets
from IPython.display import display

from kit.notebook.train_panel import Clicks
from kit.notebook.widgets import Panel, button


class Question(Panel):
    """`text` above a button for each of `answers`, by name: its label.

    After `countdown_s` the answer is `default`; without one only a click ends the waiting.
    """

    def __init__(
        self, text: str, answers: dict[str, str], default: str = "", countdown_s: float = 20.0
    ):
        self.default = default
        self.answers = answers
        self.countdown_s = countdown_s
        self.answer = ""
        self.status = widgets.HTML()
        self.buttons = {}
        for name, label in answers.items():
            press = button(label, "check", "success" if name == default else "", label)
            press.layout.width = "auto"
            press.on_click(lambda _, name=name: self._choose(name))
            self.buttons[name] = press
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        self.arrange(self.status, row)
        self.say(text)
        self.text = text

    def ask(self) -> str:
        """Show the question and return the name of its answer; an interrupt leaves it open."""
        display(self.box)
        until_s = time.monotonic() + self.countdown_s
        with Clicks() as clicks:
            while not self.answer:
                left_s = until_s - time.monotonic()
                if self.default and left_s <= 0:
                    self._choose(self.default)
                elif self.default:
                    label = self.answers[self.default]
                    self.say(f"{self.text} In {left_s:.0f} s: {label}.")
                clicks.poll()
                time.sleep(0.1)
        return self.answer

    def _choose(self, name: str) -> None:
        self.answer = self.answer or name  # the first click counts
        for press in self.buttons.values():
            press.disabled = True
        self.say(f"{self.text} {self.answers[self.answer]}.", "good")
