"""Proofs that training computes what it should, on a run's own rows, this device and precision.

Each trains or asks a small model of the run's own kind. They are in fp32, but for the one about
half precision.

Shapes: B batch, S packed sequence, V code vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from kit.base.hardware import DTYPES, Hardware
from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch, EffectiveBatch, pack
from kit.settings import GPTConfig, SpeedConfig, TrainConfig
from kit.training import checkpoint
from kit.training.loop import forward_backward, train
from kit.training.trainer import Trainer

LAYERS = 2
WIDTH = 64
MAX_START_ERROR = 0.02  # of the loss, before the first step
OVERFITTED = 0.1  # nats a code
OVERFIT_STEPS = 400
OVERFIT_ROWS = 2
# A kernel rounds to its number format, whatever the card: bounds are so many relative roundings of
# it. Sums in another order have an error of their own, in fp32.
ROUNDING = {"int8": 1 / 127, "tf32": 2**-10}
ROUNDING |= {name: torch.finfo(dtype).eps for name, dtype in DTYPES.items()}
MAX_SUM_ERROR = 1e-4  # relative distance of gradients that must be equal ...
GRADIENT_ROUNDINGS = 10  # ... and what matmuls round
MAX_LOGIT_CHANGE = 1e-4  # of positions that must not depend on what was changed
HALF_STEPS = 30
# Of the loss in half precision: fp16 rounds less than bf16, but skips steps until its scale fits.
MAX_HALF_ERROR = 2.5 * ROUNDING["bf16"]
RESUMED_AT = 3
RESUMED_STEPS = 6
MAX_AVERAGE_ERROR = 1e-5


# What a proof returns: a figure, its bound, and whether it holds; None: it cannot be judged.
Outcome = tuple[str, str, bool | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved: the kind of model, rows of the data, and where it trains."""

    config: GPTConfig  # of the small model
    texts: list[np.ndarray]  # ids of some rows of the run's data, as the code cache holds them
    codes: list[np.ndarray]
    references: Tensor  # (B, M, T)
    stream: Callable[[dict | None], Iterator[EffectiveBatch]]  # from a position on, None: the start
    hw: Hardware
    precision: str  # in which the run trains
    decode: Callable[[list[int]], str]  # text ids to text

    def batch(self, count: int, per_pass: int, pad_to: int = 0) -> EffectiveBatch:
        """The first `count` rows as one effective batch, in passes of `per_pass` rows."""
        micro = []
        for first in range(0, count, per_pass):
            part = slice(first, min(count, first + per_pass))
            rows = (self.texts[part], self.codes[part], self.references[part])
            micro.append(pack(self.config, *rows, pad_to))
        return EffectiveBatch(micro=micro, position={})

    @property
    def whole(self) -> EffectiveBatch:
        """All rows in one pass."""
        return self.batch(len(self.codes), len(self.codes))

    def trainer(self, steps: int, lr: float = 1e-3, **switches: bool) -> Trainer:
        """A trainer of a new model, always with the same weights; `switches` are those on."""
        torch.manual_seed(0)
        train_config = TrainConfig(
            max_steps=steps, lr=lr, warmup_steps=min(10, steps), eval_steps=steps
        )
        model = SpeechGPT(self.config)
        return Trainer(model, train_config, SpeedConfig(**switches), self.hw)


def small_config(config: GPTConfig) -> GPTConfig:
    """A small model of the same kind: same vocabularies, positions, digits and targets."""
    return dataclasses.replace(
        config,
        layers=LAYERS,
        width=WIDTH,
        heads=2,
        latents=min(config.latents, 4),
        cond_blocks=min(config.cond_blocks, 1),
        perceiver_layers=min(config.perceiver_layers, 1),
        perceiver_heads=2,
        perceiver_head_width=32,
        conformers=(),  # IndexTTS2's conditioning is its package's
        dropout=0.0,
        text_dropout=0.0,
        pretrained_layers=False,
    )


@torch.inference_mode()
def loss_at_start(subject: Subject) -> Outcome:
    """An untrained model must guess: the mean of -log p over codes is the log of their number."""
    # Shared digits are sums of several tables, so the first guess is less even.
    config = dataclasses.replace(subject.config, code_levels=())
    model = dataclasses.replace(subject, config=config).trainer(1).model.eval()
    batch = subject.whole
    _, code_loss = model(batch.micro[0].to(subject.hw.device))
    loss = code_loss.item() / batch.code_targets
    wanted = math.log(subject.config.code_vocab)
    figure = f"{loss:.3f} nats, ln({subject.config.code_vocab}) = {wanted:.3f}"
    passed = abs(loss - wanted) <= MAX_START_ERROR * wanted
    return figure, f"{MAX_START_ERROR:.0%} apart", passed


def labels(subject: Subject) -> Outcome:
    """Each target must be the next input, and all of a row's targets its own text and codes."""
    batch = subject.whole.micro[0]
    following = batch.tokens.flatten().roll(-1)
    kinds = (
        (batch.text_indices, batch.text_targets, 0, subject.texts),
        (batch.code_indices, batch.code_targets, subject.config.text_vocab, subject.codes),
    )
    wrong = 0
    for indices, targets, first_id, rows in kinds:
        row_of = indices // batch.tokens.shape[1]
        inputs = following[indices] - first_id
        for row, wanted in enumerate(rows):
            for given in (targets, inputs):
                wrong += given[row_of == row].tolist()[: len(wanted)] != wanted.tolist()
    codes = " ".join(map(str, subject.codes[0][:6]))
    figure = f"{wrong} wrong rows of {len(subject.codes)}. The first: "
    figure += f"{subject.decode(subject.texts[0].tolist())!r}, codes {codes} ..."
    return figure, "none", not wrong


@torch.inference_mode()
def causality(subject: Subject) -> Outcome:
    """Change a row's last codes, then another row: earlier logits, and this row's, must stay."""
    model = subject.trainer(1).model.eval()
    batch = subject.batch(2, 2).micro[0].to(subject.hw.device)
    length = int(batch.lengths[0])
    later = batch.tokens.clone()
    later[0, length - 3 : length] = subject.config.text_vocab
    other = batch.tokens.clone()
    other[1] = other[1].flip(0)
    before = code_logits(model, batch)
    changed = code_logits(model, dataclasses.replace(batch, tokens=later))
    apart = code_logits(model, dataclasses.replace(batch, tokens=other))
    change = (changed - before)[0, : length - 3].abs().max().item()
    leak = (apart - before)[0, :length].abs().max().item()
    figure = f"earlier logits moved by {change:.1g}, the other row's by {leak:.1g}"
    return figure, f"{MAX_LOGIT_CHANGE:g}", max(change, leak) <= MAX_LOGIT_CHANGE


def code_logits(model: SpeechGPT, batch: Batch) -> Tensor:
    """Logits (B, S, V) of every position; dropout, where any is on, draws the same each time."""
    torch.manual_seed(1)
    return model.code_head(model.hidden(batch)).float()


def gradients(subject: Subject) -> Outcome:
    """The gradients of a batch must not depend on how it is split, padded or computed."""
    rows = len(subject.codes)
    batch = subject.whole
    width = batch.micro[0].tokens.shape[1]
    whole = _gradient(subject, batch)
    ways = {
        f"{rows} passes of one row": _gradient(subject, subject.batch(rows, 1)),
        "padded": _gradient(subject, subject.batch(rows, rows, width + 24)),
        "recomputed": _gradient(subject, batch, gradient_checkpointing=True),
        "fused attention": _gradient(subject, batch, sdpa=True),
    }
    errors = {name: ((way - whole).norm() / whole.norm()).item() for name, way in ways.items()}
    matmuls = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    bound = MAX_SUM_ERROR + GRADIENT_ROUNDINGS * ROUNDING[matmuls]
    figure = ", ".join(f"{name} {error:.1g}" for name, error in errors.items())
    return figure, f"{bound:.2g} of their norm", max(errors.values()) <= bound


def _gradient(subject: Subject, batch: EffectiveBatch, **switches: bool) -> Tensor:
    trainer = subject.trainer(1, **switches)
    trainer.model.train()
    forward_backward(trainer, batch)
    return torch.cat([p.grad.flatten().cpu() for p in trainer.model.parameters()])


def overfitting(subject: Subject) -> Outcome:
    """A few rows must be memorised."""
    trainer = subject.trainer(OVERFIT_STEPS, lr=5e-3, sdpa=True)
    for event in train(trainer, itertools.repeat(subject.batch(OVERFIT_ROWS, OVERFIT_ROWS))):
        if event.loss < OVERFITTED:
            break
    figure = f"{event.loss:.3f} nats for {OVERFIT_ROWS} rows after {event.step} steps"
    passed = event.loss < OVERFITTED
    return figure, f"below {OVERFITTED:g} within {OVERFIT_STEPS} steps", passed


def half_precision(subject: Subject) -> Outcome:
    """The losses in half precision must be those of fp32."""
    if subject.precision == "fp32":
        return "this run trains in fp32", "none", None
    losses = []
    for mixed in (False, True):
        trainer = subject.trainer(HALF_STEPS, sdpa=True, mixed_precision=mixed)
        losses.append([event.loss for event in train(trainer, subject.stream(None))])
    pairs = [(exact, half) for exact, half in zip(*losses) if math.isfinite(half)]
    error = max(abs(half - exact) / exact for exact, half in pairs)
    figure = f"{subject.precision}: losses {error:.2%} apart at most, in {len(pairs)} steps"
    return figure, f"{MAX_HALF_ERROR:.1%}", error <= MAX_HALF_ERROR


def average(subject: Subject) -> Outcome:
    """The average of the weights must be the one that the formula gives."""
    trainer = subject.trainer(RESUMED_STEPS, ema=True)
    weights = trainer.model.code_head.bias
    wanted = weights.detach().double().cpu()
    batches = itertools.repeat(subject.batch(OVERFIT_ROWS, OVERFIT_ROWS))
    for update, _ in enumerate(train(trainer, batches)):
        decay = min(trainer.config.ema_decay, (1 + update) / (10 + update))
        wanted = decay * wanted + (1 - decay) * weights.detach().double().cpu()
    with trainer.ema.swapped_in():
        error = (weights.detach().double().cpu() - wanted).abs().max().item()
    figure = f"{error:.1g} from decay * average + (1 - decay) * weights"
    return figure, f"{MAX_AVERAGE_ERROR:g}", error <= MAX_AVERAGE_ERROR


def resumption(subject: Subject) -> Outcome:
    """A run stopped and resumed from its checkpoint must end as one that was not."""
    with TemporaryDirectory(prefix="verify-") as folder:
        whole = _trained(subject, Path(folder), resumed=False)
        again = _trained(subject, Path(folder), resumed=True)
        between = 0.0
        if subject.hw.device != "cpu":  # kernels there may sum in any order
            between = _distance(whole, _trained(subject, Path(folder), resumed=False))
    distance = _distance(whole, again)
    bound = f"{2 * between:.1g}, twice that of two runs" if between else "equal to the last bit"
    figure = f"weights {distance:.1g} apart after {RESUMED_STEPS} steps"
    return figure, bound, distance <= 2 * between


def _trained(subject: Subject, folder: Path, resumed: bool) -> Tensor:
    """The weights after all steps; a checkpoint is left in `folder`, or resumed from."""
    noisy = dataclasses.replace(subject, config=dataclasses.replace(subject.config, dropout=0.1))
    trainer = noisy.trainer(RESUMED_STEPS, ema=True)
    if resumed:
        trainer.restore(checkpoint.load(checkpoint.of_step(folder, RESUMED_AT)))
    for event in train(trainer, subject.stream(trainer.position)):
        if event.step == RESUMED_AT and not resumed:
            trainer.save(folder)
    return torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()])


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / a.norm()).item()


SAME_GRADIENTS = "accumulation, padding, recomputing and fused attention leave the gradients equal"
RESTORED = "weights, optimiser, random numbers and position in the data are all restored"
PROOFS = {
    "loss at the start": (loss_at_start, "the loss is a mean over targets, in nats, of all codes"),
    "labels": (labels, "every target is the input shifted by one, of its own row's text and codes"),
    "causality": (causality, "a code is predicted from what comes before it in its own row alone"),
    "gradients": (gradients, SAME_GRADIENTS),
    "overfitting": (overfitting, "gradients reach what must learn, and the update goes downhill"),
    "mixed precision": (half_precision, "with its loss scaling, it trains as fp32 does"),
    "EMA": (average, "the averaged weights are the moving average of every step"),
    "resumption": (resumption, RESTORED),
}
