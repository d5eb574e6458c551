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

from kit.base.hardware import prefers_explicit_attention
from kit.model.gpt import SpeechGPT
from kit.model.lora import is_adapter
from kit.settings import GPTConfig, TrainConfig
from kit.training.config import FULL, Finetuning
from kit.training.optim import MAX_STACK_ENTRIES, eight_bit_bytes, make_optimizers
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
class Step:
    """One training step, as far as memory is concerned."""

    rows: int  # of a forward pass: the micro-batch
    text_ids: int  # of the longest row, without START and STOP
    codes: int  # of the longest row, without START and STOP
    reference_frames: int  # mel frames
    length: int = 0  # tokens each row is padded to; 0: to the longest row
    half: bool = False  # bf16 or fp16 matmuls; weights that train stay fp32
    sdpa: bool = False  # fused attention; else the explicit softmax
    recompute_every: int = 0  # every n-th layer is recomputed in the backward pass; 0: none
    ema: bool = False  # averaged weights on the same device
    optimizer: str = "adamw"  # or "muon": for the trunk's matrices
    fused: bool = False  # one kernel for the optimiser step, without working copies
    eight_bit: bool = False  # AdamW's moments in 8 bits instead of fp32
    accumulate: bool = False  # more than one forward pass per optimiser step
    guided: bool = False  # guided attention, as in the first steps
    device: str = "cuda"  # or "cpu", where dropout keeps factors instead of flags
    finetuning: Finetuning = FULL  # what trains


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


def _activations(config: GPTConfig, step: Step) -> Activations:
    lora = step.finetuning.lora if step.finetuning.adapters else None
    number = HALF_BYTES if step.half else FP32_BYTES  # bytes, in the matmuls
    mask = number if step.device == "cpu" else 1  # dropout keeps factors, or flags
    own_length = step.text_ids + 2 + step.codes + config.stop_targets
    length = config.latents + max(own_length, step.length)  # S
    tokens = step.rows * length  # B * S
    wide = tokens * config.width  # B * S * D
    # On a CPU fused attention has no dropout: PyTorch then writes it out.
    dtype = torch.bfloat16 if step.half else torch.float32
    explicit = not step.sdpa or (step.device == "cpu" and config.dropout > 0)
    explicit = explicit or prefers_explicit_attention(step.device, dtype, length, config.dropout)
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
    copy = number if step.half or config.dropout else 0
    dropped = (1 if step.device == "cuda" else number) if config.dropout else 0
    layer += scores * (FP32_BYTES + copy + dropped)

    # Backward in the MLP: the residual's gradient (and its half-precision copy) and 4 D of GELU; in
    # the softmax, or the dropout after it, two gradients of the scores, when the MLP's activations
    # and the copy for v are gone.
    backward = wide * (FP32_BYTES + (HALF_BYTES if step.half else 0) + 4 * number)
    if lora and {"mlp.c_fc", "mlp.c_proj"} & {*lora.targets}:
        backward += wide * 4 * number  # the adapter's own gradient
    gradients = max(2 * FP32_BYTES - dropped, 2 * number) - copy
    backward = max(backward, scores * gradients - 9 * wide * number)

    # The conditioner's blocks (8 D a frame, and T x T scores) and the latents' layers.
    conditioner = conformers_forward = conformers_backward = 0
    if config.conformers:
        conditioner, conformers_forward, conformers_backward = _conformers(config, step, number)
        if lora is not None:
            conditioner = conformers_backward = 0
    elif lora is None:  # else it is frozen: no gradient goes through it
        frames = step.rows * step.reference_frames
        latents = step.rows * config.latents
        block = frames * config.width * (2 * FP32_BYTES + 6 * number)
        block += frames * config.heads * step.reference_frames * FP32_BYTES
        inner = config.perceiver_heads * config.perceiver_head_width
        hidden = config.width * 8 // 3
        perceiver = (frames + latents) * (config.width + 2 * inner)
        perceiver += latents * (2 * config.width + 2 * inner + 4 * hidden)
        conditioner = config.cond_blocks * block + config.perceiver_layers * perceiver * number

    # The inputs of the two final norms, and the states that have a target.
    targets = step.rows * (step.text_ids + 1 + step.codes + config.stop_targets)
    head = 2 * wide * FP32_BYTES + targets * config.width * number

    # A normed input, q, k, v, and one head's fp32 scores.
    guide = 0
    if step.guided:
        guide = wide * 4 * number + tokens * (length + step.text_ids + 2) * FP32_BYTES
    conformers = (conformers_forward, conformers_backward)
    return Activations(layer, wide * FP32_BYTES, conditioner, head, guide, backward, *conformers)


def _conformers(config: GPTConfig, step: Step, number: int) -> tuple[int, int, int]:
    """Bytes that IndexTTS2's conditioning keeps, has in its forward and in its backward pass."""
    kept = []
    convolutions = []
    frames = (step.reference_frames - 1) // 2  # after a convolution in steps of 2
    halved = (config.n_mels - 1) // 2
    for encoder, states in ((config.conformers[:5], config.width), (config.conformers[5:], 1024)):
        width, hidden, heads, blocks, factor = encoder
        tokens = step.rows * frames
        convolved = tokens * width * halved * number
        # Norms and residuals in fp32; attention's and the convolution's inputs; the feed-forward.
        block = tokens * (width * (5 * FP32_BYTES + 16 * number) + 2 * hidden * number)
        block += 3 * tokens * heads * frames * FP32_BYTES  # scores, softmax, masked
        inner = heads * 64
        resampled = 2 * (tokens * (states + 2 * inner) + step.rows * 32 * states * 4 * factor)
        # The first layer's result, which ReLU and the linear layer after it both keep.
        kept.append(convolved + blocks * block + resampled * number)
        convolutions.append(convolved)
    # The emotion's encoder comes second, so its backward pass is first.
    backward = max(kept[0] + 3 * convolutions[1], 3 * convolutions[0])
    return sum(kept), max(convolutions), backward


def _update_bytes(config: GPTConfig, step: Step, counts: Counts) -> int:
    """Working copies of what the optimizer updates at once."""
    adamw = 0
    if step.eight_bit:
        if step.device == "cpu":
            adamw = EIGHT_BIT_CPU_BYTES * counts.largest
    elif not step.fused:
        # On CUDA torch's default (foreach) takes all tensors at once.
        on_cuda = step.device == "cuda"
        adamw = FP32_BYTES * (sum(counts.adamw_sizes) if on_cuda else 2 * counts.largest)
    if step.optimizer == "adamw":
        return adamw
    rank = step.finetuning.lora.rank if step.finetuning.adapters else config.width
    matrix = 4 * config.width * rank
    stack = max(matrix, min(MAX_STACK_ENTRIES, config.layers * matrix))
    return max(adamw, stack * (MUON_HALF_BYTES if step.half else MUON_FP32_BYTES))


def plan_bytes(config: GPTConfig, step: Step) -> MemoryPlan:
    """Plan a step once the optimizer has its moments, that is from the second step on."""
    counts = count_trained(config, step.finetuning, step.optimizer)
    adapters = step.finetuning.adapters
    kept = _activations(config, step)
    matrices = config.width**2 * LAYER_MATRICES  # numbers in a layer
    heads = config.width * (config.text_vocab + config.code_vocab)

    # Frozen matrices may be in half precision (`rounds_frozen`). Of the others autocast makes
    # copies, but of tables that are looked up.
    rounded = 0
    if step.half and step.finetuning.rounds_frozen:
        rounded = config.width**2 * sum(MATRICES[name] for name in step.finetuning.lora.targets)
    layer_copy = other_copies = 0
    if step.half:
        layer_copy = HALF_BYTES * (matrices - rounded)
        others = heads + counts.adapters
        if not adapters:
            tables = heads + config.width * (config.max_text + config.max_code)
            others = counts.weights - tables - config.layers * matrices
        other_copies = HALF_BYTES * others

    # AdamW has two moments of each number, Muon one.
    moments = FP32_BYTES * (counts.trained - sum(counts.adamw_sizes))
    if step.eight_bit:
        moments += sum(map(eight_bit_bytes, counts.adamw_sizes))
    else:
        moments += 2 * FP32_BYTES * sum(counts.adamw_sizes)

    recomputed = range(config.layers)[:: step.recompute_every] if step.recompute_every else ()
    whole_layers = config.layers - len(recomputed)
    activations = whole_layers * kept.layer + len(recomputed) * kept.residual
    activations += kept.conditioner + kept.head + kept.guide
    text_logits = step.rows * (step.text_ids + 1) * config.text_vocab * FP32_BYTES
    code_logits = step.rows * (step.codes + config.stop_targets) * config.code_vocab * FP32_BYTES
    gradients = counts.trained * FP32_BYTES
    saved_bytes = config.layers * rounded * (FP32_BYTES - HALF_BYTES)
    parts = {
        "weights": counts.weights * FP32_BYTES - saved_bytes,
        "gradients": gradients,
        "optimizer": moments,
        "EMA": gradients if step.ema else 0,
        "half-precision copies": other_copies + config.layers * layer_copy,
        "activations": activations,
        "logits": 2 * (text_logits + code_logits),  # and their log-softmax
    }

    # Autocast remembers copies of what trains to the end of the forward pass; after it, and of
    # frozen weights always, only those that the backward pass needs.
    kept_copies = other_copies + whole_layers * layer_copy
    forward_copies = kept_copies if adapters else parts["half-precision copies"]
    # A layer's gradients come one by one, on top of those that an earlier pass has left.
    earlier = gradients if step.accumulate else 0
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
        "the optimizer's update": gradients + _update_bytes(config, step, counts),
    }
    steady = parts["weights"] + parts["optimizer"] + parts["EMA"]
    return MemoryPlan(parts=parts, moments={name: steady + n for name, n in alive.items()})
