"""Progress of long work outside training: one line with share, speed and time left.

In a notebook a person watches, the line is rewritten in place; run by a program, a new line is
printed now and then. Counting is separate from drawing.
"""

import time

from IPython.display import display

from kit.base.formatting import clock
from kit.notebook.kernel import is_watched

ESTIMATE_AFTER_S = 3.0  # earlier, the time left is mostly start-up, multiplied


class Ticker:
    """`tick(done, total)` after each piece of work."""

    def __init__(self, label: str):
        self.label = label
        self.began_s = time.monotonic()
        self.said_s = 0.0
        self.plain = not is_watched()
        self.handle = None

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        now_s = time.monotonic()
        if done < total and now_s - self.said_s < (5.0 if self.plain else 0.5):
            return
        self.said_s = now_s
        text = self.line(done, total, now_s - self.began_s, detail)
        if self.plain:
            print(text, flush=True)
        elif self.handle is None:
            self.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)

    def line(self, done: int, total: int, took_s: float, detail: str = "") -> str:
        ending = ""
        if done >= total:
            ending = f"done in {clock(took_s)}"
        elif done and took_s >= ESTIMATE_AFTER_S:
            ending = f"{clock(took_s * (total - done) / done)} left"
        parts = [
            f"{self.label}: {done:,.0f} of {total:,.0f}",
            f"{100 * done / total:.0f} %",
            ending,
            detail,
        ]
        return "   ".join(p for p in parts if p)
