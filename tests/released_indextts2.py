"""Names and shapes of IndexTTS2's gpt.pth, at any size, and a randomly initialised file of them.

As its published classes make them; docs/indextts2.md says where they were read.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """A conformer over w2v-BERT's features, and the perceiver that looks at its states."""

    blocks: int
    width: int = 512
    hidden: int
    heads: int
    latents: int
    latent_width: int
    kernel: int = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Those of the release."""

    layers: int = 24
    width: int = 1280
    heads: int = 20
    text_rows: int = 12_001
    codes: int = 8194
    text_positions: int = 602
    code_positions: int = 1818
    features: int = 1024  # of w2v-BERT 2.0
    positions: int = 5000  # of the conformers' sinusoids
    speaker: Encoder = Encoder(blocks=6, hidden=2048, heads=8, latents=32, latent_width=1280)
    emotion: Encoder = Encoder(blocks=4, hidden=1024, heads=4, latents=1, latent_width=1024)


TINY = Sizes(
    layers=3,
    width=64,
    heads=2,
    text_rows=41,
    codes=34,
    text_positions=32,
    code_positions=48,
    features=16,
    positions=20,
    speaker=Encoder(blocks=1, width=8, hidden=16, heads=2, latents=32, latent_width=64),
    emotion=Encoder(blocks=1, width=8, hidden=16, heads=2, latents=1, latent_width=16),
)
CONDITIONING = ("conditioning_encoder.", "perceiver_encoder.", "emo", "speed_emb.")


def indextts2_shapes(sizes: Sizes = Sizes()) -> dict[str, Shape]:
    """Every tensor of gpt.pth."""
    d = sizes.width
    found: dict[str, Shape] = {
        "text_embedding.weight": (sizes.text_rows, d),
        "mel_embedding.weight": (sizes.codes, d),
        "text_pos_embedding.emb.weight": (sizes.text_positions, d),
        "mel_pos_embedding.emb.weight": (sizes.code_positions, d),
        "speed_emb.weight": (2, d),
    }
    for i in range(sizes.layers):
        found.update(_trunk_layer(f"gpt.h.{i}", d))
    for norm in ("gpt.ln_f", "final_norm"):
        found.update(_with_bias(norm, (d,)))
    found.update(_with_bias("text_head", (sizes.text_rows, d)))
    found.update(_with_bias("mel_head", (sizes.codes, d)))
    found.update(_with_bias("emovec_layer", (d, sizes.features)))
    found.update(_with_bias("emo_layer", (d, d)))
    for before, encoder in (("", sizes.speaker), ("emo_", sizes.emotion)):
        found.update(_conformer(f"{before}conditioning_encoder", encoder, sizes))
        found.update(_perceiver(f"{before}perceiver_encoder", encoder))
    return found


def _with_bias(name: str, weight: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}


def _trunk_layer(name: str, d: int) -> dict[str, Shape]:
    """GPT-2's, whose linear layers hold (in, out)."""
    found = {}
    linear = {
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "mlp.c_fc": (d, 4 * d),
        "mlp.c_proj": (4 * d, d),
    }
    for part, shape in linear.items():
        found[f"{name}.{part}.weight"] = shape
        found[f"{name}.{part}.bias"] = shape[1:]
    for norm in ("ln_1", "ln_2"):
        found.update(_with_bias(f"{name}.{norm}", (d,)))
    return found


def _conformer(name: str, encoder: Encoder, sizes: Sizes) -> dict[str, Shape]:
    w = encoder.width
    halved = (sizes.features - 1) // 2  # a 3 x 3 convolution in steps of 2, without padding
    found = {
        **_with_bias(f"{name}.embed.conv.0", (w, 1, 3, 3)),
        **_with_bias(f"{name}.embed.out.0", (w, w * halved)),
        f"{name}.embed.pos_enc.pe": (1, sizes.positions, w),
        **_with_bias(f"{name}.after_norm", (w,)),
    }
    for i in range(encoder.blocks):
        block = f"{name}.encoders.{i}"
        for part in ("linear_q", "linear_k", "linear_v", "linear_out"):
            found.update(_with_bias(f"{block}.self_attn.{part}", (w, w)))
        found[f"{block}.self_attn.linear_pos.weight"] = (w, w)
        for part in ("pos_bias_u", "pos_bias_v"):
            found[f"{block}.self_attn.{part}"] = (encoder.heads, w // encoder.heads)
        found.update(_with_bias(f"{block}.feed_forward.w_1", (encoder.hidden, w)))
        found.update(_with_bias(f"{block}.feed_forward.w_2", (w, encoder.hidden)))
        convolution = f"{block}.conv_module"
        found.update(_with_bias(f"{convolution}.pointwise_conv1", (2 * w, w, 1)))
        found.update(_with_bias(f"{convolution}.depthwise_conv", (w, 1, encoder.kernel)))
        found.update(_with_bias(f"{convolution}.pointwise_conv2", (w, w, 1)))
        found.update(_with_bias(f"{convolution}.norm", (w,)))
        for norm in ("norm_mha", "norm_conv", "norm_ff", "norm_final"):
            found.update(_with_bias(f"{block}.{norm}", (w,)))
    return found


def _perceiver(name: str, encoder: Encoder) -> dict[str, Shape]:
    """Two layers; heads of 64; a feed-forward twice as wide, of which GEGLU keeps two thirds."""
    d = encoder.latent_width
    inner = 64 * encoder.heads
    hidden = int(d * 2 * 2 / 3)
    found = {
        **_with_bias(f"{name}.proj_context", (d, encoder.width)),
        f"{name}.latents": (encoder.latents, d),
        f"{name}.norm.gamma": (d,),
    }
    for i in range(2):
        layer = f"{name}.layers.{i}"
        found[f"{layer}.0.to_q.weight"] = (inner, d)
        found[f"{layer}.0.to_kv.weight"] = (2 * inner, d)
        found[f"{layer}.0.to_out.weight"] = (d, inner)
        found.update(_with_bias(f"{layer}.1.0", (2 * hidden, d)))
        found.update(_with_bias(f"{layer}.1.2", (d, hidden)))
    return found


def random_indextts2(sizes: Sizes = TINY) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = indextts2_shapes(sizes)
    found = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    for name in found:
        if ".ln_" in name and name.endswith(".weight"):
            found[name] += 1
    return found


def write_indextts2(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """The folder of a release, as far as a loader looks at it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors or random_indextts2(), folder / "gpt.pth")
    (folder / "config.yaml").write_text("gpt:\n  model_dim: 1280\n", encoding="utf-8")
    (folder / "bpe.model").write_bytes(b"")
    return folder
