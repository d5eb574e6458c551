"""Optimizer steps with loss scaling for fp16 (Micikevicius et al. 2018), in all training loops."""

import math

import torch
from torch import Tensor, nn


def loss_scaler(device: str, precision: str) -> torch.amp.GradScaler:
    """A scaler of losses that has an effect only with `precision` "fp16"."""
    return torch.amp.GradScaler(device, enabled=precision == "fp16")


def apply_gradients(
    scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer], finite: bool
) -> None:
    """Step every optimizer that has gradients if all gradients are `finite`; none otherwise.

    The gradients must have been unscaled. `scaler.step` is not used: it would wait for the device
    once per optimizer, and step those whose own gradients are finite.
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
    """Run the backward pass of `loss` and one optimizer step; returns whether it was taken."""
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
