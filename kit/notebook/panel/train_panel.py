"""The training panel: buttons, switches and a live curve around a run.

Core ipywidgets only, the same code for 7.7.1 (Colab's) and 8. The trainer runs in a thread and
touches no widget; one presenter reads its events and writes the widgets; a click only sets an
event. Without a front end the same trainer prints plain lines. Knows switches, step events and the
log's path; nothing of models, batches or checkpoints: `make_run` is handed in.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from IPython import get_ipython
from IPython.display import Image, display

from kit.base.words import in_words
from kit.notebook.kernel import Clicks, front_end
from kit.notebook.live_plot import LossFigure
from kit.notebook.panel.widgets import View, message
from kit.notebook.progress import Lines, Pace, Worker, newest, outlook, progress_texts, verdict
from kit.notebook.run_plots import thin
from kit.training.logs import add_row, read_log

FRAME_S = 0.5  # a frame every half second,
COST = 0.01  # or less often, so that drawing takes at most this share of the time
MOST_ROWS = 2000  # of the log, held for the plot
# Panels with a run, by log: when a cell is run again its new panel takes the running trainer over.
# A second trainer would write the same checkpoints.
_PANELS: dict[Path, "TrainPanel"] = {}


class TrainPanel:
    """A training run under buttons. `panel.run()` is all a notebook calls; `panel.wait()` joins.

    `make_run(values, stop)` gets the switches (and `numbers`) as a dict of its own and a stop
    event; it yields StepEvents and, once `stop` is set, writes a checkpoint and returns. With
    `resumable` (an unfinished checkpoint exists) the run goes on without waiting for Start. A
    `monitor` samples while it runs; a `profiler` gets a button; `session_hours` is the limit that
    the time to go is held against. `plan(values)` says what memory the switches and numbers
    would take, and whether it is there; `players()` is HTML of what the run has spoken so far.
    `largest` are the limits of `numbers` that have one.
    """

    def __init__(
        self,
        switches: list,
        make_run: Callable[[dict, threading.Event], Iterator],
        log_path: Path,
        resumable: bool = False,
        numbers: dict[str, int] | None = None,
        monitor=None,  # kit.tuning.monitor.Monitor
        profiler=None,  # kit.tuning.profiling.StepProfiler
        session_hours: float | None = None,
        plan: Callable[[dict], tuple[str, bool]] | None = None,
        players: Callable[[], str] = str,
        largest: dict[str, int] | None = None,
    ):
        self.make_run = make_run
        self.log_path = Path(log_path).resolve()
        self.resumable = resumable
        self.mode = "live"
        self.monitor = monitor
        self.profiler = profiler
        self.session_hours = session_hours
        self.plan = plan
        self.players = players
        self.rows = thin(read_log(self.log_path), MOST_ROWS)
        self.latest = newest(self.rows[-1000:])  # the newest value of every field
        self.reached = self.rows[-1] if self.rows else None  # last row of the current run
        self.news = []  # notes not yet printed
        self.picture = LossFigure()
        self.pace = Pace()
        self.worker = None
        self.asked, self.ended, self.retired = (threading.Event() for _ in range(3))
        self.error = None  # what broke the presenter; the trainer's own is worker.error
        self.presenter = None  # the thread of "live"
        self.view = View(switches, numbers or {}, profiler is not None, largest)
        self.view.start.on_click(lambda _: self.asked.set())
        self.view.stop.on_click(lambda _: self._ask_stop())
        self.view.profile.on_click(lambda _: self.profiler.request())
        if plan is not None:
            self.view.on_choice(self._replan)
            self._replan()
        self._greet()

    def run(self, mode: str | None = None) -> None:
        """Show the panel in the way this front end allows; `mode` forces "plain", "cell" or "live".

        "live" returns at once. "plain" and "cell" return when the run has ended, and re-raise its
        error; the first interrupt stops the run with a checkpoint, the second leaves.
        """
        self.mode = mode or front_end()[0]
        self._take_over()
        if self.idle and self.resumable:
            self.asked.set()
        if self.mode == "plain":
            return self._run_plain()
        display(self.view.box)
        if self.mode == "cell":
            return self._run_cell()
        if self.presenter is None or not self.presenter.is_alive():
            self.presenter = threading.Thread(target=self._present, name="presenter", daemon=True)
            self.presenter.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the run, started by now or not, has ended; re-raise its error.

        The buttons work meanwhile; interrupts as in `run`. Raises TimeoutError after `timeout_s`.
        """
        if _PANELS.get(self.log_path) is not self:
            raise RuntimeError("This panel is not the one on show. Call run() first, then wait().")
        until_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        with Clicks() as clicks:
            self._graceful(lambda: self._wait(clicks, until_s))
        self._raise()
        if not self.ended.is_set():
            raise TimeoutError(f"After {timeout_s:g} s the run has not ended. Was Start pressed?")

    def _wait(self, clicks: Clicks, until_s: float) -> None:
        while not (self.ended.is_set() or self.error) and time.monotonic() < until_s:
            clicks.poll()
            self.ended.wait(0.1)

    # The ways to run, one a front end.

    def _run_plain(self) -> None:
        if self.idle:
            self._launch()
        lines = Lines()

        def show() -> None:
            lines.show(self.latest, self._figures(), self.news)

        self._graceful(lambda: self._follow(show, self.worker.wait))
        print(verdict(self.worker, self.reached)[0], flush=True)
        if self._said():
            print(self._said(), flush=True)
        if get_ipython() is not None:
            display(Image(data=self.picture.png(self.rows), format="png"))
        self._raise()

    def _run_cell(self) -> None:
        try:
            with Clicks() as clicks:
                self._graceful(lambda: self._cell(clicks))
        finally:  # also after an interrupt: a cell that has ended hears no click
            self.view.close()
        self._raise()

    def _cell(self, clicks: Clicks) -> None:
        if self.idle:
            self.view.idle(self.view.start.description)
            while not self.asked.is_set():
                clicks.poll()
                time.sleep(0.1)
            self._launch()
        self._follow(self._draw, lambda pause_s: self._listen(clicks, pause_s))

    def _listen(self, clicks: Clicks, pause_s: float) -> None:
        until_s = time.monotonic() + pause_s
        while self.worker.alive and time.monotonic() < until_s:
            clicks.poll()
            self.worker.wait(0.1)

    def _present(self) -> None:
        """The presenter thread: one run after another until a newer panel takes over."""
        try:
            while not self.retired.is_set():
                if self.idle:
                    if not self.asked.wait(1.0):
                        continue
                    self._launch()
                self._follow(self._draw, lambda pause_s: self.worker.wait(pause_s))
        except Exception as error:  # the trainer goes on; the user and wait() are told
            self.error = error
            self.view.say(f"This panel stopped; training goes on. {in_words(error)}", "bad")

    def _graceful(self, work: Callable[[], None]) -> None:
        while True:
            try:
                return work()
            except KeyboardInterrupt:
                if self.worker is None or self.worker.stop.is_set():
                    raise
                self._ask_stop()

    # One run, whatever the way.

    @property
    def idle(self) -> bool:
        return self.worker is None or self.ended.is_set()

    def _launch(self) -> None:
        values = self.view.values()
        self.asked.clear()
        self.ended.clear()
        self.pace = Pace()
        self.reached = None
        self.view.running(values, profile=self.profiler is not None)
        self.view.say("Starting...")
        around = tuple(part for part in (self.monitor, self.profiler) if part is not None)
        listeners = (self.profiler,) if self.profiler is not None else ()
        self.worker = Worker(self.make_run, values, around, listeners)

    def _take_over(self) -> None:
        older = _PANELS.get(self.log_path)
        if older is not None and older is not self:
            older.retired.set()
            if older.worker is not None and older.worker.alive:
                self.worker = older.worker
                self.monitor = older.monitor
                self.profiler = older.profiler
                self.view.running(self.worker.values, profile=self.profiler is not None)
        _PANELS[self.log_path] = self

    def _follow(self, show: Callable[[], None], pause: Callable[[float], None]) -> None:
        """Show the run until it ends, seldom enough that showing stays under COST of the time."""
        while self.worker.alive and not self.retired.is_set():
            began_s = time.perf_counter()
            if self._drain() or self.worker.stop.is_set():
                show()
            pause(min(5.0, max(FRAME_S, (time.perf_counter() - began_s) / COST)))
        if self.retired.is_set():
            self.view.close()
            return self.view.say("This run is shown in the newer panel.")
        self._drain()
        show()
        self._conclude()

    def _drain(self) -> int:
        """Take over the events come so far; how many there were."""
        events = self.worker.events
        count = 0
        while events:
            arrival_s, event = events.popleft()
            self.reached = dataclasses.asdict(event)
            count += 1
            add_row(self.rows, self.reached)
            self.latest |= newest([self.reached])
            if event.note:
                self.news.append(f"step {event.step}: {event.note}")
            self.pace.see(arrival_s, event.tokens)
        if len(self.rows) > 2 * MOST_ROWS:
            self.rows = thin(self.rows, MOST_ROWS)
        return count

    def _conclude(self) -> None:
        text, kind, again = verdict(self.worker, self.reached)
        self.view.idle(again)
        more = " Run this cell again to go on." if self.mode == "cell" and kind != "good" else ""
        self.view.say(text + more, kind)
        self.view.bar.bar_style = {"good": "success", "bad": "danger"}.get(kind, "warning")
        self.ended.set()

    def _raise(self) -> None:
        error = self.error or (self.worker and not self.worker.alive and self.worker.error)
        if error:
            raise error

    def _ask_stop(self) -> None:
        if self.worker is not None:
            self.worker.stop.set()

    # What is shown.

    def _greet(self) -> None:
        self.view.show(self.rows, self._figures(), self.picture.png(self.rows), self.players())
        step = self.rows[-1]["step"] if self.rows else 0
        if self.resumable and step:
            self.view.start.description = "Continue"
            self.view.say(f"An unfinished run is at step {step:,}; it goes on from there.")
        elif step and step == self.rows[-1]["steps"]:
            self.view.say(f"Finished, at step {step:,}: asked for more steps, it goes on.")
        elif step:
            self.view.say(f"An earlier run reached step {step:,}. Press Start to train.")
        else:
            self.view.say("Choose the switches, then press Start.")

    def _replan(self) -> None:
        """Say what the switches as they stand would take, before any of it is allocated."""
        try:
            words, fits = self.plan(self.view.values())
        except ValueError as error:  # numbers that do not go together
            words = in_words(error)
            fits = False
        self.view.plan.value = message(words, "info" if fits else "warn")

    def _figures(self) -> dict[str, str]:
        return progress_texts(self.latest, self.pace) if self.latest else {}

    def _said(self) -> str:
        return self.profiler.said if self.profiler is not None else ""

    def _draw(self) -> None:
        if not self.rows:
            return
        curve = self.picture.png(self.rows)
        self.view.show(self.rows, self._figures(), curve, self.players(), self._said())
        self.view.stop.disabled = self.worker.stop.is_set()
        if self.worker.stop.is_set():
            return self.view.say("Stopping after this step...")
        left_s = self.pace.left_s(self.reached) if self.reached else None
        clear, enough = outlook(left_s, self.session_hours)
        sampled = f"{self.monitor.in_words()}." if self.monitor and self.monitor.in_words() else ""
        parts = ("Training. Stop saves a checkpoint to go on from.", sampled, clear)
        self.view.say(" ".join(filter(None, parts)), "info" if enough else "warn")
