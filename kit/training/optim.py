"""Optimizers, the learning rate of a step, and its adaptation during a run.

AdamW for all parameters, or Muon for the trunk's matrices and AdamW for the rest. `Adaptation` is
saved with every checkpoint.

AdamW: Loshchilov and Hutter 2019. Muon: Jordan et al. 2024. Linear warm-up: Goyal et al. 2017.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from kit.base.hardware import DTYPES
from kit.model.gpt import SpeechGPT
from kit.training import adam8bit
from kit.training.config import SCHEDULES, TrainConfig

LEAST_TIGHT = 1 / 16  # of the clipping norm, after any number of spikes
RELAX = 1.02  # per step, back to the usual clipping norm: 35 steps undo a halving
USUAL = 0.98  # memory of the average gradient norm: about the last 50 steps
BETTER = 1e-3  # share by which a loss must fall to count as better
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # times x, (x x') x and (x x')^2 x: Jordan et al.
ON_GRAM = 3  # iterations on one Gram matrix; each multiplies its rounding errors by twelve
TOGETHER = 2**21  # entries of matrices that are orthogonalised in one stack


def lr_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at optimiser step `step` (counted from 0).

    A linear warm-up from 0, then the schedule down to `final_lr`.
    """
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
    weight decay. `eight_bit` keeps AdamW's moments in 8 bits. Without `fused`, torch chooses: on
    CUDA an operation at a time on all tensors (foreach), on the CPU a loop over the tensors. The
    conditioner may have its own rate (`conditioner_lr`): its output is normalised, so nothing stops
    a layer from growing, until it no longer tells voices apart. Each parameter group has its peak
    learning rate as `peak_lr`.
    """
    training = [p for p in model.parameters() if p.requires_grad]
    apart = set(model.conditioner.parameters()) if config.conditioner_lr else set()
    matrices = []
    if config.optimizer == "muon":
        matrices = [p for p in model.gpt.parameters() if p.requires_grad and p.ndim == 2]
    elsewhere = set(matrices) | apart
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    tables.update(undecayed)
    rest = [p for p in training if p not in elsewhere]
    plain = [p for p in rest if p.ndim < 2 or p in tables]
    decayed = [p for p in rest if p.ndim >= 2 and p not in tables]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    conditioner = [p for p in training if p in apart]
    if conditioner:
        groups.append({"params": conditioner, "weight_decay": 0.0, "lr": config.conditioner_lr})
    settings = {"lr": config.lr, "betas": config.betas}
    if eight_bit:
        optimizers = [adam8bit.adamw(groups, **settings)]
    else:
        # None, not False: with False torch would not choose foreach.
        optimizers = [torch.optim.AdamW(groups, fused=fused or None, **settings)]
    if matrices:
        muon = Muon(
            matrices,
            DTYPES[precision],
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            momentum=0.95,
            ns_steps=config.muon_steps,
        )
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


class Muon(torch.optim.Muon):
    """torch's Muon with matmuls in `dtype` and matrices of one shape together; same state.

    torch's own uses bf16 on every device, which is many times slower than fp32 where emulated.
    """

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, **settings):
        super().__init__(params, **settings)
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrices in stacks([p for p in group["params"] if p.grad is not None]):
                update = orthogonalize(
                    self.momentum(matrices, group), group["ns_steps"], self.dtype
                )
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
    """Group matrices of one shape, up to `TOGETHER` entries a group; at least one matrix."""
    by_shape = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for shape, group in by_shape.items():
        count = max(1, TOGETHER // shape.numel())
        for first in range(0, len(group), count):
            yield group[first : first + count]


def orthogonalize(matrices: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of matrices (N, rows, columns) near 1, in `dtype`.

    By Newton-Schulz iterations on wide matrices: tall ones are transposed.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    x = (wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    while iterations > 0:
        # Half precision is too coarse to reuse a Gram matrix.
        count = min(iterations, ON_GRAM) if dtype == torch.float32 else 1
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
    begun_step: int = 0  # where the optimizer restarted without moments; 0: never

    def warm_up(self, config: TrainConfig, step: int) -> float:
        """Factor on the learning rate at `step` of an optimizer that started again."""
        since = step - self.begun_step
        if not self.begun_step or since >= config.warmup_steps:
            return 1.0
        return since / config.warmup_steps

    def clip_norm(self, config: TrainConfig, norm: float) -> tuple[float, str]:
        """Return the norm to clip this step to, and a note; a spike hardly changes the average."""
        if not config.spike or not math.isfinite(norm):
            return config.max_grad_norm, ""
        usual = self.usual_norm or norm
        note = ""
        if norm > config.spike * usual:
            self.tight = max(LEAST_TIGHT, self.tight / 2)
            limit = config.max_grad_norm * self.tight
            note = f"spike: gradient norm {norm:.3g}, usual {usual:.3g}; clipped to {limit:.3g}"
        else:
            self.tight = min(1.0, self.tight * RELAX)
        self.usual_norm = USUAL * usual + (1 - USUAL) * min(norm, config.spike * usual)
        return config.max_grad_norm * self.tight, note

    def record_validation(self, config: TrainConfig, loss: float) -> str:
        """Halve the rates after validations without a better one; returns a note."""
        patience = config.lr_plateau_patience
        if not patience:
            return ""
        if loss < self.best_loss * (1 - BETTER):
            self.best_loss = loss
            self.waited = 0
            return ""
        self.waited += 1
        if self.waited < patience:
            return ""
        self.rate /= 2
        self.waited = 0
        return f"plateau: no better validation in {patience}; learning rates x{self.rate:g}"
