"""How much memory a training step needs, by part and at its worst moment, before it is allocated.

Weights, gradients, moments and averages are counted from the configuration; activations by what
each operation of the model keeps for its backward pass. Not all parts are there at once: a step is
followed through its five fullest moments, and the fullest of them is the peak. torch.compile is
left out: it fuses operations and keeps less. Where adapters train, what is frozen has neither
gradient nor moments, and nothing is kept of the voice's encoding. Knows the model's configuration;
allocates nothing (parameters are counted on torch's `meta` device), and knows nothing of devices'
sizes.

Shapes: B batch, S packed sequence with its latents, D width, H heads, K latents, T mel frames,
V vocabulary.
"""

import dataclasses
import functools

import torch

from kit.base.config import require
from kit.model.gpt import SpeechGPT
from kit.model.lora import TARGETS, is_adapter
from kit.model.sequence import GPTConfig
from kit.training.adam8bit import state_bytes
from kit.training.config import TrainConfig
from kit.training.optim import TOGETHER, make_optimizers
from kit.training.trainable import FULL, Finetuning, Trainable

FP32_BYTES = 4
HALF_BYTES = 2
# Of Muon's working copies per entry of a stack of matrices: the update, two of its products'
# operands, Gram matrices.
MUON_FP32_BYTES = 17
MUON_HALF_BYTES = 10
# Of 8-bit AdamW's per entry of a parameter, on a CPU alone: both moments in fp32, the gradient, the
# root of the second moment before and after it is divided.
EIGHT_BIT_CPU_BYTES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One training step, as far as memory is concerned."""

    rows: int  # of a forward pass: the micro-batch
    text_ids: int  # of the longest row, without START and STOP
    codes: int  # of the longest row, without START and STOP
    reference_frames: int  # mel frames
    length: int = 0  # tokens each row is padded to; 0: to the longest row
    half: bool = False  # bf16 or fp16 products; weights that train stay fp32
    sdpa: bool = False  # fused attention; else the explicit softmax
    recompute_every: int = 0  # every n-th layer is recomputed in the backward pass; 0: none
    ema: bool = False  # averaged weights on the same device
    optimizer: str = "adamw"  # or "muon": for the trunk's matrices
    fused: bool = False  # one kernel for the optimiser step, with no working copies
    eight_bit: bool = False  # AdamW's moments, in place of fp32
    accumulate: bool = False  # more than one forward pass per optimiser step
    guided: bool = False  # guided attention, as it is in the first steps
    device: str = "cuda"  # or "cpu", where dropout keeps whole numbers instead of bits
    finetuning: Finetuning = FULL  # what trains; its first phase never takes most

    def __post_init__(self):
        for name in ("rows", "text_ids", "codes", "reference_frames"):
            require(getattr(self, name) > 0, self, name, "must be at least 1.")
        require(self.optimizer in ("adamw", "muon"), self, "optimizer", "choose adamw or muon.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by part, each at its largest, and bytes alive together at each of the moments."""

    parts: dict[str, int]
    moments: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.moments.values())

    @property
    def fullest(self) -> str:
        """The moment of the peak, in words."""
        return max(self.moments, key=self.moments.get)


@functools.cache
def count_parameters(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in SpeechGPT(config).parameters())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a model that `finetuning` says what to train of."""

    learning: int  # that training moves
    weights: int  # adapters included
    trained: int  # in tensors that have gradients and moments
    adapters: int  # in all adapters
    tables: int  # in tables that train
    largest: int  # in the largest tensor that trains


@functools.cache
def count_trained(config: GPTConfig, finetuning: Finetuning) -> Counts:
    with torch.device("meta"):
        model = SpeechGPT(config)
        trainable = Trainable(model, finetuning.without_phases())
    sizes = {name: p.numel() for name, p in trainable.parameters.items()}
    return Counts(
        learning=trainable.count,
        weights=sum(p.numel() for p in model.parameters()),
        trained=sum(sizes.values()),
        adapters=sum(size for name, size in sizes.items() if is_adapter(name)),
        tables=sum(sizes[name] for name in trainable.first_rows),
        largest=max(sizes.values()),
    )


def plan_bytes(config: GPTConfig, step: Step) -> MemoryPlan:
    """What a step needs once its optimizer has its moments, that is from the second step on."""
    numbers = count_trained(config, step.finetuning)
    weights = numbers.weights * FP32_BYTES
    weights -= (FP32_BYTES - HALF_BYTES) * config.layers * rounded_matrices(config, step)
    trained = numbers.trained * FP32_BYTES
    parts = {
        "weights": weights,
        "gradients": trained,
        "optimizer": optimizer_bytes(config, step),
        "EMA": trained if step.ema else 0,
        "half-precision copies": copy_bytes(config, step, config.layers),
        "activations": activation_bytes(config, step),
        "logits": 2 * sum(logits_bytes(config, step)),
    }
    steady = parts["weights"] + parts["optimizer"] + parts["EMA"]
    found = {
        "the end of the forward pass": forward_end_bytes(config, step),
        "the backward pass through the logits": logits_backward_bytes(config, step),
        "the backward pass through the top layer": top_backward_bytes(config, step),
        "the backward pass through the bottom layer": bottom_backward_bytes(config, step),
        "the optimizer's update": trained + update_bytes(config, step),
    }
    return MemoryPlan(parts=parts, moments={name: steady + size for name, size in found.items()})


def optimizer_bytes(config: GPTConfig, step: Step) -> int:
    """AdamW's two moments of what trains, and Muon's one of the trunk's matrices."""
    trunk = config.layers * layer_trained(config, step) if step.optimizer == "muon" else 0
    if not step.eight_bit:
        return FP32_BYTES * (2 * count_trained(config, step.finetuning).trained - trunk)
    sizes = adamw_sizes(config, step.optimizer, step.finetuning)
    return sum(map(state_bytes, sizes)) + FP32_BYTES * trunk


@functools.cache
def adamw_sizes(config: GPTConfig, optimizer: str, finetuning: Finetuning) -> tuple[int, ...]:
    """Entries of each parameter that AdamW updates: of all, or with Muon of what it leaves."""
    with torch.device("meta"):
        model = SpeechGPT(config)
        Trainable(model, finetuning.without_phases())
        made = make_optimizers(model, TrainConfig(optimizer=optimizer), fused=False)
    return tuple(p.numel() for group in made[0].param_groups for p in group["params"])


def forward_end_bytes(config: GPTConfig, step: Step) -> int:
    """All activations, all copies autocast keeps, logits and their log-softmax."""
    # A copy of what is frozen is not remembered beyond its product: see `copy_bytes`.
    forgotten = len(recomputed(config, step)) if step.finetuning.adapters else 0
    copies = copy_bytes(config, step, config.layers - forgotten)
    logits = 2 * sum(logits_bytes(config, step))
    kept = activation_bytes(config, step) + input_bytes(config, step)  # the heads' states besides
    return earlier_bytes(config, step) + kept + copies + logits


def logits_backward_bytes(config: GPTConfig, step: Step) -> int:
    """The codes' log-softmax with the gradients before and behind it; the text's still waits."""
    text, code = logits_bytes(config, step)
    copies = copy_bytes(config, step, config.layers - len(recomputed(config, step)))
    kept = activation_bytes(config, step) + copies + text + 3 * code
    return earlier_bytes(config, step) + kept


def top_backward_bytes(config: GPTConfig, step: Step) -> int:
    """The heads have their gradients; the layers still have all their activations."""
    gradients = max(earlier_bytes(config, step), FP32_BYTES * head_trained(config, step))
    copies = copy_bytes(config, step, config.layers - len(recomputed(config, step)))
    kept = activation_bytes(config, step) - head_bytes(config, step) + copies
    if config.layers - 1 in recomputed(config, step):
        kept += layer_bytes(config, step) - input_bytes(config, step)
    return gradients + kept + backward_bytes(config, step)


def bottom_backward_bytes(config: GPTConfig, step: Step) -> int:
    """All layers but the first have their gradients; its activations and the voice's are left."""
    above = head_trained(config, step) + (config.layers - 1) * layer_trained(config, step)
    gradients = max(earlier_bytes(config, step), FP32_BYTES * above)
    kept = layer_bytes(config, step) + conditioner_bytes(config, step) + copy_bytes(config, step, 1)
    return gradients + kept + backward_bytes(config, step)


def update_bytes(config: GPTConfig, step: Step) -> int:
    """Working copies of the largest matrix that is updated on its own; with Muon, of a stack."""
    matrix = 4 * config.width**2
    if step.finetuning.adapters:
        matrix = 4 * config.width * step.finetuning.lora.rank
    stack = max(matrix, min(TOGETHER, config.layers * matrix))
    muon = stack * (MUON_HALF_BYTES if step.half else MUON_FP32_BYTES)
    largest = count_trained(config, step.finetuning).largest
    adamw = 0 if step.fused else 2 * FP32_BYTES * largest
    if step.device == "cuda" and not step.fused:  # torch's default there takes all at once
        adamw = FP32_BYTES * sum(adamw_sizes(config, step.optimizer, step.finetuning))
    if step.eight_bit:
        adamw = EIGHT_BIT_CPU_BYTES * largest if step.device == "cpu" else 0
    return max(adamw, muon if step.optimizer == "muon" else 0)


def earlier_bytes(config: GPTConfig, step: Step) -> int:
    """Gradients that the forward pass before this one has left."""
    return count_trained(config, step.finetuning).trained * FP32_BYTES if step.accumulate else 0


def recomputed(config: GPTConfig, step: Step) -> range:
    """The layers that keep nothing but their input."""
    return range(0, config.layers if step.recompute_every else 0, step.recompute_every or 1)


def length(config: GPTConfig, step: Step) -> int:
    """S: latents, START text STOP, START codes STOP..., and padding."""
    own = step.text_ids + 2 + step.codes + config.stop_targets
    return config.latents + max(own, step.length)


def grid_cells(config: GPTConfig, step: Step) -> int:
    """B * S."""
    return step.rows * length(config, step)


def layer_matrices(config: GPTConfig) -> int:
    """Entries of a layer's four matrices: D x 3D, D x D, D x 4D, 4D x D."""
    return 12 * config.width**2


def head_matrices(config: GPTConfig) -> int:
    return config.width * (config.text_vocab + config.code_vocab)


def layer_trained(config: GPTConfig, step: Step) -> int:
    """Entries of a layer's matrices that have gradients: its own, or those of its adapters."""
    if step.finetuning.adapters:
        return count_trained(config, step.finetuning).adapters // config.layers
    return layer_matrices(config)


def head_trained(config: GPTConfig, step: Step) -> int:
    """Entries of heads that have gradients: half of the tables' that train, for each has one."""
    if step.finetuning.adapters:
        return count_trained(config, step.finetuning).tables // 2
    return head_matrices(config)


def copy_bytes(config: GPTConfig, step: Step, layers: int) -> int:
    """Half-precision copies of the matrices: `layers` layers', the heads' and the conditioner's.

    Autocast remembers copies of what trains to the end of the pass. Those of what is frozen live as
    long as the backward pass needs them: in layers that keep their activations, none for a voice's
    encoding.
    """
    if not step.half:
        return 0
    if step.finetuning.adapters:
        adapters = count_trained(config, step.finetuning).adapters
        copied = layer_matrices(config) - rounded_matrices(config, step)
        return HALF_BYTES * (head_matrices(config) + layers * copied + adapters)
    tables = head_matrices(config) + config.width * (config.max_text + config.max_code)
    other = count_parameters(config) - tables - config.layers * layer_matrices(config)
    return HALF_BYTES * (other + layers * layer_matrices(config))


def rounded_matrices(config: GPTConfig, step: Step) -> int:
    """Entries of a layer's frozen matrices that are held in half precision: `round_frozen`."""
    if not step.half or not step.finetuning.rounds_frozen:
        return 0
    squares = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4, "mlp.c_proj": 4}  # of D x D
    return config.width**2 * sum(squares[target] for target in step.finetuning.lora.targets)


def activation_bytes(config: GPTConfig, step: Step) -> int:
    """What all operations but the losses keep for the backward pass."""
    few = len(recomputed(config, step))
    layers = (config.layers - few) * layer_bytes(config, step) + few * input_bytes(config, step)
    beside = conditioner_bytes(config, step) + head_bytes(config, step)
    return layers + beside + guide_bytes(config, step)


def guide_bytes(config: GPTConfig, step: Step) -> int:
    """What guided attention keeps: its layer's normed input, q, k, v, and one head's fp32 scores.

    The scores once of all that comes before (S), and once of the text.
    """
    if not step.guided:
        return 0
    scores = (length(config, step) + step.text_ids + 2) * FP32_BYTES
    return grid_cells(config, step) * (4 * config.width * size_bytes(step) + scores)


def input_bytes(config: GPTConfig, step: Step) -> int:
    """The residual stream (B, S, D), in fp32 with mixed precision, too."""
    return grid_cells(config, step) * config.width * FP32_BYTES


def layer_bytes(config: GPTConfig, step: Step) -> int:
    """One layer of the trunk.

    Two norms keep their inputs (D each, fp32). The matrices keep theirs (D, D, D, 4D), GELU its
    input (4D), attention q, k, v (3D): 14 D a token in the precision of the products.
    """
    wide = grid_cells(config, step) * config.width
    kept = wide * (2 * FP32_BYTES + 11 * size_bytes(step) + 3 * attention_size_bytes(config, step))
    masks = 2 * wide * mask_bytes(step) if config.dropout else 0
    return kept + scores_bytes(config, step) + masks + adapter_bytes(config, step)


def adapter_bytes(config: GPTConfig, step: Step) -> int:
    """What a layer keeps more with adapters than it does where its matrices train, or less.

    A frozen matrix needs not what went into it; an adapter beside it does, after its own dropout,
    and its `rank` numbers a token.
    """
    if not step.finetuning.adapters:
        return 0
    lora = step.finetuning.lora
    cells = grid_cells(config, step)
    found = 0
    for target in TARGETS:
        width = 4 * config.width if target == "mlp.c_proj" else config.width
        if target in lora.targets:
            found += cells * lora.rank * size_bytes(step)
            found += cells * width * mask_bytes(step) if lora.dropout else 0
        elif target != "attn.c_proj" or explicit(config, step):  # fused attention keeps its result
            found -= cells * width * size_bytes(step)
    return found


def falls_back(config: GPTConfig, step: Step) -> bool:
    """On a CPU fused attention has no dropout: with it PyTorch writes it out in fp32 instead."""
    return step.sdpa and config.dropout > 0 and step.device == "cpu"


def attention_size_bytes(config: GPTConfig, step: Step) -> int:
    """One number inside the attention."""
    return FP32_BYTES if falls_back(config, step) else size_bytes(step)


def explicit(config: GPTConfig, step: Step) -> bool:
    return not step.sdpa or falls_back(config, step)


def scores_bytes(config: GPTConfig, step: Step) -> int:
    """What the explicit softmax keeps, (B, H, S, S) each; nothing with fused attention."""
    if not explicit(config, step):
        return 0
    mask = 0
    if config.dropout:
        mask = 1 if step.device == "cuda" else attention_size_bytes(config, step)
    return squares(config, step) * (FP32_BYTES + mask) + weights_bytes(config, step)


def weights_bytes(config: GPTConfig, step: Step) -> int:
    """What is multiplied with v, where that is not the softmax itself: rounded, or with gaps."""
    apart = step.half or config.dropout
    return squares(config, step) * attention_size_bytes(config, step) if apart else 0


def squares(config: GPTConfig, step: Step) -> int:
    """B * H * S * S."""
    return grid_cells(config, step) * config.heads * length(config, step)


def size_bytes(step: Step) -> int:
    """One number of the matrix products."""
    return HALF_BYTES if step.half else FP32_BYTES


def mask_bytes(step: Step) -> int:
    """What dropout keeps for one number: a flag on CUDA, a whole factor on a CPU."""
    return size_bytes(step) if step.device == "cpu" else 1


def conditioner_bytes(config: GPTConfig, step: Step) -> int:
    """The reference's blocks (8 D a frame, and T x T scores) and the latents' layers.

    Nothing where they are frozen: no gradient goes through them.
    """
    if step.finetuning.adapters:
        return 0
    frames = step.rows * step.reference_frames
    latents = step.rows * config.latents
    scores = frames * config.heads * step.reference_frames * FP32_BYTES
    block = frames * config.width * (2 * FP32_BYTES + 6 * size_bytes(step)) + scores
    inner = config.perceiver_heads * config.perceiver_head_width
    hidden = config.width * 8 // 3
    seen = (frames + latents) * (config.width + 2 * inner)
    layer = seen + latents * (2 * config.width + 2 * inner + 4 * hidden)
    return config.cond_blocks * block + config.perceiver_layers * layer * size_bytes(step)


def head_bytes(config: GPTConfig, step: Step) -> int:
    """Two final norms' inputs, and the states that have a target."""
    chosen = step.text_ids + 1 + step.codes + config.stop_targets
    chosen *= step.rows * config.width * size_bytes(step)
    return 2 * input_bytes(config, step) + chosen


def logits_bytes(config: GPTConfig, step: Step) -> tuple[int, int]:
    """fp32 logits of all (text, code) targets: (targets, V)."""
    text = step.rows * (step.text_ids + 1) * config.text_vocab
    code = step.rows * (step.codes + config.stop_targets) * config.code_vocab
    return text * FP32_BYTES, code * FP32_BYTES


def backward_bytes(config: GPTConfig, step: Step) -> int:
    """Gradients inside one layer, beside what it has kept: in its MLP, or in its softmax.

    The MLP's backward holds the residual's gradient (and its half-precision copy) and 4D of GELU.
    The explicit softmax's holds two score gradients when the MLP's activations are gone.
    """
    wide = grid_cells(config, step) * config.width
    size = size_bytes(step)
    mlp = wide * (FP32_BYTES + (HALF_BYTES if step.half else 0) + 4 * size)
    if step.finetuning.adapters and {"mlp.c_fc", "mlp.c_proj"} & {*step.finetuning.lora.targets}:
        mlp += wide * 4 * size  # what a matrix gives back or is given, and its adapter
    if not explicit(config, step):
        return mlp
    gone = weights_bytes(config, step) + 9 * wide * size
    return max(mlp, 2 * FP32_BYTES * squares(config, step) - gone)
