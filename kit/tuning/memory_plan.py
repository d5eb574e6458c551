"""Predict a training step's memory, by part and at its peak, before anything is allocated.

Weights, gradients, moments and averages are counted from the configuration (parameters on torch's
`meta` device); activations by what each operation keeps for its backward pass. torch.compile is
left out: it fuses operations and keeps less. With adapters, frozen weights have neither gradient
nor moments, and the conditioner keeps nothing.

Shapes: B batch, S packed sequence with its latents, D width, H heads, K latents, T mel frames,
V vocabulary.
"""

import dataclasses
import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import nn

from kit.base.config import require
from kit.base.hardware import Hardware, is_here, prefers_explicit_attention
from kit.batches.batching import padded
from kit.model.gpt import SpeechGPT
from kit.model.lora import is_adapter
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.config import FULL, Finetuning
from kit.training.optim import MAX_STACK_ENTRIES, eight_bit_adamw, eight_bit_bytes, make_optimizers
from kit.training.trainer import Trainable

FP32_BYTES = 4
HALF_BYTES = 2
MATRICES = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}  # in D x D
LAYER_MATRICES = sum(MATRICES.values())
INPUT_WIDTHS = {"attn.c_attn": 1, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 4}  # in D
# Muon's working copies, bytes per entry of a stack of matrices: the update, operands of two
# products, Gram matrices.
MUON_FP32_BYTES = 17
MUON_HALF_BYTES = 10
# 8-bit AdamW's working copies on a CPU, bytes per entry of a parameter: both moments in fp32, the
# gradient, the root of the second moment before and after the division.
EIGHT_BIT_CPU_BYTES = 20
# Of the released IndexTTS2: `GPTConfig.conformers`, and the numbers in its conditioner.
RELEASED_CONFORMERS = (512, 2048, 8, 6, 2, 512, 1024, 4, 4, 2)
RELEASED_CONDITIONER = 338_899_964


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The training steps of a run, as far as memory is concerned. The longest row decides."""

    model: GPTConfig
    train: TrainConfig
    speed: SpeedConfig
    data: DataConfig
    hw: Hardware
    finetuning: Finetuning = FULL  # what trains
    precision: str = "fp32"  # of mixed precision on this device, as `choose_precision` says
    text_ids: int = 0  # of the longest row; 0: as many as the model has positions for
    codes: int = 0  # of the longest row; 0: as many as the model has positions for
    max_memory_fraction: float = 0.9  # share of the device's memory the run may use

    def __post_init__(self):
        share = 0 < self.max_memory_fraction <= 1
        require(share, self, "max_memory_fraction", "a share, above 0 and at most 1.")

    @property
    def longest_text(self) -> int:
        """Text ids of the longest row, without START and STOP."""
        return self.text_ids or self.model.max_text - 2

    @property
    def longest_codes(self) -> int:
        """Codes of the longest row, without START and STOP."""
        return self.codes or self.model.max_code - self.model.stop_targets

    @property
    def length(self) -> int:
        """The tokens that the longest row is padded to."""
        tokens = self.longest_text + 2 + self.longest_codes + self.model.stop_targets
        return padded(tokens, self.data)

    @property
    def rows(self) -> int:
        """Rows of a forward pass."""
        if self.data.effective_tokens:
            return max(1, self.data.micro_tokens // self.length)
        return self.data.micro_batch

    @property
    def half(self) -> bool:
        """Whether matmuls are in bf16 or fp16; weights that train stay fp32."""
        return self.speed.mixed_precision and self.precision != "fp32"

    @property
    def on_cuda(self) -> bool:
        return self.hw.device == "cuda"

    @property
    def records(self) -> bool:
        """Whether passes are recorded as CUDA graphs."""
        return self.speed.cuda_graphs and self.on_cuda

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay from one pass to the next: of a batch, or in CUDA graphs."""
        return self.data.grad_accum > 1 or self.records

    @property
    def eight_bit(self) -> bool:
        """Whether AdamW's moments are in 8 bits."""
        return self.speed.adamw_8bit and has_8bit_adamw(self.hw)

    @property
    def planned_bytes(self) -> int:
        return plan_bytes(self).peak_bytes

    def with_rows(self, micro_batch: int) -> "Workload":
        """The same effective batch in passes of `micro_batch` rows."""
        data = dataclasses.replace(self.data, micro_batch=micro_batch)
        return dataclasses.replace(self, data=data)


def has_8bit_adamw(hw: Hardware) -> bool:
    """Whether 8-bit AdamW runs on `hw`; on a GPU elsewhere its package can be installed."""
    elsewhere = hw.device == "cuda" and not is_here(hw)
    return elsewhere or eight_bit_adamw(hw).value == "yes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by part, each at its largest, and bytes alive together at each moment of a step."""

    parts: dict[str, int]
    moments: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.moments.values())

    @property
    def fullest(self) -> str:
        """The name of the moment of the peak."""
        return max(self.moments, key=self.moments.get)


def empty_model(config: GPTConfig) -> SpeechGPT:
    """The model without memory for its weights.

    The released IndexTTS2 is planned without its package, too: its conditioner is then one table.
    """
    with torch.device("meta"):
        if config.conformers != RELEASED_CONFORMERS or importlib.util.find_spec("indextts"):
            return SpeechGPT(config)
        model = SpeechGPT(dataclasses.replace(config, conformers=()))
        model.conditioner = nn.Embedding(RELEASED_CONDITIONER, 1)
        return model


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    return sum(p.numel() for p in empty_model(config).parameters())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a model and of what trains in it."""

    learning: int  # that training changes
    weights: int  # adapters included
    trained: int  # in tensors that have gradients and moments
    adapters: int  # in all adapters
    tables: int  # in tables (embeddings, positions, heads) of which only new rows train
    largest: int  # in the largest tensor that trains
    adamw_sizes: tuple[int, ...]  # of each tensor that AdamW updates; Muon updates the others


@functools.cache
def count_trained(config: GPTConfig, finetuning: Finetuning, optimizer: str = "adamw") -> Counts:
    """Count what `finetuning` trains of a model, and what of it AdamW updates."""
    model = empty_model(config)
    with torch.device("meta"):
        trainable = Trainable(model, finetuning.without_phases())
        adamw = make_optimizers(model, TrainConfig(optimizer=optimizer), fused=False)[0]
    sizes = {name: p.numel() for name, p in trainable.parameters.items()}
    return Counts(
        learning=trainable.count,
        weights=sum(p.numel() for p in model.parameters()),
        trained=sum(sizes.values()),
        adapters=sum(size for name, size in sizes.items() if is_adapter(name)),
        tables=sum(sizes[name] for name in trainable.first_rows),
        largest=max(sizes.values()),
        adamw_sizes=tuple(p.numel() for g in adamw.param_groups for p in g["params"]),
    )


class Activations(NamedTuple):
    """Bytes that the forward pass keeps for the backward pass."""

    layer: int  # one layer of the trunk
    residual: int  # what enters a layer, always fp32: all that a recomputed layer keeps
    conditioner: int
    head: int
    guide: int  # of guided attention
    backward: int  # gradients inside one layer, beside what it has kept
    # Of IndexTTS2's conditioning, without what it keeps for the backward pass.
    conformers_forward: int
    conformers_backward: int


def _activations(work: Workload) -> Activations:
    config = work.model
    lora = work.finetuning.lora if work.finetuning.adapters else None
    number = HALF_BYTES if work.half else FP32_BYTES  # bytes, in the matmuls
    mask = number if work.hw.device == "cpu" else 1  # dropout keeps factors, or flags
    length = config.latents + work.length  # S
    tokens = work.rows * length  # B * S
    wide = tokens * config.width  # B * S * D
    # On a CPU fused attention has no dropout: PyTorch then writes it out.
    dtype = torch.bfloat16 if work.half else torch.float32
    explicit = not work.speed.sdpa or (work.hw.device == "cpu" and config.dropout > 0)
    explicit = explicit or prefers_explicit_attention(work.hw.device, dtype, length, config.dropout)
    scores = tokens * config.heads * length if explicit else 0  # B * H * S * S

    # A layer: the inputs of two norms, of GELU (4 D) and of the matrices, and q, k, v (3 D). A
    # frozen matrix does not need its input; an adapter beside it does, after its own dropout, and
    # keeps `rank` numbers a token. Fused attention keeps its result, c_proj's input, in any case.
    layer = wide * (2 * FP32_BYTES + 7 * number)
    if config.dropout:
        layer += wide * 2 * mask
    for name, widths in INPUT_WIDTHS.items():
        adapted = lora is not None and name in lora.targets
        if lora is None or adapted or (name == "attn.c_proj" and not explicit):
            layer += wide * widths * number
        if adapted:
            layer += tokens * lora.rank * number
            if lora.dropout:
                layer += wide * widths * mask
    # The explicit softmax: its fp32 result, a rounded or masked copy for v, the dropout's mask.
    copy = number if work.half or config.dropout else 0
    dropped = (1 if work.on_cuda else number) if config.dropout else 0
    layer += scores * (FP32_BYTES + copy + dropped)

    # Backward in the MLP: the residual's gradient (and its half-precision copy) and 4 D of GELU; in
    # the softmax, or the dropout after it, two gradients of the scores, when the MLP's activations
    # and the copy for v are gone.
    backward = wide * (FP32_BYTES + (HALF_BYTES if work.half else 0) + 4 * number)
    if lora and {"mlp.c_fc", "mlp.c_proj"} & {*lora.targets}:
        backward += wide * 4 * number  # the adapter's own gradient
    gradients = max(2 * FP32_BYTES - dropped, 2 * number) - copy
    backward = max(backward, scores * gradients - 9 * wide * number)

    # The conditioner's blocks (8 D a frame, and T x T scores) and the latents' layers.
    conditioner = conformers_forward = conformers_backward = 0
    if config.conformers:
        conditioner, conformers_forward, conformers_backward = _conformers(work, number)
        if lora is not None:
            conditioner = conformers_backward = 0
    elif lora is None:  # else it is frozen: no gradient goes through it
        frames = work.rows * work.data.reference_frames
        latents = work.rows * config.latents
        block = frames * config.width * (2 * FP32_BYTES + 6 * number)
        block += frames * config.heads * work.data.reference_frames * FP32_BYTES
        inner = config.perceiver_heads * config.perceiver_head_width
        hidden = config.width * 8 // 3
        perceiver = (frames + latents) * (config.width + 2 * inner)
        perceiver += latents * (2 * config.width + 2 * inner + 4 * hidden)
        conditioner = config.cond_blocks * block + config.perceiver_layers * perceiver * number

    # The inputs of the two final norms, and the states that have a target.
    targets = work.rows * (work.longest_text + 1 + work.longest_codes + config.stop_targets)
    head = 2 * wide * FP32_BYTES + targets * config.width * number

    # A normed input, q, k, v, and one head's fp32 scores.
    guide = 0
    if work.train.guided_attention_weight > 0:
        guide = wide * 4 * number + tokens * (length + work.longest_text + 2) * FP32_BYTES
    conformers = (conformers_forward, conformers_backward)
    return Activations(layer, wide * FP32_BYTES, conditioner, head, guide, backward, *conformers)


def _conformers(work: Workload, number: int) -> tuple[int, int, int]:
    """Bytes that IndexTTS2's conditioning keeps, has in its forward and in its backward pass."""
    config = work.model
    kept = []
    convolutions = []
    frames = (work.data.reference_frames - 1) // 2  # after a convolution in steps of 2
    halved = (config.n_mels - 1) // 2
    for encoder, states in ((config.conformers[:5], config.width), (config.conformers[5:], 1024)):
        width, hidden, heads, blocks, factor = encoder
        tokens = work.rows * frames
        convolved = tokens * width * halved * number
        # Norms and residuals in fp32; attention's and the convolution's inputs; the feed-forward.
        block = tokens * (width * (5 * FP32_BYTES + 16 * number) + 2 * hidden * number)
        block += 3 * tokens * heads * frames * FP32_BYTES  # scores, softmax, masked
        inner = heads * 64
        resampled = 2 * (tokens * (states + 2 * inner) + work.rows * 32 * states * 4 * factor)
        # The first layer's result, which ReLU and the linear layer after it both keep.
        kept.append(convolved + blocks * block + resampled * number)
        convolutions.append(convolved)
    # The emotion's encoder comes second, so its backward pass is first.
    backward = max(kept[0] + 3 * convolutions[1], 3 * convolutions[0])
    return sum(kept), max(convolutions), backward


def _update_bytes(work: Workload, counts: Counts) -> int:
    """Working copies of what the optimizer updates at once."""
    config = work.model
    adamw = 0
    if work.eight_bit:
        if work.hw.device == "cpu":
            adamw = EIGHT_BIT_CPU_BYTES * counts.largest
    elif not work.speed.fused_adamw:
        # On CUDA torch's default (foreach) takes all tensors at once.
        adamw = FP32_BYTES * (sum(counts.adamw_sizes) if work.on_cuda else 2 * counts.largest)
    if work.train.optimizer == "adamw":
        return adamw
    rank = work.finetuning.lora.rank if work.finetuning.adapters else config.width
    matrix = 4 * config.width * rank
    stack = max(matrix, min(MAX_STACK_ENTRIES, config.layers * matrix))
    return max(adamw, stack * (MUON_HALF_BYTES if work.half else MUON_FP32_BYTES))


def plan_bytes(work: Workload) -> MemoryPlan:
    """Plan a step once the optimizer has its moments, that is from the second step on."""
    config = work.model
    counts = count_trained(config, work.finetuning, work.train.optimizer)
    adapters = work.finetuning.adapters
    kept = _activations(work)
    matrices = config.width**2 * LAYER_MATRICES  # numbers in a layer
    heads = config.width * (config.text_vocab + config.code_vocab)

    # Frozen matrices may be in half precision (`rounds_frozen`). Of the others autocast makes
    # copies, but of tables that are looked up.
    rounded = 0
    if work.half and work.finetuning.rounds_frozen:
        rounded = config.width**2 * sum(MATRICES[name] for name in work.finetuning.lora.targets)
    layer_copy = other_copies = 0
    if work.half:
        layer_copy = HALF_BYTES * (matrices - rounded)
        others = heads + counts.adapters
        if not adapters:
            tables = heads + config.width * (config.max_text + config.max_code)
            others = counts.weights - tables - config.layers * matrices
        other_copies = HALF_BYTES * others

    # AdamW has two moments of each number, Muon one.
    moments = FP32_BYTES * (counts.trained - sum(counts.adamw_sizes))
    if work.eight_bit:
        moments += sum(map(eight_bit_bytes, counts.adamw_sizes))
    else:
        moments += 2 * FP32_BYTES * sum(counts.adamw_sizes)

    recomputed = ()
    if work.speed.gradient_checkpointing:
        recomputed = range(config.layers)[:: work.speed.recompute_every]
    whole_layers = config.layers - len(recomputed)
    activations = whole_layers * kept.layer + len(recomputed) * kept.residual
    activations += kept.conditioner + kept.head + kept.guide
    text_targets = work.rows * (work.longest_text + 1)
    code_targets = work.rows * (work.longest_codes + config.stop_targets)
    text_logits = text_targets * config.text_vocab * FP32_BYTES
    code_logits = code_targets * config.code_vocab * FP32_BYTES
    gradients = counts.trained * FP32_BYTES
    averaged = work.speed.ema and not (work.speed.ema_offload and work.on_cuda)
    saved_bytes = config.layers * rounded * (FP32_BYTES - HALF_BYTES)
    parts = {
        "weights": counts.weights * FP32_BYTES - saved_bytes,
        "gradients": gradients,
        "optimizer": moments,
        "EMA": gradients if averaged else 0,
        "half-precision copies": other_copies + config.layers * layer_copy,
        "activations": activations,
        "logits": 2 * (text_logits + code_logits),  # and their log-softmax
    }

    # Autocast remembers copies of what trains to the end of the forward pass; after it, and of
    # frozen weights always, only those that the backward pass needs.
    kept_copies = other_copies + whole_layers * layer_copy
    forward_copies = kept_copies if adapters else parts["half-precision copies"]
    # A layer's gradients come one by one, on top of those that an earlier pass has left.
    earlier = gradients if work.accumulates else 0
    head_gradients = FP32_BYTES * heads
    layer_gradients = FP32_BYTES * matrices
    if adapters:  # half of the tables that train are heads
        head_gradients = FP32_BYTES * (counts.tables // 2)
        layer_gradients = FP32_BYTES * (counts.adapters // config.layers)
    top = max(earlier, head_gradients) + activations - kept.head + kept_copies + kept.backward
    if config.layers - 1 in recomputed:
        top += kept.layer - kept.residual
    bottom = max(earlier, head_gradients + (config.layers - 1) * layer_gradients)
    bottom += kept.layer + kept.conditioner + other_copies + layer_copy + kept.backward
    at_end = earlier + activations + kept.residual + forward_copies + parts["logits"]
    logits = earlier + activations + kept_copies + text_logits + 3 * code_logits
    conformers = gradients + other_copies + kept.conformers_backward
    alive = {
        "the end of the forward pass": at_end,
        "the backward pass through the logits": logits,  # the text's still wait
        "the backward pass through the top layer": top,
        "the backward pass through the bottom layer": bottom,
        "the forward pass through the conformers": earlier + other_copies + kept.conformers_forward,
        "the backward pass through the conformers": conformers,
        "the optimizer's update": gradients + _update_bytes(work, counts),
    }
    steady = parts["weights"] + parts["optimizer"] + parts["EMA"]
    return MemoryPlan(parts=parts, moments={name: steady + n for name, n in alive.items()})
