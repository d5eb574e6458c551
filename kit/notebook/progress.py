"""Progress of long work and of a training: share, speed, time left, and how it ended.

In a notebook a person watches, a line is rewritten in place; a program gets a new one now and then,
ever more seldom: an executed notebook keeps them all.
"""

import math
import time
from collections import deque

from IPython.display import display

from kit.base.formatting import clock, describe_error, format_gib
from kit.notebook.result import is_watched

IN_LINE = ("step", "loss", "validation", "steps/s", "left")  # of `progress_texts`: it must not wrap


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
        pause_s = max(5.0, (now_s - self.began_s) / 2) if self.plain else 0.5
        if done < total and now_s - self.said_s < pause_s:
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
        elif done and took_s >= 3.0:  # earlier it would be mostly start-up, multiplied
            ending = f"{clock(took_s * (total - done) / done)} left"
        share = f"{self.label}: {done:,.0f} of {total:,.0f}   {100 * done / (total or 1):.0f} %"
        return "   ".join(filter(None, (share, ending, detail)))


class Pace:
    """Speed and time left, from the arrivals of the last 200 events, validations included."""

    def __init__(self):
        self.seen = deque(maxlen=200)  # (arrival s, tokens)

    def see(self, arrival_s: float, tokens: int) -> None:
        self.seen.append((arrival_s, tokens))

    def speed(self) -> tuple[float, float] | None:
        """(steps/s, tokens/s), or None before there are two events."""
        span_s = self.seen[-1][0] - self.seen[0][0] if self.seen else 0.0
        if span_s <= 0:
            return None
        tokens = sum(tokens for _, tokens in list(self.seen)[1:])
        return (len(self.seen) - 1) / span_s, tokens / span_s

    def left_s(self, row: dict) -> float | None:
        speed = self.speed()
        return (row["steps"] - row["step"]) / speed[0] if speed else None


def progress_texts(row: dict, pace: Pace) -> dict[str, str]:
    """The latest numbers as text by name; what has not been measured is left out."""
    speed = pace.speed()
    left_s = pace.left_s(row)
    texts = {
        "step": f"{row['step']:,} / {row['steps']:,}",
        "epoch": f"{row['epoch'] + 1}" if row.get("epoch") is not None else None,
        "loss": _number(row.get("loss")),
        "learning rate": f"{row['lr']:.2g}" if row.get("lr") is not None else None,
        "validation": _number(row.get("val_loss")),
        "EMA": _number(row.get("ema_val_loss")),
        "steps/s": f"{speed[0]:.3g}" if speed else None,
        "tokens/s": f"{speed[1]:,.0f}" if speed else None,
        **memory_texts(row),
        "busy": f"{row['load']:.0%}" if row.get("load") is not None else None,
        "left": clock(left_s) if left_s is not None else None,
    }
    return {name: text for name, text in texts.items() if text}


def memory_texts(row: dict) -> dict[str, str]:
    """What training holds: of a GPU beside what its allocator keeps and the card has in use."""
    on_gpu = row.get("reserved_bytes")
    names = {
        "memory_bytes": "VRAM allocated, peak" if on_gpu else "RAM of training, peak",
        "memory_now_bytes": "now",
        "reserved_bytes": "reserved",
    }
    if on_gpu:
        names["device_bytes"] = "card in use"
    return {name: format_gib(row[key]) for key, name in names.items() if row.get(key)}


def newest(rows: list[dict]) -> dict:
    """The newest value of every field; a field without one (None) keeps an older value."""
    return {key: value for row in rows for key, value in row.items() if value is not None}


class Lines:
    """Plain progress: notes at once; figures at each 10 %, or after 15 s and then more seldom."""

    def __init__(self):
        self.began_s = time.monotonic()
        self.said_s = -math.inf
        self.share = -math.inf

    def show(self, row: dict, texts: dict[str, str], news: list[str]) -> None:
        while news:
            print(news.pop(0), flush=True)
        now_s = time.monotonic()
        share = row.get("step", 0) / max(row.get("steps", 1), 1)
        quiet_s = now_s - self.said_s
        pause_s = max(15, (now_s - self.began_s) / 4)
        due = quiet_s >= pause_s or (quiet_s >= 2 and share - self.share >= 0.1)
        if texts and due:
            parts = [f"{name} {texts[name]}" for name in IN_LINE if name in texts]
            print("   ".join(parts), flush=True)
            self.said_s = now_s
            self.share = share


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def verdict(
    error: Exception | None, row: dict | None, stopping: bool, took_s: float
) -> tuple[str, str]:
    """(a sentence, the kind of message) for a training that has ended."""
    where = f"step {row['step']:,} of {row['steps']:,}" if row else "the first step"
    if error is not None:
        return f"Stopped at {where} by an error. {describe_error(error)}", "bad"
    if row and row["step"] >= row["steps"]:
        loss = _number(row.get("loss")) or "not finite"
        return f"Finished: {where} in {clock(took_s)}, loss {loss}.", "good"
    if stopping:
        return f"Stopped at {where}, with a checkpoint. Press Start to resume.", "warn"
    note = f" ({row['note']})" if row and row.get("note") else ""
    return f"Training ended by itself at {where}{note}.", "warn"
