"""One training run under a panel: build it from the switches, resume it, log it, save its voice.

`TrainSession.run(values, stop)` is what a `TrainPanel` starts. It goes on from the newest sound
checkpoint of an unfinished run, and leaves `model-raw` behind at the end, and `model-ema` where an
average was kept. The data come in as a callable from a position to batches. Knows the loop and its
files; no widget. Where several ranks train together each has a session: the main one's holds the
lock, writes and judges.
"""

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch

from kit.base.config import build
from kit.base.files import write_atomic
from kit.base.hardware import Hardware, is_oom, reset_peak_memory
from kit.base.lock import Lock, held
from kit.base.notes import Note
from kit.base.weights_file import checksum
from kit.base.words import brief
from kit.model.adapters_file import ADAPTERS, save_adapters
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import EffectiveBatch, GPTConfig
from kit.model.weights import WEIGHTS, save_model
from kit.training import checkpoint
from kit.training.checkpoint import CheckpointError
from kit.training.logs import jsonl_log
from kit.training.loop import checkpointer, listen, train, validation_loss
from kit.training.prefetch import prefetch_if_on
from kit.training.ranks import ALONE, RankLost, Ranks, require_same, seed_rank
from kit.training.settings import Diverged, StepEvent, TrainConfig, TrainError
from kit.training.state import TrainState
from kit.training.switches import Applied, SpeedConfig
from kit.training.trainable import FULL, Base, Finetuning


@dataclasses.dataclass(kw_only=True)
class TrainSession:
    model: GPTConfig
    config: TrainConfig
    hw: Hardware
    folder: Path
    make_batches: Callable  # (position or None, grad_accum) -> iterable of EffectiveBatch
    validation: list  # EffectiveBatches
    threads: int  # for PyTorch
    trained_with: dict = dataclasses.field(default_factory=dict)  # as `save_model` takes it
    first_model: Callable = SpeechGPT  # GPTConfig -> the SpeechGPT that a new run begins with
    finetuning: Finetuning = FULL  # what of it trains
    gate: Callable | None = None  # SpeechGPT -> {"cer": ..., "eos_rate": ..., ...}
    check: Callable | None = None  # (SpeedConfig, grad_accum) -> a note; raises where it won't fit
    listeners: tuple = ()  # further callables that hear every StepEvent
    # Holds the run on other machines, too, while it trains; given what is done.
    held_by_all: Callable = lambda what: contextlib.nullcontext()
    state: TrainState | None = None  # of the latest run
    lock: Lock | None = None  # held while it runs: one process trains a run, or one group of ranks
    ranks: Ranks = ALONE  # that train together, each with a session of its own

    @property
    def log_path(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def resumable(self) -> bool:
        """Whether an unfinished run lies here."""
        saved = checkpoint.checkpoints(self.checkpoints)
        return bool(saved) and not self.finished()

    def finished(self) -> bool:
        mark = self.folder / "train-finished"
        try:
            return mark.exists() and int(mark.read_text(encoding="utf-8")) >= self.config.steps
        except (ValueError, OSError) as error:
            raise TrainError(
                f"{mark} is damaged ({brief(error)}): it holds the number of steps this run was "
                "finished with. Write that number there, or delete the file: training then goes on "
                "from the last checkpoint."
            ) from error

    def run(self, values: dict, stop: Event) -> Iterator[StepEvent]:
        """Train with the switches in `values` until done or stopped, going on where a run stands.

        A finished run has nothing left to do and yields nothing. The switches may be others than
        those that preflight saw, so `check` is asked first. Raises TrainError, what `check` raises,
        and LockError while another process trains this run.
        """
        if self.finished():
            return
        here = contextlib.nullcontext()
        if self.ranks.is_main:
            here = held(self.folder / "train.lock", "training")
        with here as self.lock, self.held_by_all("training"):
            try:
                yield from self._run(dict(values), stop)
            except RankLost as error:
                raise TrainError(f"{error} {self._left()}") from error

    def _left(self) -> str:
        """What a run that lost one of its processes has kept, and how to go on."""
        saved = checkpoint.checkpoints(self.checkpoints)
        kept = f"the last checkpoint is {saved[-1]}" if saved else "it had no checkpoint yet"
        return (
            f"Why, its own words or torchrun's tell. Nothing is lost but the steps since: {kept}. "
            "Give the same command again: it goes on from there, with as many processes as you "
            "like."
        )

    def _run(self, values: dict, stop: Event) -> Iterator[StepEvent]:
        grad_accum = values.pop("grad_accum", 1)
        torch.set_num_threads(self.threads)  # counts for the calling thread alone
        speed = build(SpeedConfig, values)
        checked = self.check(speed, grad_accum) if self.check else ""
        torch.manual_seed(self.config.seed)  # after the check, whose steps draw numbers, too
        config = self.config if self.gate else self.config.without_gate()
        model = self.first_model(self.model)
        finetuning = self.finetuning
        if finetuning.adapters and finetuning.base is None:
            base = Base(config=model.config, sha256=checksum(model.state_dict()))
            finetuning = dataclasses.replace(finetuning, base=base)
        self.state = TrainState(model, config, speed, self.hw, finetuning, self.ranks)
        seed_rank(self.ranks, config.seed, 0)
        resumed = self._resume()
        require_same(self.ranks, "precision", self.state.applied.precision)
        require_same(self.ranks, "the step they go on from", self.state.step)
        self.state.notes = [*self.state.applied.notes, *resumed]
        if checked:
            self.state.notes.append(checked)
        reset_peak_memory(self.hw.device)  # which the check's steps may have set
        for left in range(self.config.rollbacks, -1, -1):
            try:
                yield from self._events(grad_accum, stop)
                break
            except Diverged as error:
                self._go_back(error, left)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                raise advice(error) from error
        self._confirm_lock()
        saved = checkpoint.of_step(self.checkpoints, self.state.step)
        if self.state.step and not self.ranks.from_main(saved.exists):
            self.state.save(self.checkpoints)  # stopped after the listeners had heard the last step
        if self.state.step >= self.config.steps or self.state.settled:
            self._finish()
        self.ranks.from_main(lambda: None)  # nobody goes on before the main rank has written all

    def _events(self, grad_accum: int, stop: Event) -> Iterator[StepEvent]:
        """The run from where its state stands, heard by the log and the checkpoints."""
        state = self.state
        model = self.state.model
        batches = self._batches(grad_accum)

        def validate() -> float:
            precision = state.applied.precision
            return validation_loss(
                model, self.validation, self.hw.device, precision, state.micro_rows, self.ranks
            )

        def gate() -> dict:
            whole = merged(state.model)
            return self.ranks.from_main(lambda: self.gate(whole))

        # Several ranks stop together, at the top of the loop, and then save: see `_run`.
        saves = checkpointer(state, self.checkpoints, None if self.ranks.several else stop)
        listeners = (self._confirm_lock, jsonl_log(self.log_path), saves, *self.listeners)
        if not self.ranks.is_main:
            listeners = (saves,)
        events = train(state, batches, validate, stop, gate if self.gate else None)
        yield from listen(events, *listeners)

    def _confirm_lock(self, _event: StepEvent | None = None) -> None:
        if self.lock is not None:
            self.lock.confirm()

    def _batches(self, grad_accum: int):
        """The batches from the state's position on."""
        batches = self.make_batches(self.state.position, grad_accum)
        return prefetch_if_on(batches, self.state.applied)

    def trial(self, values: dict, batches: Sequence[EffectiveBatch]) -> list[dict]:
        """Rows of a real step of a throwaway model on each of `batches`, as the log has them.

        What a plan can be made from before the run begins; nothing is logged, saved or kept.
        They should be usual ones: the run itself may begin with short sentences.
        """
        with ThreadPoolExecutor(1) as pool:  # ends its compute threads: leave_cores_to_worker
            return pool.submit(self._trial, dict(values), batches).result()

    def _trial(self, values: dict, batches: Sequence[EffectiveBatch]) -> list[dict]:
        torch.set_num_threads(self.threads)
        values.pop("grad_accum", None)  # the batches are cut already
        speed = build(SpeedConfig, values, compile=False)
        finetuning = self.finetuning.without_phases()
        # The run itself may be shorter than what is tried, and nothing judges that.
        steps = max(len(batches), self.config.steps)
        config = dataclasses.replace(self.config.without_gate(), steps=steps, val_patience=0)
        state = TrainState(SpeechGPT(self.model), config, speed, self.hw, finetuning)
        rows = []
        for event in itertools.islice(train(state, batches), len(batches)):
            wall_s = event.unix_s - rows[-1]["unix_s"] if rows else None
            rows.append(dataclasses.asdict(event))
            rows[-1]["wall_s"] = wall_s
        return rows

    def _go_back(self, error: Diverged, left: int) -> None:
        """To the last good checkpoint, with half the learning rate; TrainError when none helps."""
        tree, notes = checkpoint.load_newest(self.checkpoints, self.state.require_whole)
        if tree is None or not left:
            tried = self.config.rollbacks - left if tree else 0
            raise TrainError(
                f"{error} Going back to a checkpoint with half the learning rate was tried "
                f"{tried} times."
            ) from error
        self.state.notes = notes  # what is noted of the steps gone back over is over
        self.state.restore(tree)
        self.state.adaptation.rate /= 2
        self.state.save(self.checkpoints)  # a kill just now must not bring the old rate back
        self.state.notes.append(
            f"not finite for {self.config.patience + 1} steps: back to step {self.state.step}, "
            f"learning rates x{self.state.adaptation.rate:g}"
        )

    def _resume(self) -> list[str]:
        tree, notes = checkpoint.load_newest(self.checkpoints, self.state.require_whole)
        if tree is None and notes:  # to begin anew would throw away what may yet be saved
            raise TrainError(
                f"None of the {len(notes)} checkpoints in {self.checkpoints} can be used. "
                f"{brief(notes[0], 400)} Bring back a copy, or delete that folder to begin anew."
            )
        if tree is None:
            if self.ranks.is_main:
                self.log_path.unlink(missing_ok=True)
            return notes
        self.state.restore(tree)
        return [*notes, f"resumed from step {self.state.step}", *self.state.notes]

    def _finish(self) -> None:
        """Leave the last weights, and the average: of the best step where that decides the end.

        Without an average the gate has heard the weights themselves: those of the best step stay.
        """
        state = self.state
        average = self.folder / WEIGHTS["ema"]
        if state.ema:
            self._save_weights("raw")
        judged = state.config.gate_every or state.config.val_patience
        if judged and 0 < state.best.step < state.step:
            self._restore_best()
        if state.ema:
            with state.ema.swapped_in():
                self._save_weights("ema")
        else:
            self._save_weights("raw")
            average.unlink(missing_ok=True)  # of an earlier, shorter training
            (self.folder / ADAPTERS["ema"]).unlink(missing_ok=True)
        if self.ranks.is_main:
            write_atomic(self.folder / "train-finished", str(self.config.steps))

    def _save_weights(self, name: str) -> None:
        """The plain model; beside it, where adapters were trained, these alone."""
        state = self.state
        path = self.folder / WEIGHTS[name]
        model = merged(state.model)
        if not self.ranks.is_main:
            return
        save_model(model, path, trained_with=self.trained_with)
        if state.finetuning.adapters:
            lora = state.finetuning.lora
            tables = state.trainable.first_rows
            sha256 = state.finetuning.base.sha256
            save_adapters(state.model, self.folder / ADAPTERS[name], lora, tables, sha256)

    def _restore_best(self) -> None:
        """To the weights of the best step; the last ones stay, with a warning, where they are lost.

        Whoever trained for days must not be left without a voice for one damaged file.
        """
        best = checkpoint.of_step(self.checkpoints, self.state.best.step)
        try:
            self.state.restore(checkpoint.load(best))
        except CheckpointError as error:
            warnings.warn(
                f"{best} was the best step's ({error}): the voice is made of the last step, "
                f"{self.state.step}.",
                category=Note,
                stacklevel=2,
            )


def advice(error: BaseException) -> TrainError:
    """What to do when memory runs out where no smaller batch would help."""
    return TrainError(
        f"Out of memory beside the batch itself ({error}): weights, gradients, optimizer and "
        "average together are too large. Put the average on the CPU (`ema_offload`), AdamW's "
        "moments into 8 bits (`adamw_8bit`), choose a smaller model, or close what else uses this "
        "device. Run again: it goes on from the last checkpoint."
    )


def summary(rows: list[dict], applied: Applied | None = None) -> dict:
    """The figures of a log for the report: steps, speed, memory, last validation losses."""
    seconds = sum(r["step_s"] for r in rows)
    last = next((r for r in reversed(rows) if r["val_loss"] is not None), {})
    figures = {
        "steps": rows[-1]["step"],
        "epochs": rows[-1].get("epoch"),
        "steps_per_s": len(rows) / seconds,
        "tokens_per_s": sum(r["tokens"] for r in rows) / seconds,
        "peak_memory_bytes": max(r["memory_bytes"] for r in rows),
        "loss": rows[-1]["loss"],
        "val_loss": last.get("val_loss", math.nan),
        "ema_val_loss": last.get("ema_val_loss"),
    }
    if applied:
        figures["ran"] = applied.table()
    return figures
