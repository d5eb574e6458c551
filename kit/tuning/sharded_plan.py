"""Whether each of several processes can hold a whole model, and what it needs where none can.

`choose_parallel` asks the memory plan of a process alone: where one row fits beside a replica,
replicas train ("ddp"), for they send least; else the weights are spread ("fsdp"). `spread_plan` is
the plan of such a step: shares of what stays, and whole what is gathered to compute with. Nothing
is tried: a real step needs all processes. Knows plans and workloads; allocates nothing.
"""

import dataclasses

from kit.base.hardware import Choice
from kit.base.words import in_gib
from kit.model.sequence import GPTConfig
from kit.tuning.memory_plan import (
    FP32_BYTES,
    MemoryPlan,
    Step,
    earlier_bytes,
    head_trained,
    layer_matrices,
    layer_trained,
    parameter_count,
    plan_bytes,
    trained_counts,
)
from kit.tuning.preflight import FitError, Verdict, Workload, divisors, limit_memory

STAYS = ("weights", "gradients", "optimizer", "EMA")  # parts of a plan that are spread


def choose_parallel(work: Workload, world: int) -> Choice:
    """How `world` processes train `work` together: "ddp" or "fsdp", with the reason."""
    asked = work.speed.parallel
    limit_bytes = limit_memory(work.hw, work.max_memory_fraction)
    needed_bytes = work.with_rows(1).planned_bytes
    sizes = f"{in_gib(needed_bytes)} of the {in_gib(limit_bytes)} a process may use"
    if asked != "auto":
        return Choice(value=asked, reason=f"a whole model with one row takes {sizes}")
    if work.finetuning.adapters:
        return Choice(value="ddp", reason="adapters beside frozen matrices cannot be spread")
    if world == 1 or needed_bytes <= limit_bytes:
        return Choice(value="ddp", reason=f"a whole model fits into each: with one row, {sizes}")
    return Choice(value="fsdp", reason=f"no process can hold a whole model: with one row, {sizes}")


def spread_plan(config: GPTConfig, step: Step, world: int) -> MemoryPlan:
    """What one of `world` processes needs for `step` with the weights spread over them."""
    alone = plan_bytes(config, step)
    parts = dict(alone.parts)
    for name in STAYS:
        parts[name] = -(-parts[name] // world)
    together = gathered_bytes(config)
    parts["gathered weights"] = together
    stays = sum(alone.parts[name] for name in ("weights", "optimizer", "EMA"))
    moments = {}
    for moment, alone_bytes in alone.moments.items():
        gradients = gradient_bytes(config, step)[moment]
        spread = -(-(stays + gradients) // world)
        # While a layer's gradients are summed they are there whole, as its weights are.
        summed = together if gradients else 0
        moments[moment] = alone_bytes - stays - gradients + spread + together + summed
    return MemoryPlan(parts=parts, moments=moments)


def gathered_bytes(config: GPTConfig) -> int:
    """Weights that are whole at once: two layers, one of them ahead, and all that is no layer."""
    beside = parameter_count(config) - config.layers * layer_matrices(config)
    return FP32_BYTES * (beside + 2 * layer_matrices(config))


def gradient_bytes(config: GPTConfig, step: Step) -> dict[str, int]:
    """Of each moment in a plan, the gradients that are there, as `memory_plan` counts them."""
    earlier = earlier_bytes(config, step)
    above = head_trained(config, step) + (config.layers - 1) * layer_trained(config, step)
    return {
        "the end of the forward pass": earlier,
        "the backward pass through the logits": earlier,
        "the backward pass through the top layer": max(
            earlier, FP32_BYTES * head_trained(config, step)
        ),
        "the backward pass through the bottom layer": max(earlier, FP32_BYTES * above),
        "the optimizer's update": FP32_BYTES * trained_counts(config, step.finetuning).trained,
    }


def spread_verdict(work: Workload, world: int) -> Verdict:
    """The most rows of a pass that are planned to fit with the weights spread.

    Raises FitError when not even one row fits.
    """
    limit_bytes = limit_memory(work.hw, work.max_memory_fraction)
    for rows in reversed(divisors(work.data.effective_batch)):
        planned_bytes = spread_plan(work.model, work.with_rows(rows).step, world).peak_bytes
        verdict = Verdict(
            fits=planned_bytes <= limit_bytes,
            micro_batch=rows,
            planned_bytes=planned_bytes,
            measured_bytes=None,
            limit_bytes=limit_bytes,
            tried=False,
            change=f"Start more than {world} processes, one a GPU, or take a smaller model.",
            untried="a real step needs all processes",
        )
        if rows <= work.data.micro_batch and verdict.fits:
            return dataclasses.replace(verdict, change="")
    raise FitError(f"Not even one row a pass fits, with the weights spread. {verdict}")
