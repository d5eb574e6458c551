"""From a loss to a step of the weights, with fp16's small gradients kept from vanishing.

Loss scaling: Micikevicius et al. 2018. Every training loop of the kit steps through here. Without
fp16 the scaler does nothing. Knows no model.
"""

import torch
from torch import Tensor, nn


def loss_scaler(device: str, precision: str) -> torch.amp.GradScaler:
    """A scaler of losses: at work for `precision` "fp16", without effect otherwise."""
    return torch.amp.GradScaler(device, enabled=precision == "fp16")


def apply_gradients(
    scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer], finite: bool = True
) -> bool:
    """One step of every optimizer; whether it was taken.

    Where gradients overflowed fp16, or `finite` says that they did, the step is left out and the
    scale is lowered. They must have been unscaled. One whose parameters have no gradient, as all
    of them are frozen for now, stays where it is.
    """
    scale = scaler.get_scale()
    if finite:
        for optimizer in filter(has_gradients, optimizers):
            scaler.step(optimizer)
    scaler.update()
    return finite and scaler.get_scale() >= scale


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def descend(
    loss: Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    clip_norm: float | None = None,
) -> bool:
    """Backward pass of `loss` and one step, gradients clipped if asked; whether it was taken.

    Gradients are gone afterwards.
    """
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if clip_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    taken = apply_gradients(scaler, [optimizer])
    optimizer.zero_grad(set_to_none=True)
    return taken
