"""The training panel: buttons, switches and a live curve around a training in another process.

A thread follows the run's log and writes the widgets; a click only sets an event or sends a
request. Without a front end the same training is followed with plain lines.
"""

import asyncio
import dataclasses
import inspect
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from kit.base.errors import SettingError
from kit.base.formatting import clock, describe_error
from kit.notebook.plots import png, show
from kit.notebook.progress import Lines, Pace, newest, progress_texts, verdict
from kit.notebook.result import is_watched
from kit.notebook.training_curves import panel_picture, run_curves, thin
from kit.notebook.widgets import Field, View
from kit.training.logs import add_row, read_log
from kit.training.process import PROFILE, STOP, TrainingProcess

FRAME_S = 0.5  # between two looks at the log
COST = 0.02  # share of one core that drawing the curve may take
EARLY_S = 2  # between two drawings at the beginning, when somebody looks
MAX_ROWS = 2000  # of the log, held for the plot
LOOKS_S = (1.0, 4.0)  # after "Run all" has come to `wait`: a slow page misses the first
# Panels with a run, by log: a cell that is run again replaces the older panel.
_PANELS: dict[Path, "TrainPanel"] = {}
# Of widgets, and what a page that was reloaded asks before it shows one.
HANDLED = ("comm_open", "comm_msg", "comm_close", "kernel_info_request", "comm_info_request")


@dataclasses.dataclass(eq=False, repr=False)
class TrainPanel:
    """A training under buttons. `panel.run()` is all a notebook calls; `panel.wait()` joins.

    `values` are the switches and `fields` by name. A training that already runs is followed.
    """

    process: TrainingProcess
    start: Callable[[dict], None]  # of values: starts `process`, or raises what is wrong with them
    switches: list
    fields: list[Field] = ()
    resumable: bool = False  # there is an unfinished checkpoint, so it starts at once
    finished: bool = False
    # Of values: what memory and time they take, and whether the memory is there; or raises what is
    # wrong with them.
    plan: Callable[[dict], tuple[str, bool]] = lambda values: ("", True)
    players: Callable[[], str] = str  # HTML of what the run has spoken so far
    profile: Callable[[], str] = str  # describes the newest profile
    health: Callable[[list[dict]], list[str]] = lambda rows: []  # lines about the rows of the log
    failure: Callable[[list[dict]], str] = lambda rows: ""  # why a finished training has failed
    # Until a run starts by itself, as in "Run all"; a click on anything stops it. None: it waits.
    countdown_s: float | None = 20.0

    def __post_init__(self):
        self.rows = thin(read_log(self.process.log), MAX_ROWS)
        self.latest = newest(self.rows[-1000:])  # the newest value of every field
        self.unprinted_notes: list[str] = []
        self.shown_by = ""  # the cell that shows it
        self.start_clicked, self.ended, self.retired = (threading.Event() for _ in range(3))
        self.thread: threading.Thread | None = None
        self._begin()
        self.reached = self.rows[-1] if self.rows else None  # the last row of this training
        self.view = View(self.switches, self.fields)
        self.view.start.on_click(lambda _: self.start_clicked.set())
        self.view.stop.on_click(lambda _: self._stop_clicked())
        self.view.profile.on_click(lambda _: self.process.request(PROFILE))
        self.view.on_choice(self._changed)
        self._show_plan()
        self._greet()

    def run(self) -> None:
        """Show the panel. For a program, start the training and wait for its end.

        Then its error is raised; the first interrupt stops it with a checkpoint, the second leaves.
        """
        older = _PANELS.get(self.process.log.resolve())
        if older is not None and older is not self:
            older.retired.set()
            if older.process.running:
                self.process = older.process
        _PANELS[self.process.log.resolve()] = self
        if not is_watched():
            return self._run_plain()
        countdown_s = 0.0 if self.resumable else self.countdown_s
        if countdown_s is not None and not self.finished:
            self.start_at_s = time.monotonic() + countdown_s
        display(self.view.box)
        self.shown_by = running_cell()
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._follow, name="panel", daemon=True)
            self.thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the training has ended; raise its error.

        The first interrupt stops it with a checkpoint, the second one leaves. Raises TimeoutError
        after `timeout_s`, and RuntimeError where nothing was started. Buttons and status are shown
        once more, as the panel's cell may be out of sight; "Run all" is brought back to the panel.
        """
        if _PANELS.get(self.process.log.resolve()) is not self:
            raise RuntimeError("Another panel shows this run now. Call run() first, then wait().")
        if is_watched() and self.shown_by != running_cell() and not self.ended.is_set():
            display(self.view.mirror)
        until_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        looks_at_s = [time.monotonic() + wait_s for wait_s in LOOKS_S]

        def work() -> None:
            with Clicks() as clicks:
                while not (self.ended.is_set() or self.error) and time.monotonic() < until_s:
                    clicks.poll()
                    if clicks.run_all and looks_at_s and time.monotonic() > looks_at_s[0]:
                        looks_at_s.pop(0)
                        if not clicks.clicked:  # else somebody sees it already
                            self.view.come_into_sight()
                    self.ended.wait(0.1)

        self._interruptible(work)
        if self.error is not None:
            raise self.error
        if not self.ended.is_set():
            raise TimeoutError(f"After {timeout_s:g} s the training has not ended.")

    def _interruptible(self, work: Callable[[], None]) -> None:
        """Do `work`, which waits; the first interrupt asks the training to stop."""
        try:
            return work()
        except KeyboardInterrupt:
            if not self.process.running:
                raise
        self._request_stop()
        work()

    # Without a front end.

    def _run_plain(self) -> None:
        if not self.process.running:
            if self.finished:
                return print(f"Finished, at step {self.rows[-1]['step']:,}.")
            self.start(self.view.values())
        self._begin()
        lines = Lines()

        def work() -> None:
            running = True
            while running:
                running = self.process.running
                self._read_log()
                lines.show(self.latest, self._texts(), self.unprinted_notes)
                if running:
                    time.sleep(0.1)

        self._interruptible(work)
        print(self._conclude(), flush=True)
        profiled = self.profile()
        if profiled:
            print(profiled, flush=True)
        if get_ipython() is not None:
            values = self.view.values()
            on = {switch.label: values[switch.name] for switch in self.switches}
            show(panel_picture(self.rows, on))
        if self.error is not None:
            raise self.error

    # With one: a thread follows one training after another, until a newer panel takes over.

    def _follow(self) -> None:
        try:
            while not self.retired.is_set():
                if self.process.running:
                    self._follow_training()
                elif self._is_due():
                    self._launch()
                else:
                    self.start_clicked.wait(FRAME_S)
        except Exception as error:  # training continues; the user and wait() get the error
            self.error = error
            self.view.say(f"This panel stopped; training continues. {describe_error(error)}", "bad")
        if self.retired.is_set():
            self.view.enable()  # nothing: it can only be read
            self.view.say("This run is shown in the newer panel.")

    def _is_due(self) -> bool:
        if self.start_clicked.is_set():
            return True
        start_at_s = self.start_at_s
        if start_at_s is None:
            return False
        left_s = start_at_s - time.monotonic()
        if left_s > 0:
            self.view.count_down(left_s)
            if self.start_at_s is None:  # stopped by a click meanwhile
                self._hold()
        return left_s <= 0 and self.start_at_s is not None

    def _launch(self) -> None:
        self.start_clicked.clear()
        self.start_at_s = None
        self.view.running(started=False)
        self.view.say("Starting...")
        try:
            self.start(self.view.values())
        except (ValueError, OSError) as error:  # of the settings or the disk, in a sentence
            self.error = error
            self._conclude()
        else:  # at once: it may have ended before anybody looks whether it runs
            self._follow_training()

    def _follow_training(self) -> None:
        self._begin()
        self.view.running()
        while self.process.running and not self.retired.is_set():
            if self._read_log() or self.stopping:
                self._draw()
            self.retired.wait(FRAME_S)
        if not self.retired.is_set():
            self._read_log()
            self._draw()
            self._conclude()

    def _begin(self) -> None:
        self.started_s = time.monotonic()
        self.redraw_at_s = 0.0
        self.start_at_s: float | None = None  # a countdown is over; Stop now stops the training
        self.ended.clear()
        self.error: Exception | None = None
        self.stopping = False
        self.pace = Pace()
        self.reached = None

    def _read_log(self) -> int:
        """Take over the rows logged since the last time; how many there were."""
        rows = self.process.new_rows()
        for row in rows:
            self.reached = row
            add_row(self.rows, row)
            self.latest |= newest([row])
            if row.get("note"):
                self.unprinted_notes.append(f"step {row['step']}: {row['note']}")
            self.pace.see(row["unix_s"], row["tokens"])
        if len(self.rows) > 2 * MAX_ROWS:
            self.rows = thin(self.rows, MAX_ROWS)
        return len(rows)

    def _conclude(self) -> str:
        self.error = self.error or self.process.error()
        took_s = time.monotonic() - self.started_s
        text, kind = verdict(self.error, self.reached, self.stopping, took_s)
        failure = "" if self.error or self.stopping else self.failure(self.rows)
        if failure:
            text, kind = f"{text} {failure}", "bad"
        self.view.idle()
        self._show_plan()
        self.view.say(text, kind)
        self.view.bar.bar_style = {"good": "success", "bad": "danger"}.get(kind, "warning")
        self.ended.set()
        return text

    # Clicks.

    def _stop_clicked(self) -> None:
        if self.start_at_s is not None:
            self._hold()
        else:
            self._request_stop()

    def _hold(self) -> None:
        """End the countdown: from now on training waits for Start."""
        self.start_at_s = None
        self.view.idle()
        self._show_plan()
        self.view.say("Choose the settings, then press Start.")

    def _request_stop(self) -> None:
        self.stopping = True
        self.process.request(STOP)

    def _changed(self) -> None:
        if self.start_at_s is not None:
            self._hold()
        elif not self.process.running:
            self._show_plan()

    def _show_plan(self) -> None:
        """Show what the settings as they are would take, or what is wrong with them."""
        try:
            words, fits = self.plan(self.view.values())
        except ValueError as error:
            text = describe_error(error)
            name = getattr(error, "field", "")
            if isinstance(error, SettingError):  # the field says enough, without its section
                text = error.rest.lstrip(". ")
            if name in self.view.fields:
                label = self.view.fields[name].field.label
                text = text.replace(f"{name} = ", f"{label} = ", 1)
            return self.view.show_plan(text, "bad", name)
        self.view.show_plan(words, "info" if fits else "warn")

    # What is shown.

    def _show(self, more: str = "") -> None:
        self.view.show(self.rows, self.latest, self._texts(), self._curve(), self.players(), more)

    def _greet(self) -> None:
        self._show()
        step = self.rows[-1]["step"] if self.rows else 0
        if self.resumable and step:
            self.view.say(f"An unfinished run is at step {step:,}; it resumes from there.")
        elif self.finished:
            self.view.say(
                f"Finished, at step {step:,}. To train further, raise Max steps and Start."
            )
        elif step:
            self.view.say(f"An earlier run reached step {step:,}. Press Start to train.")
        else:
            self.view.say("Choose the settings, then press Start.")

    def _texts(self) -> dict[str, str]:
        return progress_texts(self.latest, self.pace) if self.latest else {}

    def _curve(self) -> bytes:
        """The curve as a PNG, drawn so seldom that it costs little; early on more often."""
        now_s, started_s = time.monotonic(), time.thread_time()
        if now_s >= self.redraw_at_s or not self.process.running:
            self.curve = png(run_curves(self.rows, live=True))
            cost_s = time.thread_time() - started_s
            early_s = max(EARLY_S, (now_s - self.started_s) / 10)
            self.redraw_at_s = now_s + min(cost_s / COST, early_s)
        return self.curve

    def _draw(self) -> None:
        if not self.rows:
            return
        lines = [self.profile(), *self.health(self.rows)]
        self._show("\n".join(filter(None, lines)))
        self.view.stop.disabled = self.stopping
        if self.stopping:
            return self.view.say("Stopping after this step...")
        left_s = self.pace.left_s(self.reached) if self.reached else None
        to_go = "" if left_s is None else f" {clock(left_s)} to go."
        self.view.say(f"Training. Stop saves a checkpoint to resume from.{to_go}")


def running_cell() -> str:
    """The id of the request that the kernel works on; "" without a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel.get_parent("shell")["header"]["msg_id"] if kernel else ""


class Clicks:
    """Within `with Clicks() as clicks`, `clicks.poll()` handles the clicks on widgets so far.

    A kernel runs callbacks only between cells, so a cell that waits for a training has to ask for
    them. A reloaded page is answered, too. Everything else (the next cells of "Run all") waits, in
    its order. `kernel.do_one_iteration`, which jupyter_ui_poll calls, does nothing in ipykernel 7.
    """

    def __init__(self):
        self.kernel = getattr(get_ipython(), "kernel", None)
        # From where the kernel's main thread gets messages, and where it sends its replies.
        self.stream = self.replies = getattr(self.kernel, "shell_stream", None)
        thread = getattr(self.kernel, "shell_channel_thread", None)
        if thread is not None:  # ipykernel 7: it reads the socket
            self.stream = thread.manager._shell_channel_to_main.to_stream
            self.replies = thread.manager.get_subshell_to_shell_channel_socket(None)
        self.held = []
        self.held_tasks = []
        self.run_all = False  # more cells wait for this one
        self.clicked = False

    def __enter__(self) -> "Clicks":
        if self.stream is not None:
            self.callback = self.stream._recv_callback
            self.stream.on_recv(self._receive, copy=False)
        return self

    def __exit__(self, *_error) -> None:
        if self.stream is None:
            return
        self.stream.on_recv(self.callback, copy=False)
        for frames in self.held:
            result = self.callback(frames)
            if inspect.isawaitable(result):  # ipykernel 7; the tasks run once this cell has ended
                self.held_tasks.append(asyncio.ensure_future(result))

    def poll(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def _receive(self, frames: list) -> None:
        session = self.kernel.session
        ident, parts = session.feed_identities(frames, copy=False)
        kind = session.deserialize(parts, content=False, copy=False)["header"]["msg_type"]
        if kind in HANDLED:
            self.clicked = self.clicked or kind == "comm_msg"
            self._handle(kind, ident, session.deserialize(parts, copy=False))
        else:
            self.run_all = self.run_all or kind == "execute_request"
            self.held.append(frames)

    def _handle(self, kind: str, ident, message: dict) -> None:
        # A widget sends its next change only after "idle" for the one before.
        kernel = self.kernel
        parent_ident = kernel._parent_ident["shell"]
        parent = kernel.get_parent("shell")
        kernel.set_parent(ident, message, channel="shell")
        kernel._publish_status("busy", "shell", parent=message)
        try:
            answer = kernel.shell_handlers[kind](self.replies, ident, message)
            if inspect.isawaitable(answer):  # run to its end here: the event loop is busy
                with suppress(StopIteration):
                    answer.send(None)
                    raise RuntimeError("The kernel did not answer at once: reload the page.")
        finally:
            kernel._publish_status("idle", "shell", parent=message)
            kernel.set_parent(parent_ident, parent, channel="shell")
