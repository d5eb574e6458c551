"""How much memory a configuration needs, by part, before anything is allocated.

Weights, gradients, optimizer moments and averages are counted exactly from the configuration;
activations are an estimate from the shapes a layer keeps for its backward pass. Knows the model's
configuration; allocates nothing (the parameter count is taken on torch's `meta` device).

Shapes: B batch, S sequence, D width, H heads, V vocabulary.
"""

import torch

from kit.model import GPTConfig, SpeechGPT

FP32_BYTES = 4


def parameter_count(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in SpeechGPT(config).parameters())


def plan_bytes(
    config: GPTConfig,
    batch: int,
    length: int,
    *,
    ema: bool,
    half: bool,
    sdpa: bool,
    checkpointing: bool,
) -> dict[str, int]:
    """Bytes by part for `batch` rows of `length` tokens, AdamW, fp32 weights."""
    weights = parameter_count(config) * FP32_BYTES
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "EMA": weights if ema else 0,
        "activations": activation_bytes(config, batch, length, half, sdpa, checkpointing),
    }


def activation_bytes(
    config: GPTConfig, batch: int, length: int, half: bool, sdpa: bool, checkpointing: bool
) -> int:
    """What the backward pass needs of `batch` rows (B) of `length` tokens (S), estimated."""
    tokens, size = batch * (length + config.latents), 2 if half else 4
    # A layer keeps two norm inputs in fp32 (8 D), q k v, attention output, and both sides of GELU.
    layer = tokens * config.width * (8 + (3 + 1 + 1 + 4 + 4) * size)
    if not sdpa:  # scores before and after the softmax: B * H * S * S each
        layer += 2 * batch * config.heads * (length + config.latents) ** 2 * 4
    layers = config.layers * layer
    if checkpointing:  # only each layer's input, and one layer at a time in full
        layers = config.layers * tokens * config.width * 4 + layer
    logits = 2 * batch * length * max(config.code_vocab, config.text_vocab) * 4
    return layers + logits
