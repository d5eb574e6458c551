"""A training that torchrun has started in several processes: what the others need to train along.

Where the main rank begins to train it gives `TrainOrder`; every other rank builds the same session
from it, and trains along to its end.
"""

import dataclasses
from threading import Event

from kit.recipes.active_run import ActiveRun
from kit.recipes.train_plan import TrainingPlan
from kit.training.ranks import Ranks
from kit.training.settings import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """What the main rank has settled, and the others are to do alike."""

    run: ActiveRun
    config: TrainConfig
    values: dict  # switches and numbers, as `TrainSession.run` takes them
    micro_batch: int  # rows of a pass that were found to fit
    asks_gate: bool  # whether the main rank hears the voice now and then

    def follow(self, ranks: Ranks) -> None:
        """Train along."""
        plan = TrainingPlan(dataclasses.replace(self.run, ranks=ranks))
        session = plan.session
        plan.data.with_passes_of(self.micro_batch)
        session.config = self.config
        session.validation = plan.held_out()
        session.gate = _not_asked if self.asks_gate else None
        for _ in session.run(self.values, Event()):
            pass


def train_order(plan: TrainingPlan, values: dict) -> TrainOrder:
    """What other ranks need to train along with `plan`, once its checks are done."""
    return TrainOrder(
        run=dataclasses.replace(plan.active, kept=None, ranks=Ranks()),
        config=plan.session.config,
        values=values,
        micro_batch=plan.data.config.micro_batch,
        asks_gate=plan.session.gate is not None,
    )


def _not_asked(model) -> dict:
    raise AssertionError("the main rank alone hears the voice, and tells the others")
