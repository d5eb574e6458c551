"""IndexTTS2's codes, and its conditioning: both are made of states of w2v-BERT 2.0.

The states (Barrault et al. 2023) are quantised by MaskGCT's codec: about 50 codes a second, of
8,192. It only encodes: sound is made by the package from codes and the GPT's states. The same
states, normalised, are what the GPT is conditioned on, so a recording's codes and its reference
come from one pass. w2v-BERT is transformers'; the quantiser and the conditioning encoders are the
classes of the package `indextts2-inference`, which is optional and under bilibili's own licence.
The weights of w2v-BERT and the quantiser are in the codec file of a run.

Shapes: B batch, L samples, T frames and as many codes, F features, D width, C channels.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from kit.audio.codec import Codec
from kit.audio.spectrogram import Mel
from kit.base.config import Section, build, require, within
from kit.base.errors import KitError
from kit.base.tensor_file import describe_mismatch, fill_module, read_tensors
from kit.extras.indextts2.model import load_stats
from kit.settings import GPTConfig, MelConfig

FEATURES = 1024  # width of w2v-BERT 2.0's states; the package has it as a constant
EMOTION_WIDTH = 1024  # of the emotion's one latent, likewise
LENGTH_LATENTS = 2  # after the speaker's
SAMPLE_RATE = 16_000
HOP = 320  # samples of a code
SPEAKS = (
    "IndexTTS2's codes become sound in the package indextts2-inference: export the voice in "
    "07_finetune_xtts, then `python -m kit evaluate --run NAME`, or `python -m kit speak --voice "
    "runs/NAME/indextts2 --text ...`."
)
# Subfolder of a release; else repository of the hub, and file in it.
W2V_BERT = ("w2v-bert-2.0", "facebook/w2v-bert-2.0", "model.safetensors")
QUANTISER = ("semantic_codec", "amphion/MaskGCT", "semantic_codec/model.safetensors")


def package(module: str):
    """Return a module of the package. Raises KitError where it is not installed."""
    try:
        return importlib.import_module(f"indextts.{module}")
    except ImportError as error:
        raise KitError(
            f"IndexTTS2 is encoded and spoken with the package indextts2-inference, but {error}: "
            "pip install indextts2-inference (under bilibili's own licence, which must be read "
            "first)."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(MelConfig):
    """The normalised states, where others have log-mels."""

    kind: str = "indextts2"
    sample_rate: int = SAMPLE_RATE
    n_fft: int = 400
    hop_length: int = HOP
    n_mels: int = FEATURES

    def __post_init__(self):
        for field in dataclasses.fields(self):
            same = getattr(self, field.name) == field.default
            require(same, self, field.name, f"w2v-BERT has {field.default}.")


class Features(Mel):
    """Stands for the references' front end; the codec makes them, with the codes."""

    config_class = FeatureConfig

    def __init__(self, config: FeatureConfig):
        nn.Module.__init__(self)
        self.config = config

    def log_mel(self, wave: Tensor) -> Tensor:
        raise KitError(f"A reference is encoded by the codec alone. {SPEAKS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTTS2CodecConfig(Section):
    """Sizes; the defaults are those of the release. Names are its configuration's."""

    kind: str = "indextts2"
    codebook_size: int = within(8192, 2, 2**20)
    hidden_size: int = within(FEATURES, FEATURES, FEATURES)
    codebook_dim: int = within(8, 1, 8192)
    vocos_dim: int = within(384, 1, 8192)
    vocos_intermediate_dim: int = within(2048, 1, 8192)
    vocos_num_layers: int = within(12, 1, 128)
    layer: int = within(17, 1, 128)  # of w2v-BERT, whose states are taken
    semantic_heads: int = within(16, 1, 128)
    semantic_hidden: int = within(4096, 1, 8192)
    frame_rate: ClassVar[float] = SAMPLE_RATE / HOP


class IndexTTS2Codec(nn.Module, Codec):
    config_class = IndexTTS2CodecConfig
    sample_rate = SAMPLE_RATE
    frame_rate = IndexTTS2CodecConfig.frame_rate
    context = 0
    decodes = False

    def __init__(self, config: IndexTTS2CodecConfig):
        super().__init__()
        self.config = config
        self.vocab_size = config.codebook_size
        self.semantic = w2v_bert(config)
        self.quantiser = quantiser(config)
        del self.quantiser.decoder
        self.mean = nn.Buffer(torch.zeros(FEATURES))
        self.std = nn.Buffer(torch.ones(FEATURES))

    @torch.inference_mode()
    def features(self, wave: Tensor) -> Tensor:
        """A clip (L,) of 16 kHz -> normalised states (T, F), as the package makes them."""
        from transformers import SeamlessM4TFeatureExtractor

        extract = SeamlessM4TFeatureExtractor(padding_value=1.0)  # as w2v-BERT 2.0's
        inputs = extract(wave.cpu().numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt")
        inputs = {name: tensor.to(self.mean.device) for name, tensor in inputs.items()}
        states = self.semantic(**inputs).last_hidden_state[0]
        return (states - self.mean) / self.std

    @torch.inference_mode()
    def references_and_codes(self, waves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        features = [self.features(wave) for wave in waves]
        codes = [self.quantiser.quantize(rows[None])[0][0] for rows in features]
        return [rows.mT for rows in features], codes

    def encode(self, wave: Tensor) -> Tensor:
        return torch.stack(self.references_and_codes(list(wave))[1])

    def decode(self, codes: Tensor, first: int = 0, **_) -> Tensor:
        raise KitError(SPEAKS)


def w2v_bert(config: IndexTTS2CodecConfig) -> nn.Module:
    """Return an untrained w2v-BERT with the layers up to the one that is taken."""
    package("gpt.model_v2")  # a sentence where it is missing
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    settings = Wav2Vec2BertConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layer,
        num_attention_heads=config.semantic_heads,
        intermediate_size=config.semantic_hidden,
        mask_time_prob=0.0,  # masking is for its own training
    )
    return Wav2Vec2BertModel(settings)


def quantiser(config: IndexTTS2CodecConfig) -> nn.Module:
    """Return the package's codec of w2v-BERT's states, with random weights."""
    return package("utils.maskgct_utils").build_semantic_codec(config)


def load_indextts2_codec(folder: Path, settings: dict, fetch: Callable) -> IndexTTS2Codec:
    """Return the codec of the release in `folder`, in eval mode, on the CPU.

    w2v-BERT and MaskGCT's codec are read from `folder` if they are in its subfolders `w2v-bert-2.0`
    and `semantic_codec`; else `fetch(repository, file)` returns their files. `settings` is the
    release's config.yaml. Raises KitError for files that are damaged or of other models.
    """
    section = settings.get("semantic_codec") or {}
    names = {field.name for field in dataclasses.fields(IndexTTS2CodecConfig)} - {"kind"}
    config = build(IndexTTS2CodecConfig, {n: section[n] for n in names & section.keys()})
    files = []
    for subfolder, repository, name in (W2V_BERT, QUANTISER):
        own = folder / subfolder / "model.safetensors"
        files.append(own if own.is_file() else fetch(repository, name))
    codec = IndexTTS2Codec(config)
    below = tuple(f"encoder.layers.{i}." for i in range(config.layer))
    semantic = {
        name: tensor
        for name, tensor in read_tensors(files[0]).items()
        if name.startswith(below) or not name.startswith(("encoder.layers.", "masked_spec_embed"))
    }
    _fill(codec.semantic, semantic, files[0])
    quantised = {n: t for n, t in read_tensors(files[1]).items() if not n.startswith("decoder.")}
    _fill(codec.quantiser, quantised, files[1])
    codec.mean, codec.std = (nn.Buffer(each) for each in load_stats(folder))
    return codec.eval()


def _fill(module: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    problems = describe_mismatch(tensors, module.state_dict())
    if problems:
        raise KitError(
            f"{file} is not the file that IndexTTS2 encodes with; {problems}. Take it from "
            "facebook/w2v-bert-2.0, or amphion/MaskGCT."
        )
    fill_module(module, tensors, file)


# --- conditioning ---------------------------------------------------------------------------------


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
    """Convolve by 3 x 3 in steps of 2, then ReLU: (B, T, F) -> (B, T', C * F') for `embed.out`."""
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
