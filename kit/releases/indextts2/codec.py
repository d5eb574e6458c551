"""IndexTTS2's codes: states of w2v-BERT 2.0 (Barrault et al. 2023), quantised by MaskGCT's codec.

About 50 codes a second, of 8,192. It only encodes: sound is made by the package from codes and the
GPT's states. The same states, normalised, are what the GPT is conditioned on, so a recording's
codes and its reference come from one pass. w2v-BERT is transformers', the quantiser the package's;
the weights of both are in the codec file of a run.

Shapes: B batch, L samples, T frames and as many codes, F features.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from kit.audio.codec import Codec
from kit.audio.spectrogram import Mel, MelConfig
from kit.base.config import build, require, require_within
from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.base.tensor_file import describe_mismatch
from kit.releases.indextts2.conditioner import FEATURES, package
from kit.releases.indextts2.model import load_stats
from kit.releases.xtts_v2.names import fill_module

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(MelConfig):
    """The normalised states, where others have log-mels."""

    kind: str = "indextts2"
    sample_rate: int = SAMPLE_RATE
    n_fft: int = 400
    hop_length: int = HOP
    n_mels: int = FEATURES

    def __post_init__(self):
        sizes = {"sample_rate": SAMPLE_RATE, "n_fft": 400, "hop_length": HOP, "n_mels": FEATURES}
        for name, size in sizes.items():
            require(getattr(self, name) == size, self, name, f"w2v-BERT has {size}.")


class Features(Mel):
    """Stands for the references' front end; the codec makes them, with the codes."""

    config_class = FeatureConfig

    def __init__(self, config: FeatureConfig):
        nn.Module.__init__(self)
        self.config = config

    def log_mel(self, wave: Tensor) -> Tensor:
        raise KitError(f"A reference is encoded by the codec alone. {SPEAKS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTTS2CodecConfig:
    """Sizes; the defaults are those of the release. Names are its configuration's."""

    kind: str = "indextts2"
    codebook_size: int = 8192
    hidden_size: int = FEATURES
    codebook_dim: int = 8
    vocos_dim: int = 384
    vocos_intermediate_dim: int = 2048
    vocos_num_layers: int = 12
    layer: int = 17  # of w2v-BERT, whose states are taken
    semantic_heads: int = 16
    semantic_hidden: int = 4096

    @property
    def frame_rate(self) -> float:
        return SAMPLE_RATE / HOP

    def __post_init__(self):
        require_within(self, 2, 2**20, "codebook_size")
        require_within(self, FEATURES, FEATURES, "hidden_size")
        require_within(self, 1, 8192, "codebook_dim", "vocos_dim", "vocos_intermediate_dim")
        require_within(self, 1, 8192, "semantic_hidden")
        require_within(self, 1, 128, "vocos_num_layers", "layer", "semantic_heads")


class IndexTTS2Codec(nn.Module, Codec):
    config_class = IndexTTS2CodecConfig
    sample_rate = SAMPLE_RATE
    frame_rate = SAMPLE_RATE / HOP
    context = 0
    decodes = False

    def __init__(self, config: IndexTTS2CodecConfig):
        super().__init__()
        self.config = config
        self.semantic = w2v_bert(config)
        self.quantiser = quantiser(config)
        del self.quantiser.decoder
        self.mean = nn.Buffer(torch.zeros(FEATURES))
        self.std = nn.Buffer(torch.ones(FEATURES))

    @property
    def vocab_size(self) -> int:
        return self.config.codebook_size

    @torch.inference_mode()
    def features(self, wave: Tensor) -> Tensor:
        """A clip (L,) of 16 kHz -> normalised states (T, F), as the package makes them."""
        extract = feature_extractor()
        inputs = extract(wave.cpu().numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt")
        inputs = {name: tensor.to(self.mean.device) for name, tensor in inputs.items()}
        states = self.semantic(**inputs).last_hidden_state[0]
        return (states - self.mean) / self.std

    @torch.inference_mode()
    def codes(self, features: Tensor) -> Tensor:
        """Normalised states (T, F) -> codes (T,)."""
        return self.quantiser.quantize(features[None])[0][0]

    def encode(self, wave: Tensor) -> Tensor:
        return torch.stack([self.codes(self.features(clip)) for clip in wave])

    def references_and_codes(self, waves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        features = [self.features(wave) for wave in waves]
        return [rows.mT for rows in features], [self.codes(rows) for rows in features]

    def decode(self, codes: Tensor, first: int = 0, **_) -> Tensor:
        raise KitError(SPEAKS)


def feature_extractor():
    from transformers import SeamlessM4TFeatureExtractor

    return SeamlessM4TFeatureExtractor(padding_value=1.0)  # as w2v-BERT 2.0's


def w2v_bert(config: IndexTTS2CodecConfig, layers: int = 0) -> nn.Module:
    """Return an untrained w2v-BERT with the layers up to the one that is taken, or `layers`."""
    package("gpt.model_v2")  # a sentence where it is missing
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    settings = Wav2Vec2BertConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=layers or config.layer,
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
        for name, tensor in _read(files[0]).items()
        if name.startswith(below) or not name.startswith(("encoder.layers.", "masked_spec_embed"))
    }
    _fill(codec.semantic, semantic, files[0])
    quantised = {n: t for n, t in _read(files[1]).items() if not n.startswith("decoder.")}
    _fill(codec.quantiser, quantised, files[1])
    codec.mean, codec.std = (nn.Buffer(each) for each in load_stats(folder))
    return codec.eval()


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (safetensors.SafetensorError, OSError) as error:
        raise KitError(
            f"{file} is damaged or no safetensors file ({shorten(error)}): download it again."
        ) from error


def _fill(module: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    problems = describe_mismatch(tensors, module.state_dict())
    if problems:
        raise KitError(
            f"{file} is not the file that IndexTTS2 encodes with; {problems}. Take it from "
            "facebook/w2v-bert-2.0, or amphion/MaskGCT."
        )
    fill_module(module, tensors, file)
