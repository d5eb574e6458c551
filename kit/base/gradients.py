"""From a loss to a step of the weights, with fp16's small gradients kept from vanishing.

Loss scaling: Micikevicius et al. 2018. Every training loop of the kit steps through here. Without
fp16 the scaler does nothing. Knows no model.
"""

import math

import torch
from torch import Tensor, nn


def loss_scaler(device: str, precision: str) -> torch.amp.GradScaler:
    """A scaler of losses: at work for `precision` "fp16", without effect otherwise."""
    return torch.amp.GradScaler(device, enabled=precision == "fp16")


def apply_gradients(
    scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer], finite: bool
) -> None:
    """Step every optimizer where the gradients are `finite`; none otherwise.

    The gradients must have been unscaled: where one of them overflowed fp16, the scale is lowered.
    `scaler.step` would find that out by itself, but it asks the device once for each optimizer, and
    lets those step whose own gradients are finite. An optimizer without any gradient, as all of its
    parameters are frozen for now, stays where it is.
    """
    if finite:
        for optimizer in filter(has_gradients, optimizers):
            optimizer.step()
    scaler.update()


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def backward_and_step(
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
    half = scaler.is_enabled()
    taken = True
    if half or clip_norm is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        taken = not half or math.isfinite(norm.item())
    if clip_norm is not None:
        nn.utils.clip_grads_with_norm_(params, clip_norm, norm)
    apply_gradients(scaler, [optimizer], taken)
    optimizer.zero_grad(set_to_none=True)
    return taken
