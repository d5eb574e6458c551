"""The listening panel: two recordings of one text without names, and which of them is better.

Core ipywidgets only, the same code for 7.7.1 (Colab's) and 8. The caller passes `answer`, which
gets the number of the pair and 0, 1 or None (no preference), and returns what to show at the end.
"""

import dataclasses
from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import display

from kit.base.formatting import describe_error
from kit.notebook.kernel import front_end
from kit.notebook.panel.widgets import PANEL_LAYOUT, button, message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two WAV files to listen to, in the order in which they are offered."""

    text: str
    wavs: tuple[bytes, bytes]


class ListenPanel:
    """`panel.run()`, or a cell that ends with the panel, shows `pairs` one by one."""

    def __init__(self, pairs: list[Pair], answer: Callable[[int, int | None], str]):
        self.pairs = pairs
        self.answer = answer
        self.number = 0  # of the pair that is shown
        self.players = [
            widgets.Audio(value=b"", format="wav", autoplay=False, loop=False) for _ in range(2)
        ]
        self.buttons = {
            "First": button("First", "check", "success", "The first is better"),
            "Second": button("Second", "check", "success", "The second is better"),
            "Equal": button("Equal", "pause", "", "Neither is better"),
        }
        self.place = widgets.HTML()
        self.status = widgets.HTML()
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        self.box = widgets.VBox([self.place, *self.players, row, self.status], layout=PANEL_LAYOUT)
        for which, each in zip((0, 1, None), self.buttons.values()):
            each.on_click(lambda _, which=which: self._choose(which))
        self._show()

    def run(self, mode: str | None = None) -> None:
        """Show the panel; without a front end print how many pairs there are."""
        if (mode or front_end()[0]) == "plain":
            print(f"{len(self.pairs)} pairs to listen to; a notebook plays them.")
        else:
            display(self.box)

    def _ipython_display_(self) -> None:
        self.run()

    def _choose(self, which: int | None) -> None:
        try:
            result = self.answer(self.number, which)
        except Exception as error:
            self.status.value = message(describe_error(error), "bad")
            return
        self.number += 1
        if self.number == len(self.pairs):
            self.status.value = message(result, "good")
        self._show()

    def _show(self) -> None:
        over = self.number == len(self.pairs)
        for each in self.buttons.values():
            each.disabled = over
        if over:
            self.place.value = message("No pairs left.", "good")
            return
        pair = self.pairs[self.number]
        for player, wav in zip(self.players, pair.wavs):
            player.value = wav
        self.place.value = message(f"{self.number + 1} of {len(self.pairs)}: {pair.text}", "info")
