"""A training that torchrun has started in several processes: one leads, the others follow.

The main rank takes the recipe's steps as a process alone does: it plans, asks, prints and writes.
Where it begins to train it gives `Orders`; every other rank waits for them, builds the same session
from them, and trains along until it is told that nothing is left to do.
"""

import dataclasses
from collections.abc import Callable
from threading import Event

from kit.base.hardware import Choice
from kit.recipes.active_run import ActiveRun
from kit.recipes.train_plan import TrainingPlan
from kit.training.ranks import RankLost, Ranks
from kit.training.settings import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What the main rank has settled, and the others are to do alike."""

    run: ActiveRun
    config: TrainConfig
    values: dict  # switches and numbers, as `TrainSession.run` takes them
    micro_batch: int  # rows of a pass that were found to fit
    parallel: Choice  # "ddp" or "fsdp"
    asks_gate: bool  # whether the main rank hears the voice now and then


def orders_of(plan: TrainingPlan, values: dict) -> Orders:
    """What other ranks need to train along with `plan`, once its checks are done."""
    return Orders(
        run=dataclasses.replace(plan.active, kept=None, ranks=Ranks()),
        config=plan.session.config,
        values=values,
        micro_batch=plan.data.config.micro_batch,
        parallel=plan.session.parallel,
        asks_gate=plan.session.gate is not None,
    )


def follow_main(ranks: Ranks) -> None:
    """What a rank other than the main one does: train along each time it is told to."""
    orders = awaited_orders(ranks)
    while orders is not None:
        plan = TrainingPlan(dataclasses.replace(orders.run, ranks=ranks))
        session = plan.session
        plan.data.with_passes_of(orders.micro_batch)
        session.config = orders.config
        session.parallel = orders.parallel
        session.validation = plan.held_out()
        session.gate = _not_asked if orders.asks_gate else None
        for _ in session.run(orders.values, Event()):
            pass
        orders = awaited_orders(ranks)
    ranks.leave()


def awaited_orders(ranks: Ranks) -> Orders | None:
    """As `next_orders`; None, too, where the main rank has ended: it says why, or torchrun does."""
    try:
        return next_orders(ranks)
    except RankLost:
        return None


def next_orders(ranks: Ranks, give: Callable[[], Orders | None] = lambda: None) -> Orders | None:
    """What the main rank gives with `give()`, to every rank; None where there is nothing to do."""
    return ranks.from_main(give)


def _not_asked(model) -> dict:
    raise AssertionError("the main rank alone hears the voice, and tells the others")
