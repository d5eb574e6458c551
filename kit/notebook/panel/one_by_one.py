"""Panels that show one thing after another: pairs of recordings to compare, clips to proofread."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets

from kit.base.formatting import describe_error
from kit.notebook.panel.widgets import PANEL_LAYOUT, Panel, button, message, player

Pair = tuple[str, bytes, bytes]  # a text, and two WAV files in the order in which they are offered


class OneByOne(Panel):
    """Shows `items` one by one between `middle` and `buttons`, name: (icon, style, tip)."""

    what = "items"

    def __init__(self, items: list, middle: list, buttons: dict[str, tuple[str, str, str]]):
        self.items = items
        self.number = 0  # of the one that is shown
        self.buttons = {name: button(name, *look) for name, look in buttons.items()}
        self.place = widgets.HTML()
        self.status = widgets.HTML()
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        self.box = widgets.VBox([self.place, *middle, row, self.status], layout=PANEL_LAYOUT)
        self.show()

    def describe(self) -> str:
        return f"{len(self.items)} {self.what}; a notebook plays them."

    def finish(self, work: Callable[[], str]) -> None:
        """Show what `work` returns, and the next item; an error is shown, and the item stays."""
        try:
            result = work()
        except Exception as error:
            self.status.value = message(describe_error(error), "bad")
            return
        self.number += 1
        self.status.value = message(result, "info") if result else ""
        self.show()

    def show(self) -> None:
        over = self.number == len(self.items)
        for each in self.buttons.values():
            each.disabled = over
        if over:
            self.place.value = message(f"No {self.what} left.", "good")
            return
        place = f"{self.number + 1} of {len(self.items)}: "
        self.place.value = message(place + self.show_item(self.items[self.number]), "info")


class ListenPanel(OneByOne):
    """Two recordings of one text without names, and which of them is better.

    `answer` gets the number of the pair and 0, 1 or None (no preference), and returns what to show
    at the end.
    """

    what = "pairs to listen to"

    def __init__(self, pairs: list[Pair], answer: Callable[[int, int | None], str]):
        self.answer = answer
        self.players = [player(), player()]
        looks = {
            "First": ("check", "success", "The first is better"),
            "Second": ("check", "success", "The second is better"),
            "Equal": ("pause", "", "Neither is better"),
        }
        super().__init__(pairs, self.players, looks)
        for which, each in zip((0, 1, None), self.buttons.values()):
            each.on_click(lambda _, which=which: self.finish(lambda: self._answer(which)))

    def _answer(self, which: int | None) -> str:
        result = self.answer(self.number, which)
        return result if self.number + 1 == len(self.items) else ""

    def show_item(self, pair: Pair) -> str:
        text, *wavs = pair
        for each, wav in zip(self.players, wavs):
            each.value = wav
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenClip:
    """A clip to proofread."""

    id: str
    wav: Path
    text: str
    confidence: float  # 0 to 1


class ProofreadPanel(OneByOne):
    """A clip and its text; `save(id, text)` is called at once, with None for one left out."""

    what = "clips to proofread"

    def __init__(self, clips: list[WrittenClip], save: Callable[[str, str | None], None]):
        self.save = save
        self.player = player()
        self.text = widgets.Textarea(rows=3, layout={"width": "100%", "margin": "0"})
        looks = {
            "Save": ("check", "success", "Write this text to metadata.csv"),
            "Leave out": ("trash", "", "Take this clip out of metadata.csv"),
            "Next": ("forward", "", "The next clip; this one stays as it is"),
        }
        super().__init__(clips, [self.player, self.text], looks)
        self.buttons["Save"].on_click(lambda _: self.finish(lambda: self._save(self.text.value)))
        self.buttons["Leave out"].on_click(lambda _: self.finish(lambda: self._save(None)))
        self.buttons["Next"].on_click(lambda _: self.finish(lambda: "Not changed."))

    def _save(self, text: str | None) -> str:
        self.save(self.items[self.number].id, text)
        return "Left out." if text is None else "Saved."

    def show_item(self, clip: WrittenClip) -> str:
        self.text.value = clip.text
        try:
            self.player.value = clip.wav.read_bytes()
        except OSError as error:
            self.player.value = b""
            self.status.value = message(describe_error(error), "bad")
        return f"{clip.id}, {clip.confidence:.0%} certain"
