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

import torch

from kit.base.config import require
from kit.model.gpt import SpeechGPT
from kit.model.lora import is_adapter
from kit.model.sequence import GPTConfig
from kit.training.adam8bit import state_bytes
from kit.training.config import TrainConfig
from kit.training.optim import TOGETHER, make_optimizers
from kit.training.trainable import FULL, Finetuning, Trainable

FP32_BYTES = 4
HALF_BYTES = 2
MATRICES = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}  # in D x D
INPUT_WIDTHS = {"attn.c_attn": 1, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 4}  # in D
# Muon's working copies, bytes per entry of a stack of matrices: the update, operands of two
# products, Gram matrices.
MUON_FP32_BYTES = 17
MUON_HALF_BYTES = 10
# 8-bit AdamW's working copies on a CPU, bytes per entry of a parameter: both moments in fp32, the
# gradient, the root of the second moment before and after the division.
EIGHT_BIT_CPU_BYTES = 20


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

    def __post_init__(self):
        for name in ("rows", "text_ids", "codes", "reference_frames"):
            require(getattr(self, name) > 0, self, name, "must be at least 1.")
        require(self.optimizer in ("adamw", "muon"), self, "optimizer", "choose adamw or muon.")

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in the matmuls."""
        return HALF_BYTES if self.half else FP32_BYTES

    @property
    def mask_bytes(self) -> int:
        """Bytes that dropout keeps per number: a flag on CUDA, a factor on a CPU."""
        return self.number_bytes if self.device == "cpu" else 1


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


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in SpeechGPT(config).parameters())


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
    with torch.device("meta"):
        model = SpeechGPT(config)
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


def plan_bytes(config: GPTConfig, step: Step) -> MemoryPlan:
    """Plan a step once the optimizer has its moments, that is from the second step on."""
    counts = count_trained(config, step.finetuning, step.optimizer)
    layers = range(config.layers)
    recomputed = layers[:: step.recompute_every] if step.recompute_every else ()
    kept = config.layers - len(recomputed)  # layers that keep their activations
    residual = _tokens(config, step) * config.width * FP32_BYTES  # what enters a layer, always fp32
    layer = _layer_bytes(config, step)
    conditioner = _conditioner_bytes(config, step)
    head = _head_bytes(config, step)
    activations = kept * layer + len(recomputed) * residual + conditioner + head
    activations += _guide_bytes(config, step)
    text_logits = step.rows * (step.text_ids + 1) * config.text_vocab * FP32_BYTES
    code_logits = step.rows * (step.codes + config.stop_targets) * config.code_vocab * FP32_BYTES
    gradients = counts.trained * FP32_BYTES
    earlier = gradients if step.accumulate else 0  # left by the pass before
    backward = _backward_bytes(config, step)
    rounded = config.layers * _rounded_entries(config, step) * (FP32_BYTES - HALF_BYTES)
    parts = {
        "weights": counts.weights * FP32_BYTES - rounded,
        "gradients": gradients,
        "optimizer": _optimizer_bytes(counts, step),
        "EMA": gradients if step.ema else 0,
        "half-precision copies": _copy_bytes(config, step, config.layers),
        "activations": activations,
        "logits": 2 * (text_logits + code_logits),  # and their log-softmax
    }
    # Autocast remembers copies of what trains to the end of the forward pass; after it, and of
    # frozen weights always, only those that the backward pass needs.
    kept_copies = _copy_bytes(config, step, kept)
    copies = kept_copies if step.finetuning.adapters else parts["half-precision copies"]
    # A layer's gradients come one by one, on top of those that an earlier pass has left.
    head_gradients, layer_gradients = _gradient_bytes(config, step, counts)
    top = max(earlier, head_gradients) + activations - head + kept_copies + backward
    if config.layers - 1 in recomputed:
        top += layer - residual
    above = head_gradients + (config.layers - 1) * layer_gradients
    bottom = max(earlier, above) + layer + conditioner + _copy_bytes(config, step, 1) + backward
    logits = earlier + activations + kept_copies + text_logits + 3 * code_logits
    moments = {
        "the end of the forward pass": earlier + activations + residual + copies + parts["logits"],
        "the backward pass through the logits": logits,  # the text's still wait
        "the backward pass through the top layer": top,
        "the backward pass through the bottom layer": bottom,
        "the optimizer's update": gradients + _update_bytes(config, step, counts),
    }
    steady = parts["weights"] + parts["optimizer"] + parts["EMA"]
    return MemoryPlan(parts=parts, moments={name: steady + n for name, n in moments.items()})


def _gradient_bytes(config: GPTConfig, step: Step, counts: Counts) -> tuple[int, int]:
    """Of the two heads, and of one layer's matrices or the adapters beside them."""
    if step.finetuning.adapters:  # half of the tables that train are heads
        heads = counts.tables // 2
        layer = counts.adapters // config.layers
    else:
        heads = config.width * (config.text_vocab + config.code_vocab)
        layer = config.width**2 * sum(MATRICES.values())
    return heads * FP32_BYTES, layer * FP32_BYTES


def _optimizer_bytes(counts: Counts, step: Step) -> int:
    """AdamW has two moments of each number, Muon one."""
    muon = FP32_BYTES * (counts.trained - sum(counts.adamw_sizes))
    if step.eight_bit:
        return muon + sum(map(state_bytes, counts.adamw_sizes))
    return muon + 2 * FP32_BYTES * sum(counts.adamw_sizes)


def _update_bytes(config: GPTConfig, step: Step, counts: Counts) -> int:
    """Working copies of what the optimizer updates at once."""
    if step.eight_bit:
        adamw = EIGHT_BIT_CPU_BYTES * counts.largest if step.device == "cpu" else 0
    elif step.fused:
        adamw = 0
    elif step.device == "cuda":  # torch's default there (foreach) takes all tensors at once
        adamw = FP32_BYTES * sum(counts.adamw_sizes)
    else:
        adamw = 2 * FP32_BYTES * counts.largest
    if step.optimizer == "adamw":
        return adamw
    rank = step.finetuning.lora.rank if step.finetuning.adapters else config.width
    matrix = 4 * config.width * rank
    stack = max(matrix, min(TOGETHER, config.layers * matrix))
    return max(adamw, stack * (MUON_HALF_BYTES if step.half else MUON_FP32_BYTES))


def _rounded_entries(config: GPTConfig, step: Step) -> int:
    """Entries of a layer's frozen matrices that are kept in half precision: `round_frozen`."""
    if not step.half or not step.finetuning.rounds_frozen:
        return 0
    return config.width**2 * sum(MATRICES[target] for target in step.finetuning.lora.targets)


def _copy_bytes(config: GPTConfig, step: Step, layers: int) -> int:
    """Autocast's copies of the matrices of `layers` layers, the heads and the conditioner."""
    if not step.half:
        return 0
    layer = config.width**2 * sum(MATRICES.values())
    heads = config.width * (config.text_vocab + config.code_vocab)
    if step.finetuning.adapters:
        layer -= _rounded_entries(config, step)
        adapters = count_trained(config, step.finetuning).adapters
        return HALF_BYTES * (heads + layers * layer + adapters)
    tables = heads + config.width * (config.max_text + config.max_code)  # looked up: no matmul
    others = count_parameters(config) - tables - config.layers * layer
    return HALF_BYTES * (others + layers * layer)


def _length(config: GPTConfig, step: Step) -> int:
    """S: latents, START text STOP, START codes STOP..., and padding."""
    own = step.text_ids + 2 + step.codes + config.stop_targets
    return config.latents + max(own, step.length)


def _tokens(config: GPTConfig, step: Step) -> int:
    """B * S."""
    return step.rows * _length(config, step)


def _layer_bytes(config: GPTConfig, step: Step) -> int:
    """What one layer of the trunk keeps.

    Two norms keep their inputs (D each, fp32), matrices theirs (D, D, D, 4D), GELU its input (4D),
    attention q, k, v (3D) and, written out, its scores. A frozen matrix does not need its input; an
    adapter beside it does, after its own dropout, and keeps `rank` numbers a token.
    """
    lora = step.finetuning.lora if step.finetuning.adapters else None
    explicit = _explicit_attention(config, step)
    token = 2 * config.width * FP32_BYTES  # bytes a token: the norms
    token += 4 * config.width * step.number_bytes  # GELU
    token += 3 * config.width * _attention_number_bytes(config, step)  # q, k, v
    if config.dropout:
        token += 2 * config.width * step.mask_bytes
    for name, widths in INPUT_WIDTHS.items():
        trains = lora is None or name in lora.targets
        # Fused attention keeps its result, which is c_proj's input, in any case.
        if trains or (name == "attn.c_proj" and not explicit):
            token += widths * config.width * step.number_bytes
        if lora and name in lora.targets:
            token += lora.rank * step.number_bytes
            if lora.dropout:
                token += widths * config.width * step.mask_bytes
    scores = _score_bytes(config, step) if explicit else 0
    return _tokens(config, step) * token + scores


def _attention_falls_back(config: GPTConfig, step: Step) -> bool:
    """On a CPU fused attention has no dropout: PyTorch then writes it out in fp32."""
    return step.sdpa and config.dropout > 0 and step.device == "cpu"


def _explicit_attention(config: GPTConfig, step: Step) -> bool:
    return not step.sdpa or _attention_falls_back(config, step)


def _attention_number_bytes(config: GPTConfig, step: Step) -> int:
    return FP32_BYTES if _attention_falls_back(config, step) else step.number_bytes


def _scores(config: GPTConfig, step: Step) -> int:
    """B * H * S * S."""
    return _tokens(config, step) * config.heads * _length(config, step)


def _score_bytes(config: GPTConfig, step: Step) -> int:
    """What the explicit softmax keeps: its fp32 result, and a rounded or masked copy for v."""
    number_bytes = _attention_number_bytes(config, step)
    score = FP32_BYTES
    if step.half or config.dropout:
        score += number_bytes
    if config.dropout:
        score += 1 if step.device == "cuda" else number_bytes
    return _scores(config, step) * score


def _backward_bytes(config: GPTConfig, step: Step) -> int:
    """Gradients inside one layer beside what it has kept: in its MLP, or in its softmax.

    The MLP holds the residual's gradient (and its half-precision copy) and 4D of GELU. The explicit
    softmax holds two score gradients when the MLP's activations are gone.
    """
    wide = _tokens(config, step) * config.width
    mlp = wide * (FP32_BYTES + (HALF_BYTES if step.half else 0) + 4 * step.number_bytes)
    lora = step.finetuning.lora
    if step.finetuning.adapters and {"mlp.c_fc", "mlp.c_proj"} & {*lora.targets}:
        mlp += wide * 4 * step.number_bytes  # the adapter's own gradient
    if not _explicit_attention(config, step):
        return mlp
    scores = 2 * FP32_BYTES * _scores(config, step) - 9 * wide * step.number_bytes
    if step.half or config.dropout:
        scores -= _scores(config, step) * _attention_number_bytes(config, step)
    return max(mlp, scores)


def _guide_bytes(config: GPTConfig, step: Step) -> int:
    """What guided attention keeps: a normed input, q, k, v, and one head's fp32 scores."""
    if not step.guided:
        return 0
    scores = (_length(config, step) + step.text_ids + 2) * FP32_BYTES
    return _tokens(config, step) * (4 * config.width * step.number_bytes + scores)


def _conditioner_bytes(config: GPTConfig, step: Step) -> int:
    """The reference's blocks (8 D a frame, and T x T scores) and the latents' layers."""
    if step.finetuning.adapters:  # frozen: no gradient goes through it
        return 0
    frames = step.rows * step.reference_frames
    latents = step.rows * config.latents
    scores = frames * config.heads * step.reference_frames * FP32_BYTES
    block = frames * config.width * (2 * FP32_BYTES + 6 * step.number_bytes) + scores
    inner = config.perceiver_heads * config.perceiver_head_width
    hidden = config.width * 8 // 3
    layer = (frames + latents) * (config.width + 2 * inner)
    layer += latents * (2 * config.width + 2 * inner + 4 * hidden)
    return config.cond_blocks * block + config.perceiver_layers * layer * step.number_bytes


def _head_bytes(config: GPTConfig, step: Step) -> int:
    """Two final norms' inputs, and the states that have a target."""
    targets = step.rows * (step.text_ids + 1 + step.codes + config.stop_targets)
    norms = 2 * _tokens(config, step) * config.width * FP32_BYTES
    return norms + targets * config.width * step.number_bytes
