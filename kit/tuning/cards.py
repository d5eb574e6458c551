"""GPUs by name, and how long a training step should take on one: nothing is measured.

A step is its floating-point operations (6 for each weight and token, a third of them in the forward
pass) at a share of what the card reaches in large matrix products, then the update, which reads and
writes memory. Checked with two steps of XTTS-v2's size on an H200: 100 ms and 156 ms.
"""

import functools
import re

from kit.base.config import CONFIGS, read_yaml
from kit.base.errors import KitError
from kit.base.hardware import Hardware, format_capability, why_too_old
from kit.settings import GPTConfig
from kit.tuning.memory_plan import LAYER_MATRICES, Workload, count_trained

CARDS = CONFIGS / "advice" / "cards.yaml"
USED_SHARE = 0.38  # of the matrix products' rate: what a step of 32 rows reached on that H200
LAYER_S = 0.0033  # a layer's forward and backward pass at least: its 8 rows waited for launches
UPDATE_BYTES = 52  # for each number that trains: fused AdamW 28, norm and clipping 12, average 12


@functools.cache
def known_cards() -> dict[str, dict]:
    return read_yaml(CARDS)["cards"]


def find_card(text: str) -> Hardware:
    """The GPU of this name, or of this memory and compute capability: "T4", "16 GiB, 7.5".

    Raises KitError for anything else.
    """
    names = {short_name(name): name for name in known_cards()}
    name = names.get(short_name(text)) or names.get(f"rtx{short_name(text)}")
    numbers = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*gi?b?\s*,\s*(\d+)\.(\d)\s*", text.lower())
    if name:
        card = known_cards()[name]
        gib, capability = card["gib"], tuple(card["capability"])
    elif numbers and float(numbers[1]):
        gib, capability = float(numbers[1]), (int(numbers[2]), int(numbers[3]))
        name = f"GPU of {gib:g} GiB, {format_capability(capability)}"
    else:
        raise KitError(
            f'--gpu {text!r}: write memory and compute capability, such as "16 GiB, 7.5", or one '
            f"of {', '.join(known_cards())}."
        )
    if why_too_old(capability):
        raise KitError(f"--gpu {text!r}: {why_too_old(capability)}.")
    memory_bytes = int(gib * 2**30)
    return Hardware(
        device="cuda",
        name=name,
        cores=1,
        ram_bytes=memory_bytes,
        memory_bytes=memory_bytes,
        capability=capability,
    )


def short_name(text: str) -> str:
    """ "NVIDIA GeForce RTX 3060" -> "rtx3060"."""
    return re.sub(r"nvidia|geforce|tesla|gi?b|[^a-z0-9]", "", text.lower())


def token_flop(model: GPTConfig, length: float) -> float:
    """Floating-point operations of a token in a row of `length`: 6 a weight of layers and head."""
    weights = LAYER_MATRICES * model.layers * model.width**2 + model.code_vocab * model.width
    return 6 * (weights + model.layers * model.width * length)  # causal attention, too


def step_flop(work: Workload, row_tokens: float) -> float:
    """Floating-point operations of an optimiser step of `work`, with rows of `row_tokens`."""
    # Frozen matrices have no gradients, and recomputing is another forward pass.
    passes = 2.0 if work.finetuning.adapters else 3.0
    if work.speed.gradient_checkpointing:
        passes += 1 / work.speed.recompute_every
    tokens = work.data.effective_batch * row_tokens
    return passes / 3 * token_flop(work.model, row_tokens) * tokens


def step_seconds(work: Workload, row_tokens: float) -> float | None:
    """Seconds that an optimiser step of `work` should take; None for an unknown GPU."""
    card = known_cards().get(work.hw.name)
    if card is None:
        return None
    passes = work.data.grad_accum
    compute_s = step_flop(work, row_tokens) / (USED_SHARE * card["tflops"] * 1e12)
    launch_s = passes * work.model.layers * LAYER_S
    trained = count_trained(work.model, work.finetuning)
    return max(compute_s, launch_s) + UPDATE_BYTES * trained / (card["gb_per_s"] * 1e9)
