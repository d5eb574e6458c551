"""What breaks first as GPUs and hours of speech become more: each limit beside what a plan reaches.

A limit is a number that something here was made for: a setting of the run, a share of the time that
may be lost, a rate that was measured. Where a plan is beyond it, `Break` says from how many GPUs
on, what was reckoned, and what to change. Knows plans; changes nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence

from kit.base.words import decimal_size, in_gib, rough_time
from kit.tuning.scale_parts import LARGEST_BATCH, ROWS_READ, WRITER_MEMORY
from kit.tuning.scale_plan import ScalePlan
from kit.tuning.session_plan import SAVING_SHARE

LOST_SHARE_OF_STEP = 0.1  # that sending may add to a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that can break: `figure(plan)` beyond `most(plan)`.

    Where the batch is kept each GPU has fewer rows the more there are; where passes are full the
    batch grows. Some limits are met in one of the two ways alone.
    """

    what: str
    figure: Callable[[ScalePlan], float]
    most: Callable[[ScalePlan], float]
    told: Callable[[ScalePlan], str]  # the figure beside its limit, in words
    change: str  # what to do about it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Break:
    """A limit, and the plan for the fewest GPUs that is beyond it."""

    limit: Limit
    plan: ScalePlan

    @property
    def times(self) -> float:
        """How far beyond: above 1."""
        return self.limit.figure(self.plan) / self.limit.most(self.plan)

    @property
    def told(self) -> str:
        return self.limit.told(self.plan)


def _row_rate(plan: ScalePlan) -> float:
    """Rows a second that each GPU asks of the process that reads for it."""
    return plan.batch_rows / plan.gpus / plan.step_s


def _read_rate(plan: ScalePlan) -> float:
    """Bytes a second that a step asks of the disk, by all GPUs together."""
    corpus = plan.case.corpus
    return corpus.cache_bytes / corpus.rows * plan.batch_rows / plan.step_s


OF_THE_CORPUS = (
    Limit(
        what="the code cache is larger than it may be",
        figure=lambda plan: plan.case.corpus.cache_bytes,
        most=lambda plan: plan.case.max_cache_bytes,
        told=lambda plan: (
            f"{decimal_size(plan.case.corpus.cache_bytes)}, nearly all of it references; "
            f"`max_cache_gib` allows {in_gib(plan.case.max_cache_bytes)}"
        ),
        change="raise data.max_cache_gib, and lower data.reference_frames: bytes go with them",
    ),
    Limit(
        what="the index is written from memory",
        figure=lambda plan: plan.case.corpus.writer_bytes,
        most=lambda plan: WRITER_MEMORY.value,
        told=lambda plan: (
            f"{decimal_size(plan.case.corpus.writer_bytes)} in one process for "
            f"{plan.case.corpus.rows:,} rows, of {in_gib(WRITER_MEMORY.value)}"
        ),
        change="prepare on a machine with more memory (training itself maps the index)",
    ),
    Limit(
        what="the schedule ends before the corpus does",
        figure=lambda plan: plan.steps,
        most=lambda plan: plan.case.work.train.steps,
        told=lambda plan: (
            f"one pass takes {plan.steps:,} steps of {plan.batch_rows:,} rows, "
            f"`steps` is {plan.case.work.train.steps:,}"
        ),
        change="raise train.steps, or data.effective_batch",
    ),
)
OF_THE_TIME = (
    Limit(
        what="the quality gate, heard by the first GPU while all others wait",
        figure=lambda plan: plan.gate_share,
        most=lambda plan: SAVING_SHARE,
        told=lambda plan: (
            f"{plan.gate_share:.0%} of the time every {plan.case.work.train.gate_every:,} steps, "
            f"more than {SAVING_SHARE:.0%}"
        ),
        change="raise train.gate_every",
    ),
    Limit(
        what="the checkpoint, gathered and written by the first GPU",
        figure=lambda plan: plan.checkpoint_share,
        most=lambda plan: SAVING_SHARE,
        told=lambda plan: (
            f"{rough_time(plan.checkpoint_s)} for {decimal_size(plan.case.checkpoint_bytes)} are "
            f"{plan.checkpoint_share:.0%} of the time every "
            f"{plan.case.work.train.checkpoint_every:,} steps, more than {SAVING_SHARE:.0%}"
        ),
        change="raise train.checkpoint_every",
    ),
    Limit(
        what="sending between GPUs",
        figure=lambda plan: plan.wire_share,
        most=lambda plan: LOST_SHARE_OF_STEP,
        told=lambda plan: (
            f"{decimal_size(plan.sent_bytes)} a GPU in {rough_time(plan.wire_s)} are "
            f"{plan.wire_share:.0%} of a step, more than {LOST_SHARE_OF_STEP:.0%}"
        ),
        change="more rows between two messages: data.effective_batch, with fsdp data.micro_batch",
    ),
    Limit(
        what="sending, even if it were hidden behind the last backward pass",
        figure=lambda plan: plan.wire_s if plan.parallel == "ddp" else 0.0,
        most=lambda plan: plan.backward_s,
        told=lambda plan: (
            f"{rough_time(plan.wire_s)} on the wire, {rough_time(plan.backward_s)} to hide behind"
        ),
        change="more rows a GPU, or a faster network",
    ),
    Limit(
        what="a pass has so few rows that launching its kernels takes longer than they do",
        figure=lambda plan: float(plan.launch_bound),
        most=lambda plan: 0.5,
        told=lambda plan: (
            f"{plan.batch_rows / plan.gpus:.3g} rows a GPU, {rough_time(plan.pass_s)} a pass"
        ),
        change="raise data.effective_batch, or set speed.compile=true",
    ),
    Limit(
        what="some GPUs have no row",
        figure=lambda plan: plan.gpus,
        most=lambda plan: plan.batch_rows,
        told=lambda plan: f"{plan.gpus} GPUs share {plan.batch_rows} rows",
        change="raise data.effective_batch",
    ),
    Limit(
        what="the batch is larger than the settings were made for",
        figure=lambda plan: plan.batch_rows,
        most=lambda plan: plan.case.work.data.effective_batch,
        told=lambda plan: (
            f"{plan.batch_rows:,} rows; learning rate and steps are those of "
            f"{plan.case.work.data.effective_batch:,}"
        ),
        change="tune train.lr and train.warmup_steps anew, with fewer steps",
    ),
    Limit(
        what="the batch is larger than published models of about this size had",
        figure=lambda plan: plan.batch_tokens,
        most=lambda plan: LARGEST_BATCH.value,
        told=lambda plan: f"{plan.batch_tokens:,} tokens of {LARGEST_BATCH.value:,}",
        change="give each GPU fewer rows, or train a larger model",
    ),
    Limit(
        what="one process cannot read and pack rows for its GPU",
        figure=_row_rate,
        most=lambda plan: ROWS_READ.value,
        told=lambda plan: (
            f"{_row_rate(plan):,.0f} rows a second each, of {ROWS_READ.value:,.0f} measured"
        ),
        change="read with worker processes",
    ),
    Limit(
        what="the disk cannot deliver the references",
        figure=_read_rate,
        most=lambda plan: plan.case.disk.rate,
        told=lambda plan: (
            f"{decimal_size(_read_rate(plan))} a second for all GPUs, of "
            f"{decimal_size(plan.case.disk.rate)} if one such disk serves them all"
        ),
        change="a copy of the cache on each machine, or lower data.reference_frames",
    ),
)


def first_breaks(plans: Sequence[ScalePlan], limits: Sequence[Limit]) -> list[Break]:
    """The limits that `plans` are beyond, each at the fewest GPUs, the earliest and worst first."""
    found = []
    for limit in limits:
        beyond = [plan for plan in plans if limit.figure(plan) > limit.most(plan)]
        if beyond:
            earliest = min(beyond, key=lambda plan: (plan.gpus, plan.batch_rows))
            found.append(Break(limit=limit, plan=earliest))
    return sorted(found, key=lambda each: (each.plan.gpus, -each.times))
