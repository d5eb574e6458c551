"""IndexTTS2's conditioning: features of a reference in, 34 latents out.

The encoders are the classes of the package `indextts2-inference`, which is optional and under
bilibili's own licence.

Shapes: B batch, T frames of features, D width.
"""

import importlib

import torch
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.model.sequence import GPTConfig

HOW_TO_INSTALL = "pip install indextts2-inference"
FEATURES = 1024  # width of w2v-BERT 2.0's states; the package has it as a constant
EMOTION_WIDTH = 1024  # of the emotion's one latent, likewise
LENGTH_LATENTS = 2  # after the speaker's


def package(module: str):
    """Return a module of the package. Raises KitError where it is not installed."""
    try:
        return importlib.import_module(f"indextts.{module}")
    except ImportError as error:
        raise KitError(
            f"IndexTTS2 is encoded and spoken with the package indextts2-inference, but {error}: "
            f"{HOW_TO_INSTALL} (under bilibili's own licence, which must be read first)."
        ) from error


class IndexTTS2Conditioner(nn.Module):
    """Features (B, 1024, T) -> 32 latents of speaker and emotion, and 2 of the length, (B, 34, D).

    Attributes have the names of the release. The emotion is that of the same reference, as in the
    package's inference without a second one; the length is left open, as there.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.width
        speaker, emotion = config.conformers[:5], config.conformers[5:]
        self.conditioning_encoder = conformer(*speaker[:4])
        self.perceiver_encoder = perceiver(d, config.latents - LENGTH_LATENTS, speaker)
        self.emo_conditioning_encoder = conformer(*emotion[:4])
        self.emo_perceiver_encoder = perceiver(EMOTION_WIDTH, 1, emotion)
        self.emovec_layer = nn.Linear(EMOTION_WIDTH, d)
        self.emo_layer = nn.Linear(d, d)
        self.speed_emb = nn.Embedding(2, d)

    def forward(self, features: Tensor) -> Tensor:
        features = features.mT  # (B, T, 1024)
        speaker = self.perceiver_encoder(encode(self.conditioning_encoder, features))
        emotion = self.emo_perceiver_encoder(encode(self.emo_conditioning_encoder, features))
        emotion = self.emo_layer(self.emovec_layer(emotion))
        length = self.speed_emb.weight.flip(0).expand(len(features), -1, -1)
        return torch.cat((speaker + emotion, length), dim=1)


def encode(encoder: nn.Module, features: Tensor) -> Tensor:
    """Run a conformer on references of one length, (B, T, 1024) -> (B, (T - 1) // 2, width).

    Without the masks of its own forward pass, and without its transposed copy of the convolution's
    result, the largest tensor of all: 310 MB for 4 references of 3 s in the release's sizes, fp32.
    """
    embed = encoder.embed
    states, positions = embed.pos_enc(embed.out(convolve(embed.conv[0], features)))
    no_mask = torch.ones(0, 0, 0, dtype=torch.bool)
    for layer in encoder.encoders:
        states = layer(states, no_mask, positions)[0]
    return encoder.after_norm(states)


def convolve(conv: nn.Conv2d, features: Tensor) -> Tensor:
    """Convolve by 3 x 3 in steps of 2, and ReLU: (B, T, F) -> (B, T', C * F'), as `out` reads it."""
    patches = features.unfold(1, 3, 2).unfold(2, 3, 2)  # (B, T', F', 3, 3)
    patches = patches.flatten(0, 1).flatten(2).mT  # (B * T', 9, F')
    weight = conv.weight.flatten(1).expand(len(patches), -1, -1)  # (B * T', C, 9)
    convolved = torch.baddbmm(conv.bias[:, None], weight, patches).relu_()  # (B * T', C, F')
    return convolved.flatten(1).unflatten(0, (len(features), -1))


def conformer(width: int, hidden: int, heads: int, blocks: int) -> nn.Module:
    return package("gpt.conformer_encoder").ConformerEncoder(
        input_size=FEATURES,
        output_size=width,
        linear_units=hidden,
        attention_heads=heads,
        num_blocks=blocks,
        input_layer="conv2d2",
    )


def perceiver(width: int, latents: int, encoder: tuple[int, ...]) -> nn.Module:
    context, _, heads, _, factor = encoder
    return package("gpt.perceiver").PerceiverResampler(
        width, dim_context=context, ff_mult=factor, heads=heads, num_latents=latents
    )
