"""A run seen from outside: the trainer's thread, its speed, and words for how it goes and ended.

No widget, no figure. Knows step events by their field names; nothing of what trains.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

from kit.base.words import clock, in_gib, in_words


class Worker:
    """The trainer's thread. Its events wait in a bounded queue; its exception is kept.

    In that thread the run goes on inside `around` (context managers: a monitor, a profiler), and
    each of `listeners` hears every event.
    """

    def __init__(self, make_run: Callable, values: dict, around: tuple = (), listeners: tuple = ()):
        self.around = around
        self.listeners = listeners
        self.values = values
        self.stop = threading.Event()
        self.ended = threading.Event()
        self.error = None
        self.began_s = time.monotonic()
        self.events = deque(maxlen=20_000)  # (arrival in monotonic seconds, StepEvent)
        job = (make_run, dict(values))
        self.thread = threading.Thread(target=self._work, args=job, name="trainer", daemon=True)
        self.thread.start()

    def _work(self, make_run: Callable, values: dict) -> None:
        try:
            with contextlib.ExitStack() as stack:
                for part in self.around:
                    stack.enter_context(part)
                for event in make_run(values, self.stop):
                    for hear in self.listeners:
                        hear(event)
                    self.events.append((time.monotonic(), event))
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    @property
    def alive(self) -> bool:
        # Not the thread's own word: up to Python 3.12 a join that Ctrl-C interrupts takes the
        # thread for ended, and a process that then leaves would cut its last checkpoint short.
        return not self.ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the run has ended; may be interrupted, and then be asked again."""
        self.ended.wait(timeout_s)


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


def session_age_s() -> float:
    """Seconds since this process, in a notebook the kernel, was started."""
    return time.time() - psutil.Process().create_time()


def outlook(left_s: float | None, session_hours: float | None) -> tuple[str, bool]:
    """(time to go against what is left of a session of so many hours, whether it is enough)."""
    if left_s is None or session_hours is None:
        return "", True
    rest_s = max(0.0, session_hours * 3600 - session_age_s())
    said = f"{clock(left_s)} to go, {clock(rest_s)} left of a {session_hours:g} h session."
    if left_s <= rest_s:
        return said, True
    return f"{said} When it is cut, run the notebook again: it goes on by itself.", False


def progress_texts(row: dict, pace: Pace) -> dict[str, str]:
    """The latest numbers as text by name; what has not been measured is left out."""
    speed = pace.speed()
    left_s = pace.left_s(row)
    texts = {
        "step": f"{row['step']:,} / {row['steps']:,}",
        "epoch": f"{row['epoch'] + 1}" if row.get("epoch") is not None else None,
        "loss": _number(row.get("loss")),
        "validation": _number(row.get("val_loss")),
        "EMA": _number(row.get("ema_val_loss")),
        "steps/s": f"{speed[0]:.3g}" if speed else None,
        "tokens/s": f"{speed[1]:,.0f}" if speed else None,
        "memory": in_gib(row["memory_bytes"]),
        "left": clock(left_s) if left_s is not None else None,
    }
    return {name: text for name, text in texts.items() if text}


def newest(rows: list[dict]) -> dict:
    """The newest value of every field; a field without one (None) keeps an older value."""
    return {key: value for row in rows for key, value in row.items() if value is not None}


class Lines:
    """Plain progress: notes at once; figures every 10 s, or each 5 % once 2 s have passed."""

    def __init__(self):
        self.said_s = -math.inf
        self.share = -math.inf

    def show(self, row: dict, texts: dict[str, str], news: list[str]) -> None:
        while news:
            print(news.pop(0), flush=True)
        now_s = time.monotonic()
        share = row.get("step", 0) / max(row.get("steps", 1), 1)
        quiet_s = now_s - self.said_s
        if quiet_s >= 10 or (quiet_s >= 2 and share - self.share >= 0.05):
            print("   ".join(f"{name} {text}" for name, text in texts.items()), flush=True)
            self.said_s = now_s
            self.share = share


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def verdict(worker: Worker, row: dict | None) -> tuple[str, str, str]:
    """(plain sentence, kind of message, what the Start button now says) of a run that has ended."""
    where = f"step {row['step']:,} of {row['steps']:,}" if row else "the first step"
    if worker.error is not None:
        again = "Continue" if row else "Start again"
        said = in_words(worker.error)
        return f"Stopped at {where} by an error. {said}", "bad", again
    if row and row["step"] >= row["steps"]:
        took = clock(time.monotonic() - worker.began_s)
        loss = _number(row.get("loss")) or "not finite"
        return f"Finished: {where} in {took}, loss {loss}.", "good", "Start again"
    if worker.stop.is_set():
        return f"Stopped at {where}, with a checkpoint to go on from.", "warn", "Continue"
    note = f" ({row['note']})" if row and row.get("note") else ""
    return f"The trainer ended by itself at {where}{note}.", "warn", "Continue"
