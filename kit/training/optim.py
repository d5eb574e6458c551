"""Optimizers, the learning rate of a step, its adaptation, and the average of the weights.

AdamW (Loshchilov and Hutter 2019) for all parameters, or Muon (Jordan et al. 2024) for the trunk's
matrices and AdamW for the rest. AdamW's moments may be in 8 bits, by bitsandbytes: 2 bytes a
parameter instead of 8, each block of 256 with its own scale (Dettmers et al. 2022). torchao was not
chosen: it compiles its step, and safetensors cannot store its state.
"""

import dataclasses
import functools
import importlib
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from kit.base.formatting import shorten
from kit.base.hardware import DTYPES, Choice, Hardware, is_here
from kit.model.gpt import SharedDigits, SpeechGPT
from kit.settings import SCHEDULES, TrainConfig

MIN_TIGHT = 1 / 16  # factor on the clipping norm after any number of spikes
RELAX = 1.02  # per step, back to the usual clipping norm: 35 steps undo a halving
NORM_DECAY = 0.98  # of the average gradient norm: it covers about the last 50 steps
MIN_IMPROVEMENT = 1e-3  # share by which a loss must fall to count as better
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # times x, (x x') x and (x x')^2 x: Jordan et al.
GRAM_ITERATIONS = 3  # on one Gram matrix; each multiplies its rounding errors by twelve
MAX_STACK_ENTRIES = 2**21  # of matrices that are orthogonalised together
BITSANDBYTES = "bitsandbytes"
INSTALL = "pip install 'bitsandbytes>=0.50'"
MIN_8BIT_ENTRIES = 4096  # of a parameter whose moments are in 8 bits; smaller ones stay fp32
BLOCK = 256  # numbers that share a scale
TABLES = (nn.Embedding, SharedDigits)  # whose rows have no weight decay


def lr_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at `step` (from 0): linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    left = SCHEDULES[config.schedule](min(1.0, done))
    return config.final_lr + (1 - config.final_lr) * left


def make_optimizers(
    model: SpeechGPT,
    config: TrainConfig,
    fused: bool,
    precision: str = "fp32",
    undecayed: Iterable[nn.Parameter] = (),
    eight_bit: bool = False,
) -> list[torch.optim.Optimizer]:
    """Make AdamW for what trains, with weight decay on matrices; with "muon", Muon for the trunk's.

    `precision` (bf16, fp16, fp32) is that of Muon's matmuls. `undecayed` are matrices without
    weight decay. The conditioner may have its own rate: its output is normalised, so nothing stops
    a layer from growing until it no longer tells voices apart. Each parameter group has its peak
    learning rate as `peak_lr`.
    """
    training = [p for p in model.parameters() if p.requires_grad]
    conditioner = []
    if config.conditioner_lr:
        conditioner = [p for p in model.conditioner.parameters() if p.requires_grad]
    matrices = []
    if config.optimizer == "muon":
        matrices = [p for p in model.gpt.parameters() if p.requires_grad and p.ndim == 2]
    elsewhere = {*conditioner, *matrices}
    rest = [p for p in training if p not in elsewhere]
    tables = {p for m in model.modules() if isinstance(m, TABLES) for p in m.parameters()}
    tables.update(undecayed)
    plain = [p for p in rest if p.ndim < 2 or p in tables]
    decayed = [p for p in rest if p.ndim >= 2 and p not in tables]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if conditioner:
        groups.append({"params": conditioner, "weight_decay": 0.0, "lr": config.conditioner_lr})
    settings = {"lr": config.lr, "betas": tuple(config.betas)}
    if eight_bit:
        optimizers = [adamw_8bit(groups, **settings)]
    else:
        # None, not False: torch then chooses foreach (an operation at a time on all tensors) on
        # CUDA, and a loop over the tensors on the CPU.
        optimizers = [torch.optim.AdamW(groups, fused=fused or None, **settings)]
    if matrices:
        how = {"lr": config.muon_lr, "momentum": 0.95, "ns_steps": config.muon_steps}
        muon = Muon(matrices, DTYPES[precision], weight_decay=config.weight_decay, **how)
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def eight_bit_adamw(hw: Hardware, tried: bool) -> Choice:
    """Whether ("yes", "no") 8-bit AdamW runs on `hw` (if that is not here, on the CPU), and why.

    Unless it is `tried`, its package need only be installed: importing it takes five seconds.
    """
    return _runs_on(hw.device if is_here(hw) else "cpu", tried)


@functools.cache
def _runs_on(device: str, tried: bool) -> Choice:
    try:
        installed = version(BITSANDBYTES)
    except PackageNotFoundError:
        return Choice(value="no", reason=f"{BITSANDBYTES} is not installed ({INSTALL})")
    named = f"{BITSANDBYTES} {installed}"
    works = Choice(value="yes", reason=f"a quarter of the optimizer's state ({named})")
    if not tried:
        return works
    try:  # one step of one parameter: finds a library built for another CUDA, too
        parameter = nn.Parameter(torch.zeros(MIN_8BIT_ENTRIES, device=device))
        parameter.grad = torch.ones_like(parameter)
        adamw_8bit([{"params": [parameter]}], lr=1.0, betas=(0.9, 0.99)).step()
        if not bool((parameter < -0.5).all()):
            raise RuntimeError("its first step returned wrong values")
    except Exception as error:  # a library may raise anything; the reason is shown
        return Choice(value="no", reason=f"{named} does not run here: {shorten(error)}")
    return works


def adamw_8bit(groups: list[dict], lr: float, betas: tuple) -> torch.optim.Optimizer:
    log = logging.getLogger(BITSANDBYTES)
    before = log.level
    log.setLevel(logging.ERROR)  # it logs of kernels for 4-bit models as it is imported
    try:
        library = importlib.import_module(BITSANDBYTES)
    finally:
        log.setLevel(before)
    # It would wait for the GPU after each tensor; only its paged optimizers need that.
    library.optim.optimizer.sync_gpu = lambda tensor: None
    return library.optim.AdamW8bit(groups, lr=lr, betas=betas, min_8bit_size=MIN_8BIT_ENTRIES)


def eight_bit_bytes(entries: int) -> int:
    """Bytes of the two moments of a parameter with so many `entries` under 8-bit AdamW."""
    if entries < MIN_8BIT_ENTRIES:
        return 2 * 4 * entries
    return 2 * (entries + 4 * math.ceil(entries / BLOCK))


def moments_of(optimizer: torch.optim.Optimizer) -> dict[int, dict]:
    """The moments of every parameter by number: plain names, tensors and counts."""
    plain = {}
    for number, moments in optimizer.state_dict()["state"].items():
        plain[number] = {}
        for name, value in moments.items():  # bitsandbytes has its tensors in a dictionary
            plain[number].update(value if isinstance(value, dict) else {name: value})
    return plain


class Muon(torch.optim.Muon):
    """torch's Muon with matmuls in `dtype` and matrices of one shape together; same state."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, **settings):
        super().__init__(params, **settings)
        self.dtype = dtype  # torch's own is bf16, where emulated many times slower than fp32

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrices in stacks([p for p in group["params"] if p.grad is not None]):
                average = self.momentum(matrices, group)
                update = orthogonalize(average, group["ns_steps"], self.dtype)
                rows, columns = update.shape[1:]
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, list(update.float()), alpha=-rate)

    def momentum(self, matrices: list[nn.Parameter], group: dict) -> Tensor:
        """Nesterov's average of the gradients, of matrices of one shape: (N, rows, columns)."""
        gradients = [p.grad for p in matrices]
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        averages = [self.state[p]["momentum_buffer"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        return torch.stack(torch._foreach_lerp(gradients, averages, group["momentum"]))


def stacks(matrices: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group matrices of one shape, up to `MAX_STACK_ENTRIES` a group; at least one matrix."""
    by_shape = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, group in by_shape.items():
        count = max(1, MAX_STACK_ENTRIES // shape.numel())
        for first in range(0, len(group), count):
            yield group[first : first + count]


def orthogonalize(matrices: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of matrices (N, rows, columns) near 1, in `dtype`."""
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = (wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    while iterations > 0:
        # Half precision is too coarse to reuse a Gram matrix.
        count = min(iterations, GRAM_ITERATIONS) if dtype == torch.float32 else 1
        x = several_iterations(x, count) if count > 1 else one_iteration(x)
        iterations -= count
    return x.mT if tall else x


def one_iteration(x: Tensor) -> Tensor:
    """a x + (b x x' + c (x x')^2) x for wide matrices x (N, R, C)."""
    a, b, c = NEWTON_SCHULZ
    gram = x @ x.mT
    polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return torch.baddbmm(x, polynomial, x, beta=a)


def several_iterations(x: Tensor, count: int) -> Tensor:
    """The same `count` times, on the Gram matrices (N, R, R): a quarter less to multiply.

    Each iteration multiplies x by a polynomial of its Gram matrix, which gives the next Gram matrix
    without the next x. The polynomials are multiplied with each other, and x with them at the end.
    """
    a, b, c = NEWTON_SCHULZ
    gram = x @ x.mT
    factor = None
    for left in reversed(range(count)):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        factor = polynomial if factor is None else polynomial @ factor
        if left > 0:
            gram = polynomial @ gram @ polynomial
    return factor @ x


@dataclasses.dataclass(kw_only=True)
class Adaptation:
    """What adapts during a run: plain numbers, saved with every checkpoint."""

    rate: float = 1.0  # factor on every learning rate: halved on a plateau, or after a rollback
    tight: float = 1.0  # factor on the clipping norm: halved by a spike, then slowly restored
    usual_norm: float = 0.0  # running average of the gradient norm; 0: none yet
    best_loss: float = math.inf  # of the validations so far
    waited: int = 0  # validations since then

    def clip_limits(self, config: TrainConfig) -> tuple[float, float, float]:
        """Return the norm above which a step is a spike, and the norms to clip it and others to."""
        if not config.spike:
            return math.inf, config.max_grad_norm, config.max_grad_norm
        spike = config.spike * self.usual_norm or math.inf  # the first norm is usual
        tighter = max(MIN_TIGHT, self.tight / 2)
        relaxed = min(1.0, self.tight * RELAX)
        return spike, config.max_grad_norm * tighter, config.max_grad_norm * relaxed

    def record_norm(self, config: TrainConfig, norm: float) -> str:
        """Adapt to the norm of a step; a spike hardly changes the average. Returns a note."""
        if not config.spike or not math.isfinite(norm):
            return ""
        spike, limit, _ = self.clip_limits(config)
        usual = self.usual_norm or norm
        self.usual_norm = NORM_DECAY * usual + (1 - NORM_DECAY) * min(norm, config.spike * usual)
        if norm <= spike:
            self.tight = min(1.0, self.tight * RELAX)
            return ""
        self.tight = max(MIN_TIGHT, self.tight / 2)
        return f"spike: gradient norm {norm:.3g}, usual {usual:.3g}; clipped to {limit:.3g}"

    def record_validation(self, config: TrainConfig, loss: float) -> str:
        """Halve the rates after validations without a better one; returns a note.

        They stay above the share `final_lr` of the peak: below it a training only looks converged.
        """
        patience = config.lr_plateau_patience
        if not patience or self.rate <= config.final_lr:
            return ""
        self.waited += 1
        if loss < self.best_loss * (1 - MIN_IMPROVEMENT):
            self.best_loss = loss
            self.waited = 0
        if self.waited < patience:
            return ""
        self.rate = max(self.rate / 2, config.final_lr)
        self.waited = 0
        return f"plateau: no better validation in {patience}; learning rates x{self.rate:g}"


# Steps between two updates of an average on another device, each of which costs a copy of all
# weights. It is then that of weights 3.5 steps newer: 3 % of its distance from the weights at step
# 1,000, in the end 0.35 % with decay 0.999.
AWAY_STEPS = 8


class EMA:
    """An exponential moving average of `parameters` (Polyak and Juditsky 1992): `shadow`, by name.

    It is in fp32, on `device`; "": on that of the parameters. A decay of 0.999 would remember the
    random start for a thousand steps, so at update n it is min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, device: str = ""):
        self.parameters = parameters
        self.decay = decay
        self.every = AWAY_STEPS if device else 1
        self.updates = 0
        self.kept = 1.0  # share of the average that remains after the steps since the last update
        fp32 = {"dtype": torch.float32, "copy": True}
        self.shadow = {n: p.detach().to(device or p.device, **fp32) for n, p in parameters.items()}

    def update(self) -> None:
        """Count a step of the weights; every `every` steps the average is updated."""
        self.kept *= min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        if self.updates % self.every == 0:
            self._move()

    @torch.no_grad()
    def _move(self) -> None:
        """Move the average towards the weights, for all steps since the last time."""
        if self.kept == 1.0:
            return
        shadow = list(self.shadow.values())
        pairs = zip(self.parameters.values(), shadow)
        now = [p.detach().to(s.device, torch.float32) for p, s in pairs]
        torch._foreach_lerp_(shadow, now, 1 - self.kept)
        self.kept = 1.0

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the average into the model for the block, then its own weights, bit for bit."""
        self._move()
        pairs = zip(self.parameters, self.parameters.values(), self.shadow.values())
        own = {name: p.detach().to(shadow.device, copy=True) for name, p, shadow in pairs}
        self._copy_in(self.shadow)
        try:
            yield
        finally:
            self._copy_in(own)

    @torch.no_grad()
    def _copy_in(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        self._move()
        return dict(self.shadow, updates=torch.tensor(self.updates))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates = int(state["updates"])
        self.kept = 1.0
        for name, shadow in self.shadow.items():
            shadow.copy_(state[name])
