"""Progress of long work outside training: one line with share, speed and time left.

In a notebook a person watches, the line is rewritten in place; run by a program, a new line is
printed now and then. Counting is separate from drawing.
"""

import time
from collections.abc import Iterable

from IPython.display import display

from kit.base.formatting import clock
from kit.notebook.kernel import is_watched

ESTIMATE_AFTER_S = 3.0  # earlier, the time left is mostly start-up, multiplied


class Ticker:
    """`tick(done, total)` after each piece of work; `tick.follow(pairs, total)` round a loop."""

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
        self._show(self.line(done, total, now_s - self.began_s, detail))

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

    def follow(self, steps: Iterable[tuple[int, float]], total: int) -> list[float]:
        """Run through (step, loss) pairs, showing progress; the losses."""
        losses = []
        for step, loss in steps:
            losses.append(loss)
            recent = losses[-20:]
            self(step, total, f"loss {sum(recent) / len(recent):.3f}")
        return losses

    def _show(self, text: str) -> None:
        if self.plain:
            print(text, flush=True)
        elif self.handle is None:
            self.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)
