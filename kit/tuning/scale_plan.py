"""What a run would take on many GPUs that are not here: reckoned from parts, never measured.

`plan_scale` reckons one step for a number of GPUs: the products' time from the model's own
operations and an assumed share of the GPU's peak, what is sent between GPUs and how long that
takes, how long a checkpoint and the quality gate stop all of them. `scale_limits.py` says what
breaks first. The memory plan decides whether each GPU holds a whole model or a share. Several GPUs
train as `kit/training/ranks.py` and `kit/training/sharding.py` have it: replicas send their
gradients after the last pass of a step, shares are gathered and sent in every pass. Validation,
which all share, is left out. Knows workloads and numbers; computes nothing with tensors.

DDP: Li et al. 2020. FSDP: Zhao et al. 2023. Ring all-reduce: Patarasuk and Yuan 2009.
"""

import dataclasses
import functools
import math

import torch

from kit.base.config import ConfigError, require_within
from kit.base.hardware import Hardware
from kit.batches.batching import EXTRA_TOKENS
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.training.ranks import buckets
from kit.tuning.memory_plan import FP32_BYTES, parameter_count, plan_bytes
from kit.tuning.model_flops import training_flops
from kit.tuning.preflight import Verdict, Workload, largest_micro_batch, preflight
from kit.tuning.scale_parts import (
    CHECKSUM,
    CLIP,
    CODES_A_PIECE,
    ENCODED,
    GATE,
    GATHERED_AHEAD,
    GPUS_A_MACHINE,
    HELD_ROW,
    HOP,
    HOST_COPY,
    INDEX_ROW,
    LAYER_LAUNCH,
    LINK_SHARE,
    PADDING,
    UPDATE,
    Disk,
    GPUSheet,
    Network,
)
from kit.tuning.session_plan import Costs, on_disk
from kit.tuning.sharded_plan import choose_parallel, spread_verdict

HALF_BYTES = 2
SAMPLE_BYTES = 2  # of a recording, 16 bits
MOST_GPUS = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechCorpus:
    """Speech to train on, counted in recordings of one length."""

    hours: float = 100_000
    clip_s: float = CLIP.value  # seconds of a recording
    frame_rate: float = 43.07  # codes a second
    reference_frames: int = 516  # mel frames of a reference
    n_mels: int = 80
    sample_rate_hz: int = 22_050

    def __post_init__(self):
        require_within(self, 1e-3, 1e9, "hours")
        require_within(self, 0.1, 3600, "clip_s")
        require_within(self, 0.1, 1e4, "frame_rate")

    @property
    def rows(self) -> int:
        return math.ceil(3600 * self.hours / self.clip_s)

    @property
    def codes(self) -> int:
        """Of a row."""
        return max(1, round(self.clip_s * self.frame_rate))

    @property
    def text_ids(self) -> int:
        """Of a row."""
        return max(1, round(self.codes / CODES_A_PIECE.value))

    @property
    def row_tokens(self) -> int:
        """Of a row, as a step's event counts them."""
        return self.text_ids + self.codes + EXTRA_TOKENS

    @property
    def code_bytes(self) -> int:
        """Codes of all rows in the cache, four bytes each."""
        return 4 * self.codes * self.rows

    @property
    def row_reference_bytes(self) -> int:
        return HALF_BYTES * self.n_mels * self.reference_frames

    @property
    def cache_bytes(self) -> int:
        """Codes, references and index of all rows."""
        return self.code_bytes + self.rows * (self.row_reference_bytes + round(INDEX_ROW.value))

    @property
    def recording_bytes(self) -> int:
        return round(3600 * self.hours * self.sample_rate_hz * SAMPLE_BYTES)

    @property
    def encoding_core_hours(self) -> float:
        """Hours of one core to encode all, by what was measured."""
        return self.hours / ENCODED.value

    @property
    def writer_bytes(self) -> float:
        """Memory of the process that writes the index."""
        return HELD_ROW.value * self.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """A run, its corpus, and the machines it is to be trained on."""

    work: Workload
    corpus: SpeechCorpus
    card: GPUSheet
    network: Network
    disk: Disk
    max_cache_bytes: float  # that the run allows its cache of codes

    def __post_init__(self):
        tokens = self.work.data.effective_tokens
        if tokens:
            raise ConfigError(
                f"data.effective_tokens = {tokens}: batches are planned in recordings here. Set it "
                "to 0, and data.effective_batch to how many make a batch."
            )

    @property
    def row_flops(self) -> int:
        """Operations of a row with its padding."""
        corpus = self.corpus
        length = round(corpus.row_tokens * (1 + PADDING.value))
        return training_flops(
            self.work.model, corpus.text_ids, corpus.codes, corpus.reference_frames, length
        )

    @property
    def computed_flops(self) -> float:
        """With the forward passes that gradient checkpointing takes again."""
        speed = self.work.speed
        again = 1 / (3 * speed.recompute_every) if speed.gradient_checkpointing else 0
        return self.row_flops * (1 + again)

    @property
    def checkpoint_bytes(self) -> int:
        plan = plan_bytes(self.work.model, self.work.step)
        numbers = parameter_count(self.work.model)
        return on_disk(numbers, plan.parts["optimizer"], self.work.speed.ema).full_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """One step on `gpus` GPUs, and what else takes their time. All seconds are reckoned."""

    case: ScaleCase
    gpus: int
    batch_rows: int  # of a step
    parallel: str  # "ddp" or "fsdp"
    passes: int  # of a step, each GPU
    memory_bytes: int  # planned, each GPU
    sent_bytes: float  # a step, each GPU
    wire_s: float  # until all is sent
    pass_s: float  # forward and backward of one pass
    compute_s: float  # all passes of a step
    hidden_s: float  # of `wire_s`, behind which something is computed
    update_s: float
    checkpoint_s: float  # in which all wait for the first
    launch_bound: bool  # a pass takes as long as its kernels take to be launched

    @property
    def step_s(self) -> float:
        return self.compute_s + self.wire_s - self.hidden_s + self.update_s

    @property
    def all_s(self) -> float:
        """A step with its share of checkpoints and hearings."""
        gate_s = GATE.value if self.case.work.train.gate_every else 0.0
        costs = Costs(step_s=self.step_s, gate_s=gate_s, checkpoint_s=self.checkpoint_s)
        return costs.per_step_s(self.case.work.train)

    @property
    def batch_tokens(self) -> int:
        return self.batch_rows * self.case.corpus.row_tokens

    @property
    def tokens_a_s(self) -> float:
        return self.batch_tokens / self.all_s

    @property
    def steps(self) -> int:
        """Of one pass over the corpus."""
        return math.ceil(self.case.corpus.rows / self.batch_rows)

    @property
    def hours(self) -> float:
        """Of one pass over the corpus."""
        return self.steps * self.all_s / 3600

    @property
    def backward_s(self) -> float:
        """The backward pass of the last pass, behind which gradients could be sent."""
        return 2 / 3 * self.pass_s

    @property
    def wire_share(self) -> float:
        """Of a step, what sending adds to it."""
        return (self.wire_s - self.hidden_s) / self.step_s

    @property
    def checkpoint_share(self) -> float:
        """Of the time, with nothing else that stops."""
        between_s = self.case.work.train.checkpoint_every * self.step_s
        return self.checkpoint_s / (between_s + self.checkpoint_s)

    @property
    def gate_share(self) -> float:
        """Of the time, likewise; 0 where no gate is asked."""
        every = self.case.work.train.gate_every
        return GATE.value / (every * self.step_s + GATE.value) if every else 0.0


def planned_gpu(card: GPUSheet) -> Hardware:
    """`card` as the memory plan wants it; never taken for one that is here."""
    return Hardware(
        device="cuda",
        name=f"{card.name}, planned",
        cores=16,
        ram_bytes=2**37,
        memory_bytes=card.memory_bytes,
        capability=card.capability,
    )


def plan_scale(
    case: ScaleCase, gpus: int, full_passes: bool = False, share: float = 0
) -> ScalePlan:
    """The plan for `gpus` GPUs, which share the batch of the run's settings.

    With `full_passes` the batch grows until every GPU has a pass as large as the settings have it.
    `share` is of the GPU's peak (0: the card's own). Raises ConfigError for a number of GPUs that
    there cannot be or a card that cannot train the model, FitError where not one row fits.
    """
    require_gpus(gpus)
    work = case.work
    parallel = choose_parallel(work, gpus).value
    require_precision(case, parallel)
    verdict = fitting(work, gpus, parallel)
    batch_rows = work.data.effective_batch
    if full_passes:
        batch_rows = max(batch_rows, gpus * work.data.micro_batch)
    rank_rows = math.ceil(batch_rows / gpus)
    passes = math.ceil(rank_rows / verdict.micro_batch)
    share = share or case.card.utilisation
    flops_s = rank_rows * case.computed_flops / (share * case.card.peak_flops)
    launch_s = passes * work.model.layers * LAYER_LAUNCH.value
    compute_s = max(flops_s, launch_s)
    sent_bytes, messages = sent(work.model, gpus, parallel, passes)
    wire_s = sent_bytes / link_rate(case, gpus) + messages * message_s(gpus)
    hidden_s = min(wire_s, GATHERED_AHEAD.value * compute_s) if parallel == "fsdp" else 0.0
    return ScalePlan(
        case=case,
        gpus=gpus,
        batch_rows=batch_rows,
        parallel=parallel,
        passes=passes,
        memory_bytes=verdict.planned_bytes,
        sent_bytes=sent_bytes,
        wire_s=wire_s,
        pass_s=compute_s / passes,
        compute_s=compute_s,
        hidden_s=hidden_s,
        update_s=update_s(case, gpus if parallel == "fsdp" else 1),
        checkpoint_s=checkpoint_s(case),
        launch_bound=launch_s > flops_s,
    )


def require_gpus(gpus: int) -> None:
    """Raise ConfigError for a number of GPUs that there cannot be."""
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"gpus = {gpus}: give whole numbers from 1 to {MOST_GPUS:,}.")


def require_precision(case: ScaleCase, parallel: str) -> None:
    """Raise ConfigError where weights must be spread on a card whose half precision is fp16."""
    if parallel == "fsdp" and case.card.capability < (8, 0):
        raise ConfigError(
            f"A {case.card.name} has no room for this model with one row, and no bf16, without "
            "which weights cannot be spread: choose --card a100 or h100, or a smaller model."
        )


def fitting(work: Workload, gpus: int, parallel: str) -> Verdict:
    """The verdict on the most rows of a pass that a GPU has room for, up to the settings' own."""
    if parallel == "fsdp":
        return spread_verdict(work, gpus)
    verdict = preflight(work)
    return verdict if verdict.fits else largest_micro_batch(work)


def sent(model: GPTConfig, gpus: int, parallel: str, passes: int) -> tuple[float, int]:
    """Bytes that a GPU sends in a step, and in how many messages.

    Replicas: a ring sends each gradient 2 (N - 1) / N times. Shares: in each pass weights are
    gathered for the forward pass and again for the backward pass, and gradients summed to shares,
    (N - 1) / N of the bytes each, in fp32.
    """
    if gpus == 1:
        return 0.0, 0
    whole_bytes = FP32_BYTES * parameter_count(model)
    around = (gpus - 1) / gpus
    if parallel == "fsdp":
        return 3 * passes * around * whole_bytes, 3 * passes * (model.layers + 1)
    return 2 * around * whole_bytes, gradient_messages(model)


@functools.cache
def gradient_messages(model: GPTConfig) -> int:
    """Messages in which replicas send their gradients: the large ones alone, the small together."""
    with torch.device("meta"):
        return len(list(buckets([p.detach() for p in SpeechGPT(model).parameters()])))


def link_rate(case: ScaleCase, gpus: int) -> float:
    """Bytes a second around a ring of `gpus`: its slowest link, of what links reach."""
    slowest = case.card.link_rate
    if gpus > GPUS_A_MACHINE:
        slowest = min(slowest, case.network.rate)
    return LINK_SHARE.value * slowest


def message_s(gpus: int) -> float:
    """The time of a message without its bytes: up a tree of all GPUs and down again."""
    return 2 * math.ceil(math.log2(gpus)) * HOP.value if gpus > 1 else 0.0


def update_s(case: ScaleCase, shares: int) -> float:
    """The optimizer's update: all that it reads and writes, at the rate of the GPU's memory."""
    moved_bytes = UPDATE.value * parameter_count(case.work.model) / shares
    return moved_bytes / (LINK_SHARE.value * case.card.memory_rate)


def checkpoint_s(case: ScaleCase) -> float:
    """The first GPU's process copies all to memory, writes it, and reads it for the checksum."""
    size = case.checkpoint_bytes
    return size / HOST_COPY.value + size / case.disk.rate + size / CHECKSUM.value


def sharded_checkpoint_s(case: ScaleCase, gpus: int) -> float:
    """The same, were each GPU to write its share and each machine to have such a disk."""
    machines = math.ceil(gpus / GPUS_A_MACHINE)
    size = case.checkpoint_bytes
    rank_s = size / gpus / HOST_COPY.value + size / gpus / CHECKSUM.value
    return rank_s + size / machines / case.disk.rate
