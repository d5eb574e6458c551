"""The proofreading panel: a clip, its text, and buttons that save it or leave it out.

Core ipywidgets only, the same code for 7.7.1 (Colab's) and 8. The caller passes `save`, which
writes a text, or None for a clip that is left out.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from kit.base.formatting import describe_error
from kit.notebook.kernel import front_end
from kit.notebook.panel.widgets import button, message


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenClip:
    """A clip to proofread."""

    id: str
    wav: Path
    text: str
    confidence: float  # 0 to 1


class ProofreadPanel:
    """`panel.run()` shows `clips` one by one; `save(id, text or None)` is called at once."""

    def __init__(self, clips: list[WrittenClip], save: Callable[[str, str | None], None]):
        self.clips = clips
        self.save = save
        self.number = 0  # of the clip that is shown
        self.player = widgets.Audio(value=b"", format="wav", autoplay=False, loop=False)
        self.text = widgets.Textarea(rows=3, layout={"width": "100%", "margin": "0"})
        self.buttons = {
            "Save": button("Save", "check", "success", "Write this text to metadata.csv"),
            "Leave out": button("Leave out", "trash", "", "Take this clip out of metadata.csv"),
            "Next": button("Next", "forward", "", "The next clip; this one stays as it is"),
        }
        self.place = widgets.HTML()
        self.status = widgets.HTML()
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        rows = [self.place, self.player, self.text, row, self.status]
        self.box = widgets.VBox(rows, layout={"max_width": "820px", "padding": "4px"})
        self.buttons["Save"].on_click(lambda _: self._write(self.text.value))
        self.buttons["Leave out"].on_click(lambda _: self._write(None))
        self.buttons["Next"].on_click(lambda _: self._next("Not changed."))
        self._show()

    def run(self, mode: str | None = None) -> None:
        """Show the panel; without a front end print how many clips there are."""
        if (mode or front_end()[0]) == "plain":
            print(f"{len(self.clips)} clips to proofread; a notebook shows them.")
        else:
            display(self.box)

    def _write(self, text: str | None) -> None:
        try:
            self.save(self.clips[self.number].id, text)
        except Exception as error:
            self.status.value = message(describe_error(error), "bad")
            return
        self._next("Left out." if text is None else "Saved.")

    def _next(self, done: str) -> None:
        self.number += 1
        self.status.value = message(done, "info")
        self._show()

    def _show(self) -> None:
        """Show the clip, or that there is none left."""
        over = self.number >= len(self.clips)
        for each in (*self.buttons.values(), self.text):
            each.disabled = over
        if over:
            self.text.value = ""
            self.player.value = b""
            self.place.value = message("No clips left to proofread.", "good")
            return
        clip = self.clips[self.number]
        self.text.value = clip.text
        try:
            self.player.value = clip.wav.read_bytes()
        except OSError as error:
            self.player.value = b""
            self.status.value = message(describe_error(error), "bad")
        place = f"Clip {self.number + 1} of {len(self.clips)}, {clip.confidence:.0%} certain"
        self.place.value = message(f"{place}: {clip.id}", "info")
