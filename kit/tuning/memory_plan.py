"""Plan the memory of a training step on paper, by part and at its peak.

Weights, gradients, moments and averages are counted (parameters on torch's `meta` device). What the
forward pass keeps for the backward pass is a formula, within some 15 % of a real step, which
preflight.py measures. torch.compile is left out: it fuses operations and keeps less.

Shapes: B batch, S packed sequence with its latents, D width, H heads.
"""

import dataclasses
import functools
import importlib.util

import torch
from torch import nn

from kit.base.config import Section, within
from kit.base.hardware import Hardware, is_here, prefers_explicit_attention
from kit.batches.batching import padded
from kit.model.gpt import SpeechGPT
from kit.model.lora import is_adapter
from kit.settings import DataConfig, GPTConfig, SpeedConfig, TrainConfig
from kit.training.config import FULL, Finetuning
from kit.training.optim import eight_bit_adamw, eight_bit_bytes
from kit.training.trainable import Trainable

FP32_BYTES = 4
HALF_BYTES = 2
# Inputs and outputs of a layer's matrices, in D.
MATRICES = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
LAYER_MATRICES = 12  # their numbers, in D x D
# Of the released IndexTTS2: `GPTConfig.conformers`, and the numbers in its conditioner.
RELEASED_CONFORMERS = (512, 2048, 8, 6, 2, 512, 1024, 4, 4, 2)
RELEASED_CONDITIONER = 338_899_964


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(Section):
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
    # Share of the device's memory that the run may use.
    max_memory_fraction: float = within(0.9, 1e-9, 1)

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
        return self.data.micro_batch

    @property
    def half(self) -> bool:
        """Whether matmuls are in bf16 or fp16; weights that train stay fp32."""
        return self.speed.mixed_precision and self.precision != "fp32"

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay from one pass to the next: of a batch, or in CUDA graphs."""
        graphs = self.speed.cuda_graphs and self.hw.device == "cuda"
        return self.data.grad_accum > 1 or graphs

    @property
    def planned_bytes(self) -> int:
        """The peak of a step."""
        return plan_memory(self)[1]

    def with_rows(self, micro_batch: int) -> "Workload":
        """The same effective batch in passes of `micro_batch` rows."""
        data = dataclasses.replace(self.data, micro_batch=micro_batch)
        return dataclasses.replace(self, data=data)


def has_8bit_adamw(hw: Hardware) -> bool:
    """Whether 8-bit AdamW runs on `hw`; on a GPU elsewhere its package can be installed."""
    elsewhere = hw.device == "cuda" and not is_here(hw)
    return elsewhere or eight_bit_adamw(hw, tried=True).value == "yes"


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


@functools.cache
def trainable_of(config: GPTConfig, finetuning: Finetuning) -> Trainable:
    """What `finetuning` trains of a model, its parameters without memory."""
    model = empty_model(config)
    with torch.device("meta"):
        return Trainable(model, finetuning)


def count_trained(config: GPTConfig, finetuning: Finetuning) -> int:
    """Count the numbers in tensors that have gradients and moments."""
    return sum(p.numel() for p in trainable_of(config, finetuning).parameters.values())


def moment_bytes(work: Workload) -> int:
    """Bytes of the optimizers' state: AdamW has two moments of each number, Muon one."""
    eight_bit = work.speed.adamw_8bit and has_8bit_adamw(work.hw)
    total = 0
    for name, parameter in trainable_of(work.model, work.finetuning).parameters.items():
        numbers = parameter.numel()
        if work.train.optimizer == "muon" and name.startswith("gpt.") and parameter.ndim == 2:
            total += FP32_BYTES * numbers
        else:
            total += eight_bit_bytes(numbers) if eight_bit else 2 * FP32_BYTES * numbers
    return total


def half_bytes(work: Workload, numbers: int) -> tuple[int, int]:
    """Bytes that frozen matrices save in half precision, and that autocast's copies take."""
    if not work.half:
        return 0, 0
    finetuning = work.finetuning
    squares = work.model.layers * work.model.width**2
    rounded = 0
    if finetuning.rounds_frozen:
        adapted = [MATRICES[name] for name in finetuning.lora.targets]
        rounded = squares * sum(inputs * outputs for inputs, outputs in adapted)
    copied = LAYER_MATRICES * squares if finetuning.adapters else numbers
    return HALF_BYTES * rounded, HALF_BYTES * (copied - rounded)


def plan_memory(work: Workload) -> tuple[dict[str, int], int]:
    """Plan a step once the optimizer has its moments, that is from the second step on.

    Returns the bytes of each part at its largest, and the peak: parts are not all there at once.
    """
    config = work.model
    speed = work.speed
    on_cuda = work.hw.device == "cuda"
    trainable = trainable_of(config, work.finetuning)
    adapters = (p.numel() for name, p in trainable.parameters.items() if is_adapter(name))
    numbers = count_parameters(config) + sum(adapters)
    gradients = FP32_BYTES * count_trained(config, work.finetuning)
    saved, copies = half_bytes(work, numbers)

    layer, backward, others = kept_bytes(work)
    conditioner = conditioner_bytes(work)
    residual = FP32_BYTES * work.rows * (config.latents + work.length) * config.width
    recomputed = 0
    if speed.gradient_checkpointing:
        recomputed = len(range(0, config.layers, speed.recompute_every))
    kept = config.layers - recomputed
    text_logits = FP32_BYTES * work.rows * (work.longest_text + 1) * config.text_vocab
    codes = work.longest_codes + config.stop_targets
    code_logits = FP32_BYTES * work.rows * codes * config.code_vocab
    averaged = speed.ema and not (speed.ema_offload and on_cuda)
    parts = {
        "weights": FP32_BYTES * numbers - saved,
        "gradients": gradients,
        "optimizer": moment_bytes(work),
        "EMA": gradients if averaged else 0,
        "half-precision copies": copies,
        "activations": kept * layer + recomputed * residual + conditioner + others,
        # With their log-softmax; the codes' have a gradient while the text's wait.
        "logits": 2 * text_logits + 3 * code_logits,
    }
    # The peak is where the backward pass begins, or where it ends and the update follows. AdamW
    # that is not fused updates all tensors at once on CUDA (torch's foreach), each with a copy.
    in_layer = copies * kept // config.layers + backward + (layer if recomputed else 0)
    begins = parts["activations"] + max(copies + parts["logits"], in_layer)
    if work.accumulates:
        begins += gradients
    ends = conditioner + max(layer + backward, conditioner // 2)
    if on_cuda and not (speed.fused_adamw or speed.adamw_8bit):
        ends = max(ends, gradients)
    steady = parts["weights"] + parts["optimizer"] + parts["EMA"]
    return parts, steady + max(begins, gradients + ends)


def kept_bytes(work: Workload) -> tuple[int, int, int]:
    """Bytes that the forward pass keeps: in a layer, for its gradients on top, after the layers."""
    config = work.model
    number = HALF_BYTES if work.half else FP32_BYTES  # bytes, in the matmuls
    length = config.latents + work.length  # S
    wide = work.rows * length * config.width  # B * S * D
    # On a CPU fused attention has no dropout: PyTorch then writes it out.
    on_cpu = work.hw.device == "cpu"
    dtype = torch.bfloat16 if work.half else torch.float32
    explicit = not work.speed.sdpa or (on_cpu and config.dropout > 0)
    explicit = explicit or prefers_explicit_attention(work.hw.device, dtype, length, config.dropout)
    scores = work.rows * config.heads * length**2 if explicit else 0  # B * H * S * S

    # The inputs of two norms, of GELU (4 D), and q, k, v (3 D); then the inputs of the matrices: a
    # frozen one does not need its own, an adapter beside it does.
    targets = work.finetuning.lora.targets if work.finetuning.adapters else MATRICES
    inputs = sum(MATRICES[name][0] for name in targets)
    layer = wide * (2 * FP32_BYTES + (7 + inputs) * number) + scores * FP32_BYTES
    if config.dropout:  # its mask, and a copy of the weights for v
        mask = number if on_cpu else 1
        layer += mask * (2 * wide + scores) + number * scores
    elif work.half:
        layer += number * scores
    # The residual's gradient and GELU's (4 D); or two gradients of the scores, when what the MLP
    # kept is gone.
    backward = wide * (FP32_BYTES + 5 * number)
    backward = max(backward, 2 * FP32_BYTES * scores - 9 * wide * number)
    return layer, backward, wide * (2 * FP32_BYTES + number)  # of two norms and the heads


def conditioner_bytes(work: Workload) -> int:
    """Bytes that the conditioner keeps for its backward pass; 0 where it is frozen."""
    config = work.model
    number = HALF_BYTES if work.half else FP32_BYTES
    frames = work.data.reference_frames
    if work.finetuning.adapters:
        return 0
    if not config.conformers:  # the perceiver counts as further blocks
        block = config.width * (2 * FP32_BYTES + 6 * number) + FP32_BYTES * config.heads * frames
        return (config.cond_blocks + config.perceiver_layers) * work.rows * frames * block
    frames = (frames - 1) // 2  # after a convolution in steps of 2, whose result is kept
    frame = 0
    for width, hidden, heads, blocks, _ in (config.conformers[:5], config.conformers[5:]):
        # Norms and residuals, attention's and the convolution's inputs, feed-forward, scores.
        block = width * (5 * FP32_BYTES + 16 * number) + 2 * hidden * number
        block += 3 * FP32_BYTES * heads * frames
        frame += blocks * block + width * (config.n_mels // 2) * number
    return work.rows * frames * frame
