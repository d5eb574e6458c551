"""One training from start to end: build or resume, train, roll back when it diverges, save.

`TrainingRun.events` is the whole of it, in this process. It leaves `model-raw`, and `model-ema`
where an average was kept. Where several ranks train together each has a TrainingRun; the main
rank's holds the lock, writes and evaluates.
"""

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from kit.base.errors import DamagedFileError, Diverged, TrainError
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.base.hardware import Hardware, is_oom, reset_peak_memory
from kit.base.lock import Lock, held
from kit.base.notes import Note
from kit.base.tensor_file import checksum
from kit.model.adapters_file import ADAPTERS, save_adapters
from kit.model.gpt import SpeechGPT
from kit.model.lora import merged
from kit.model.sequence import EffectiveBatch, GPTConfig
from kit.model.weights import WEIGHTS, save_model
from kit.training import checkpoint
from kit.training.config import StepEvent, TrainConfig
from kit.training.launch import LOCK
from kit.training.logs import jsonl_log
from kit.training.loop import checkpointer, listen, train, validation_loss
from kit.training.prefetch import prefetch_if_on
from kit.training.ranks import ALONE, RankLost, Ranks, require_same, seed_rank
from kit.training.switches import Applied, SpeedConfig
from kit.training.trainable import FULL, Base, Finetuning
from kit.training.trainer import Trainer

FINISHED = "train-finished"  # a file in a run's folder: after how many steps it was finished


@dataclasses.dataclass(kw_only=True)
class TrainingRun:
    model: GPTConfig
    config: TrainConfig
    speed: SpeedConfig
    hw: Hardware
    folder: Path
    make_batches: Callable  # (position or None) -> iterable of EffectiveBatch
    validation: list  # of EffectiveBatch
    trained_with: dict = dataclasses.field(default_factory=dict)  # as `save_model` takes it
    first_model: Callable = SpeechGPT  # GPTConfig -> the SpeechGPT that a new run starts with
    finetuning: Finetuning = FULL  # what of it trains
    evaluate: Callable | None = None  # the gate: SpeechGPT -> {"cer": ..., "eos_rate": ..., ...}
    listeners: tuple = ()  # further callables that get every StepEvent
    sample: Callable[[], dict] = dict  # fields of StepEvent that a monitor measures
    hold: Callable = lambda what: contextlib.nullcontext()  # keeps other machines from training it
    ranks: Ranks = ALONE  # that train together
    notes: tuple = ()  # for the first step's row
    trainer: Trainer | None = None
    lock: Lock | None = None  # one process trains a run, or one group of ranks

    @property
    def log(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def finished(self) -> bool:
        return finished_steps(self.folder) >= self.config.steps

    def resumable(self) -> bool:
        """Whether there is a checkpoint of an unfinished run."""
        return bool(checkpoint.checkpoints(self.checkpoints)) and not self.finished()

    def events(self, stop: Callable[[], bool] = lambda: False) -> Iterator[StepEvent]:
        """Train until done or `stop()`, from the newest sound checkpoint if there is one.

        A finished run yields nothing. Raises TrainError, and LockError while another process trains
        this run.
        """
        if self.finished():
            return
        lock = contextlib.nullcontext()
        if self.ranks.is_main:
            lock = held(self.folder / LOCK, "training")
        with lock as self.lock, self.hold("training"):
            try:
                yield from self._train(stop)
            except RankLost as error:
                raise TrainError(f"{error} {self._what_is_kept()}") from error

    def _what_is_kept(self) -> str:
        saved = checkpoint.checkpoints(self.checkpoints)
        kept = f"the last checkpoint is {saved[-1]}" if saved else "there was no checkpoint yet"
        return (
            "The other process, or torchrun, says why. Only the steps since the last checkpoint "
            f"are lost: {kept}. Give the same command again, with any number of processes."
        )

    def build_trainer(self) -> Trainer:
        """A trainer at step 0, always from the same weights and random numbers."""
        torch.manual_seed(self.config.seed)
        config = self.config if self.evaluate else self.config.without_gate()
        model = self.first_model(self.model)
        finetuning = self.finetuning
        if finetuning.adapters and finetuning.base is None:
            base = Base(config=model.config, sha256=checksum(model.state_dict()))
            finetuning = dataclasses.replace(finetuning, base=base)
        return Trainer(model, config, self.speed, self.hw, finetuning, self.ranks)

    def _train(self, stop: Callable[[], bool]) -> Iterator[StepEvent]:
        self.trainer = trainer = self.build_trainer()
        seed_rank(self.ranks, self.config.seed, 0)
        resumed = self._resume()
        require_same(self.ranks, "precision", trainer.applied.precision)
        require_same(self.ranks, "the step they resume from", trainer.step)
        trainer.notes = [*trainer.applied.notes, *resumed, *self.notes]
        reset_peak_memory(self.hw.device)  # building the model is not part of a step
        for rollbacks_left in range(self.config.rollbacks, -1, -1):
            try:
                yield from self._steps(stop)
                break
            except Diverged as error:
                self._roll_back(error, rollbacks_left)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                raise out_of_memory(error) from error
        self._confirm_lock()
        saved = checkpoint.of_step(self.checkpoints, trainer.step)
        if trainer.step and not self.ranks.from_main(saved.exists):
            trainer.save(self.checkpoints)  # stopped after the last step's listeners
        if trainer.step >= self.config.steps or trainer.settled:
            self._finish()
        self.ranks.from_main(lambda: None)  # no rank leaves before the main one has written all

    def _steps(self, stop: Callable[[], bool]) -> Iterator[StepEvent]:
        """Steps from where the trainer stands, with the log and the checkpoints listening."""
        trainer = self.trainer

        def validate() -> float:
            precision = trainer.applied.precision
            return validation_loss(
                trainer.model,
                self.validation,
                self.hw.device,
                precision,
                trainer.micro_rows,
                self.ranks,
            )

        def evaluate() -> dict:
            model = merged(trainer.model)
            return self.ranks.from_main(lambda: self.evaluate(model))

        batches = prefetch_if_on(self.make_batches(trainer.position), trainer.applied)
        # Several ranks stop together, at the top of the loop, and `_train` saves.
        save = checkpointer(
            trainer, self.checkpoints, (lambda: False) if self.ranks.several else stop
        )
        listeners = (self._confirm_lock, jsonl_log(self.log), save, *self.listeners)
        if not self.ranks.is_main:
            listeners = (save,)
        steps = train(trainer, batches, validate, stop, evaluate if self.evaluate else None)
        steps = (dataclasses.replace(event, **self.sample()) for event in steps)
        yield from listen(steps, *listeners)

    def _confirm_lock(self, _event: StepEvent | None = None) -> None:
        if self.lock is not None:
            self.lock.confirm()

    def _roll_back(self, error: Diverged, rollbacks_left: int) -> None:
        """To the last good checkpoint, with half the learning rate; TrainError where none helps."""
        trainer = self.trainer
        tree, notes = checkpoint.load_newest(self.checkpoints, trainer.require_whole)
        if tree is None or not rollbacks_left:
            tried = self.config.rollbacks - rollbacks_left if tree else 0
            raise TrainError(
                f"{error} Returning to a checkpoint with half the learning rate was tried {tried} "
                "times."
            ) from error
        trainer.notes = notes
        trainer.restore(tree)
        trainer.adaptation.rate /= 2
        trainer.save(self.checkpoints)  # a kill just now must not bring the old rate back
        trainer.notes.append(
            f"not finite for {self.config.patience + 1} steps: back to step {trainer.step}, "
            f"learning rates x{trainer.adaptation.rate:g}"
        )

    def _resume(self) -> list[str]:
        """Continue from the newest sound checkpoint, if there is one; returns notes."""
        tree, notes = checkpoint.load_newest(self.checkpoints, self.trainer.require_whole)
        if tree is None and notes:  # starting again would throw away what may yet be saved
            raise TrainError(
                f"None of the {len(notes)} checkpoints in {self.checkpoints} can be used. "
                f"{shorten(notes[0], 400)} Bring back a copy, or delete that folder to start again."
            )
        if tree is None:
            if self.ranks.is_main:
                self.log.unlink(missing_ok=True)
            return notes
        self.trainer.restore(tree)
        return [*notes, f"resumed from step {self.trainer.step}", *self.trainer.notes]

    def load_newest(self) -> SpeechGPT:
        """The plain model of the newest checkpoint. Raises TrainError where there is none."""
        trainer = self.build_trainer()
        tree, _ = checkpoint.load_newest(self.checkpoints, trainer.require_whole)
        if tree is None:
            raise TrainError(f"There is no usable checkpoint in {self.checkpoints} yet.")
        trainer.restore(tree)
        return merged(trainer.model)

    def _finish(self) -> None:
        """Save the last weights, and the average: of the best step where one was judged.

        Without an average the gate has judged the weights themselves: those of the best step stay.
        """
        trainer = self.trainer
        average = self.folder / WEIGHTS["ema"]
        if trainer.ema:
            self._save_weights("raw")
        judged = trainer.config.gate_every or trainer.config.val_patience
        if judged and 0 < trainer.best.step < trainer.step:
            self._restore_best()
        if trainer.ema:
            with trainer.ema.swapped_in():
                self._save_weights("ema")
        else:
            self._save_weights("raw")
            average.unlink(missing_ok=True)  # of an earlier, shorter training
            (self.folder / ADAPTERS["ema"]).unlink(missing_ok=True)
        if self.ranks.is_main:
            write_atomic(self.folder / FINISHED, str(self.config.steps))

    def _save_weights(self, name: str) -> None:
        """Save the plain model; where adapters were trained, these alone beside it."""
        trainer = self.trainer
        path = self.folder / WEIGHTS[name]
        model = merged(trainer.model)
        if not self.ranks.is_main:
            return
        save_model(model, path, trained_with=self.trained_with)
        if trainer.finetuning.adapters:
            lora = trainer.finetuning.lora
            tables = trainer.trainable.first_rows
            sha256 = trainer.finetuning.base.sha256
            save_adapters(trainer.model, self.folder / ADAPTERS[name], lora, tables, sha256)

    def _restore_best(self) -> None:
        """Return to the weights of the best step; a damaged checkpoint leaves the last ones."""
        best = checkpoint.of_step(self.checkpoints, self.trainer.best.step)
        try:
            self.trainer.restore(checkpoint.load(best))
        except DamagedFileError as error:
            warnings.warn(
                f"{best} was the best step's ({error}): the voice is made from the last step, "
                f"{self.trainer.step}.",
                category=Note,
                stacklevel=2,
            )


def finished_steps(folder: Path) -> int:
    """After how many steps the run in `folder` was finished; 0: it was not."""
    path = folder / FINISHED
    try:
        return int(path.read_text(encoding="utf-8")) if path.exists() else 0
    except (ValueError, OSError) as error:
        raise TrainError(
            f"{path} is damaged ({shorten(error)}): it holds the number of steps this run was "
            "finished with. Write that number there, or delete the file: training then resumes "
            "from the last checkpoint."
        ) from error


def out_of_memory(error: BaseException) -> TrainError:
    """What to do when memory runs out where no smaller batch would help."""
    return TrainError(
        f"Out of memory beside the batch itself ({error}): weights, gradients, optimizer and "
        "average together are too large. Put the average on the CPU (`ema_offload`), AdamW's "
        "moments into 8 bits (`adamw_8bit`), choose a smaller model, or close what else uses this "
        "device. Run again: training resumes from the last checkpoint."
    )


def trial_rows(
    model: GPTConfig,
    config: TrainConfig,
    speed: SpeedConfig,
    hw: Hardware,
    finetuning: Finetuning,
    batches: Sequence[EffectiveBatch],
    threads: int,
) -> list[dict]:
    """Log rows of a real step of a throwaway model on each of `batches`; nothing is saved.

    The batches should be usual ones: the run itself may begin with short sentences.
    """
    torch.set_num_threads(threads)
    speed = dataclasses.replace(speed, compile=False)
    # The run itself may be shorter than the trial, and nothing stops the trial early.
    steps = max(len(batches), config.steps)
    config = dataclasses.replace(config.without_gate(), steps=steps, val_patience=0)
    trainer = Trainer(SpeechGPT(model), config, speed, hw, finetuning.without_phases())
    rows = []
    for event in itertools.islice(train(trainer, batches), len(batches)):
        wall_s = event.unix_s - rows[-1]["unix_s"] if rows else None
        rows.append(dataclasses.asdict(event) | {"wall_s": wall_s})
    return rows


def summary(rows: list[dict], applied: Applied | None = None) -> dict:
    """The figures of a log for the report: steps, speed, memory, last validation losses."""
    seconds = sum(row["step_s"] for row in rows)
    validated = next((row for row in reversed(rows) if row["val_loss"] is not None), {})
    figures = {
        "steps": rows[-1]["step"],
        "epochs": rows[-1].get("epoch"),
        "steps_per_s": len(rows) / seconds,
        "tokens_per_s": sum(row["tokens"] for row in rows) / seconds,
        "peak_memory_bytes": max(row["memory_bytes"] for row in rows),
        "loss": rows[-1]["loss"],
        "val_loss": validated.get("val_loss", math.nan),
        "ema_val_loss": validated.get("ema_val_loss"),
    }
    if applied:
        figures["ran"] = applied.table()
    return figures
