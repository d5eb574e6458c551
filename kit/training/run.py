"""A training run: build or resume the trainer, train, roll back when it diverges, save.

It leaves `model-raw`, and `model-ema` where an average was kept. Each of several ranks has a
TrainingRun; only the main rank locks, writes and evaluates.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kit.base.errors import DamagedFileError, Diverged, KitError, Note
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.base.hardware import Hardware, autocast, reset_peak_memory
from kit.base.lock import held
from kit.base.run import read_run_file
from kit.model.gpt import SpeechGPT, weighted_loss
from kit.model.lora import merged
from kit.model.sequence import EffectiveBatch
from kit.model.weights import ADAPTERS, WEIGHTS, save_adapters, save_model
from kit.settings import GPTConfig, SpeedConfig, TrainConfig
from kit.training import checkpoint
from kit.training.config import FULL, Finetuning, StepEvent
from kit.training.logs import Listener, jsonl_log, read_log
from kit.training.loop import split_passes, train
from kit.training.process import LOCK
from kit.training.ranks import ALONE, RankLost, Ranks, require_same, seed_rank
from kit.training.switches import prefetch_if_on
from kit.training.trainer import Trainer

FINISHED = "train-finished"  # a file in a run's folder: the number of its steps


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
    hold: Callable = lambda what: contextlib.nullcontext()  # locks the run against other machines
    ranks: Ranks = ALONE  # that train together
    notes: tuple = ()  # for the first step's row
    trainer: Trainer | None = None

    @property
    def log(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def finished(self) -> bool:
        return finished_steps(self.folder) >= self.config.max_steps

    def resumable(self) -> bool:
        """Whether there is a checkpoint of an unfinished run."""
        return bool(checkpoint.checkpoints(self.checkpoints)) and not self.finished()

    def events(self, stop: Callable[[], bool] = lambda: False) -> Iterator[StepEvent]:
        """Train until done or `stop()`, from the newest sound checkpoint if there is one.

        Yields nothing for a finished run. Raises KitError, also while another process trains this
        run.
        """
        if self.finished():
            return
        lock = contextlib.nullcontext()  # one process trains a run, or one group of ranks
        if self.ranks.is_main:
            lock = held(self.folder / LOCK, "training")
        with lock, self.hold("training"):
            try:
                yield from self._train(stop)
            except RankLost as error:
                saved = checkpoint.checkpoints(self.checkpoints)
                last = f"the last checkpoint is {saved[-1]}" if saved else "there was none yet"
                raise KitError(
                    f"{error} See the output of the other process, or of torchrun, for the reason. "
                    f"Only the steps since the last checkpoint are lost: {last}. Run the same "
                    "command again, with any number of processes."
                ) from error

    def build_trainer(self) -> Trainer:
        """Build the trainer at step 0, always with the same weights and random numbers."""
        torch.manual_seed(self.config.seed)
        config = self.config if self.evaluate else self.config.without_gate()
        model = self.first_model(self.model)
        return Trainer(model, config, self.speed, self.hw, self.finetuning, self.ranks)

    def _train(self, stop: Callable[[], bool]) -> Iterator[StepEvent]:
        before_bytes = reset_peak_memory(self.hw.device)
        self.trainer = trainer = self.build_trainer()
        trainer.before_bytes = before_bytes
        seed_rank(self.ranks, self.config.seed, 0)
        resumed = self._resume()
        require_same(self.ranks, "precision", trainer.applied.precision)
        require_same(self.ranks, "the step they resume from", trainer.step)
        trainer.notes = [*trainer.applied.notes, *resumed, *self.notes]
        # Ends at the `break`, or with the error of a step that no rollback is left for.
        for rollbacks_left in range(self.config.rollbacks, -1, -1):
            try:
                yield from self._steps(stop)
                break
            except Diverged as error:
                self._roll_back(error, rollbacks_left)
        saved = checkpoint.of_step(self.checkpoints, trainer.step)
        if trainer.step and not self.ranks.from_main(saved.exists):
            trainer.save(self.checkpoints)  # stopped between two checkpoints
        if trainer.step >= self.config.max_steps or trainer.settled:
            self._finish()
        self.ranks.barrier()  # until the main rank has written everything

    def _steps(self, stop: Callable[[], bool]) -> Iterator[StepEvent]:
        """Train on from the trainer's step; the log and the checkpoints listen."""
        trainer = self.trainer

        def validate() -> float:
            how = (self.hw.device, trainer.applied.precision, trainer.micro_rows, self.ranks)
            return validation_loss(trainer.model, self.validation, *how)

        def evaluate() -> dict:
            return self.ranks.from_main(lambda: self.evaluate(merged(trainer.model)))

        batches = prefetch_if_on(self.make_batches(trainer.position), trainer.applied)
        listeners = [checkpointer(trainer, self.checkpoints)]
        if self.ranks.is_main:
            listeners = [jsonl_log(self.log), *listeners, *self.listeners]
        for event in train(trainer, batches, validate, stop, evaluate if self.evaluate else None):
            event = dataclasses.replace(event, **self.sample())
            for listener in listeners:
                listener(event)
            yield event

    def _roll_back(self, error: Diverged, rollbacks_left: int) -> None:
        """Return to the last good checkpoint, with half the learning rate.

        Raises KitError when there is none, or it was tried often enough.
        """
        trainer = self.trainer
        tree, notes = checkpoint.load_newest(self.checkpoints)
        if tree is None or not rollbacks_left:
            count = self.config.rollbacks - rollbacks_left if tree else 0
            raise KitError(
                f"{error} Returning to a checkpoint with half the learning rate was tried {count} "
                "times."
            ) from error
        trainer.notes = notes
        trainer.restore(tree)
        trainer.adaptation.rate /= 2
        trainer.save(self.checkpoints)  # a kill from here on must not restore the old rate
        trainer.notes.append(
            f"not finite for {self.config.patience + 1} steps: returned to step {trainer.step}, "
            f"learning rates x{trainer.adaptation.rate:g}"
        )

    def _resume(self) -> list[str]:
        """Continue from the newest sound checkpoint, if there is one; returns notes."""
        tree, notes = checkpoint.load_newest(self.checkpoints)
        if tree is None and notes:  # starting again would overwrite what may still be saved
            raise KitError(
                f"None of the {len(notes)} checkpoints in {self.checkpoints} can be used. "
                f"{shorten(notes[0], 400)} Restore a copy, or delete that folder and {self.log} "
                "to start again."
            )
        if tree is None:
            self._require_untrained()
            if self.ranks.is_main:
                self.log.unlink(missing_ok=True)
            return notes
        self.trainer.restore(tree)
        return [*notes, f"resumed from step {self.trainer.step}", *self.trainer.notes]

    def _require_untrained(self) -> None:
        """Raise KitError if this run had a checkpoint once: training would begin at step 1."""
        rows = read_log(self.log)
        reached = max(finished_steps(self.folder), rows[-1]["step"] if rows else 0)
        if reached < self.config.save_steps and not finished_steps(self.folder):
            return
        raise KitError(
            f"This run was trained to step {reached:,}, and its checkpoints are gone: training "
            f"would begin at step 1 and overwrite its voice. Bring {self.checkpoints} back, begin "
            f"another run with its voice (BASE_MODEL or --base-model {self.folder}), or delete "
            f"{self.log} and {self.folder / FINISHED} to train this one again from its first step."
        )

    def load_newest(self) -> SpeechGPT:
        """Return the plain model of the newest checkpoint. Raises KitError if there is none."""
        trainer = self.build_trainer()
        tree, _ = checkpoint.load_newest(self.checkpoints)
        if tree is None:
            raise KitError(f"There is no usable checkpoint in {self.checkpoints} yet.")
        trainer.restore(tree | {"optimizer": {}})  # nothing is trained further
        return merged(trainer.model)

    def _finish(self) -> None:
        """Save the last weights, and the average of the best step where steps were evaluated.

        Without an average, the weights of the best step are saved.
        """
        trainer = self.trainer
        if trainer.ema:
            self._save_weights("raw")
        evaluated = trainer.config.gate_every or trainer.config.early_stopping_patience
        if evaluated and 0 < trainer.best.step < trainer.step:
            best = checkpoint.of_step(self.checkpoints, trainer.best.step)
            try:
                trainer.restore(checkpoint.load(best))
            except DamagedFileError as error:
                warnings.warn(
                    f"The checkpoint of the best step cannot be used ({error}). The voice has the "
                    f"weights of the last step, {trainer.step}.",
                    category=Note,
                    stacklevel=2,
                )
        if trainer.ema:
            with trainer.ema.swapped_in():
                self._save_weights("ema")
        else:
            self._save_weights("raw")
            for names in (WEIGHTS, ADAPTERS):  # of an earlier, shorter training
                (self.folder / names["ema"]).unlink(missing_ok=True)
        if self.ranks.is_main:
            write_atomic(self.folder / FINISHED, str(self.config.max_steps))

    def _save_weights(self, name: str) -> None:
        """Save the plain model, and the adapters alone where adapters were trained."""
        if not self.ranks.is_main:
            return
        trainer = self.trainer
        finetuning = trainer.finetuning
        save_model(trainer.model, self.folder / WEIGHTS[name], self.trained_with)
        if finetuning.adapters:
            of_base = (finetuning.lora, trainer.trainable.first_rows, finetuning.base.sha256)
            save_adapters(trainer.model, self.folder / ADAPTERS[name], *of_base)


def finished_steps(folder: Path) -> int:
    """How many steps the run in `folder` was finished with; 0: it is not finished."""
    return int(read_run_file(folder / FINISHED) or 0)


@torch.inference_mode()
def validation_loss(
    model: SpeechGPT,
    batches: list[EffectiveBatch],
    device: str,
    precision: str,
    rows: int = 0,
    ranks: Ranks = ALONE,
) -> float:
    """Return the weighted loss of `model` over all of `batches`, in nats per target.

    Each of the `ranks` computes its share, in passes of `rows` rows.
    """
    sums = torch.zeros(2)
    for batch in ranks.share(batches):
        for micro in split_passes(batch, rows):
            with autocast(device, precision):
                sums += torch.stack(model(micro.to(device))).cpu()
    text = sum(batch.text_targets for batch in batches)
    code = sum(batch.code_targets for batch in batches)
    if ranks.several:
        sums = torch.tensor(ranks.sums(*sums.tolist()))
    return weighted_loss(model.config, tuple(sums), text, code).item()


def checkpointer(trainer: Trainer, folder: Path) -> Listener:
    """Return a listener that saves every `save_steps` steps, the best and the last.

    After a step that was not finite it waits for the next one, which is good to return to.
    """
    saved = trainer.step

    def save(event: StepEvent) -> None:
        nonlocal saved
        every = trainer.config.save_steps
        due = event.step // every > saved // every or event.step in (event.steps, trainer.best.step)
        if due and math.isfinite(event.loss):
            trainer.save(folder)
            saved = event.step

    return save
