"""How the weights move: optimizers, the learning rate's schedule, and what adapts it on the way.

AdamW for all, or Muon for the trunk's matrices beside it. The schedule is a pure function of the
step, so resuming needs no state for it; what a run learns about itself (a plateau, a usual gradient
norm) is the few numbers of `Adaptation`, which a checkpoint carries. Knows parameters and
settings; nothing of batches or losses' origin.

AdamW: Loshchilov and Hutter 2019. Muon: Jordan et al. 2024. Linear warm-up: Goyal et al. 2017.
Cosine: Loshchilov and Hutter 2017.
"""

import dataclasses
import math

import torch
from torch import nn

from kit.model import SpeechGPT
from kit.steps import TrainConfig

LEAST_TIGHT = 1 / 16  # of the clipping norm, however many spikes come in a row
RELAX = 1.02  # a step, back to the usual clipping norm: a halving is forgotten after 35 steps
USUAL = 0.98  # memory of the average gradient norm: about the last 50 steps
BETTER = 1e-3  # a loss must fall by this share to count as better


def lr_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at optimiser step `step` (counted from 0).

    transformers' linear and cosine schedules with warm-up, at every step, where `final_lr` is 0.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    low = config.final_lr
    return {
        "constant": 1.0,
        "linear": low + (1 - low) * max(0.0, 1 - done),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2,
    }[config.schedule]


def make_optimizers(
    model: SpeechGPT, config: TrainConfig, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices alone; "muon" hands it the trunk's matrices to Muon.

    Each parameter group keeps its peak learning rate as `peak_lr`.
    """
    trunk = (
        {p for p in model.gpt.parameters() if p.ndim == 2} if config.optimizer == "muon" else set()
    )
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    rest = [p for p in model.parameters() if p not in trunk]
    plain = [p for p in rest if p.ndim < 2 or p in tables]
    decayed = [p for p in rest if p.ndim >= 2 and p not in tables]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    made = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused, foreach=False)]
    if trunk:
        matrices = [p for p in model.gpt.parameters() if p in trunk]
        decay = config.weight_decay
        muon = {"momentum": 0.95, "ns_steps": config.muon_steps}
        made.append(torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=decay, **muon))
    for group in (g for optimizer in made for g in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return made


@dataclasses.dataclass(kw_only=True)
class Adaptation:
    """What a run has learnt about itself: plain numbers, saved with every checkpoint."""

    rate: float = 1.0  # factor on every learning rate: halved on a plateau, or after a rollback
    tight: float = 1.0  # factor on the clipping norm: halved by a spike, then slowly let go
    usual_norm: float = 0.0  # running average of the gradient norm; 0: none yet
    best_loss: float = math.inf  # of the validations so far
    waited: int = 0  # validations since then

    def clip_norm(self, config: TrainConfig, norm: float) -> tuple[float, str]:
        """(norm to clip this step to, note). A spike counts as the average it sprang from."""
        if not config.spike or not math.isfinite(norm):
            return config.clip_norm, ""
        usual, note = self.usual_norm or norm, ""
        if norm > config.spike * usual:
            self.tight = max(LEAST_TIGHT, self.tight / 2)
            limit = config.clip_norm * self.tight
            note = f"spike: gradient norm {norm:.3g}, usual {usual:.3g}; clipped to {limit:.3g}"
        else:
            self.tight = min(1.0, self.tight * RELAX)
        self.usual_norm = USUAL * usual + (1 - USUAL) * min(norm, config.spike * usual)
        return config.clip_norm * self.tight, note

    def see_validation(self, config: TrainConfig, loss: float) -> str:
        """Halve the rates after `plateau` validations without a better one; says so."""
        if not config.plateau:
            return ""
        if loss < self.best_loss * (1 - BETTER):
            self.best_loss, self.waited = loss, 0
            return ""
        self.waited += 1
        if self.waited < config.plateau:
            return ""
        self.rate, self.waited = self.rate / 2, 0
        return f"plateau: no better validation in {config.plateau}; learning rates x{self.rate:g}"
