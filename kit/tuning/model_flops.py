"""How many floating-point operations a training step of the model takes, counted from its sizes.

Products of matrices alone, an addition and a multiplication each, as the tables of other libraries
count them (Chowdhery et al. 2022, appendix B; attention as if it were not causal). Embeddings are
looked up and cost none; norms, softmax and the optimizer's update are left out. What is computed
again (gradient checkpointing) is the device's work, not the model's, and not counted here. Knows
the model's configuration; computes nothing with tensors.

Shapes: S row with its latents, D width, K latents, T mel frames, V vocabulary.
"""

from kit.model.sequence import GPTConfig


def training_flops(
    config: GPTConfig, text_ids: int, codes: int, reference_frames: int, length: int = 0
) -> int:
    """Operations of the forward and backward pass of one row, padded to `length` tokens.

    `text_ids` and `codes` without START and STOP; `length` 0 is the row's own. The backward pass
    takes each product twice, but that with the reference itself, which needs no gradient.
    """
    own = text_ids + 2 + codes + config.stop_targets
    cells = config.latents + max(own, length)
    forward = trunk_flops(config, cells) + head_flops(config, text_ids, codes)
    forward += conditioner_flops(config, reference_frames)
    return 3 * forward - first_flops(config, reference_frames)


def trunk_flops(config: GPTConfig, cells: int) -> int:
    """The layers' four matrices (12 D x D), and scores and sums of the attention (S x S x D)."""
    matrices = 2 * 12 * config.width**2 * cells
    attention = 4 * cells**2 * config.width
    return config.layers * (matrices + attention)


def head_flops(config: GPTConfig, text_ids: int, codes: int) -> int:
    """D x V for every target."""
    text = (text_ids + 1) * config.text_vocab
    code = (codes + config.stop_targets) * config.code_vocab
    return 2 * config.width * (text + code)


def conditioner_flops(config: GPTConfig, frames: int) -> int:
    """Speaker conditioning: attention blocks over the reference, then the latents' layers."""
    block = 2 * 4 * config.width**2 * frames + 4 * frames**2 * config.width
    layers = config.perceiver_layers * perceiver_flops(config, frames)
    return first_flops(config, frames) + config.cond_blocks * block + layers


def first_flops(config: GPTConfig, frames: int) -> int:
    """The reference's mels to the model's width."""
    return 2 * config.n_mels * config.width * frames


def perceiver_flops(config: GPTConfig, frames: int) -> int:
    """K latents look at the reference and at themselves, then a feed-forward of 8/3 D."""
    inner = config.perceiver_heads * config.perceiver_head_width
    hidden = int(config.width * 8 / 3)
    seen = config.latents + frames
    queries_and_result = 2 * 2 * config.latents * config.width * inner
    keys_and_values = 2 * 2 * seen * config.width * inner
    attention = 4 * config.latents * seen * inner
    feed_forward = 2 * 3 * config.latents * config.width * hidden
    return queries_and_result + keys_and_values + attention + feed_forward
