"""The encoder of a released NeuCodec: sound -> codes.

w2v-BERT 2.0 (Barrault et al. 2023) encodes what is said, a stack of convolutions (BigCodec: Xin et
al. 2024) how it sounds; both outputs together are quantised. Both are in transformers, an optional
dependency (`pip install "transformers>=5.17"`) that is imported when the first clip is encoded. The
input features are computed here, as by w2v-BERT's own feature extractor.

Shapes: L samples, T mel frames, M mels, N codes.
"""

import importlib.metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.clip import import_torchaudio
from kit.base.errors import KitError
from kit.releases.neucodec.decoder import LEVELS
from kit.releases.neucodec.files import NeuCodecConfig

ENCODER_SAMPLE_RATE = 16_000  # Hz
CODE_HOP = 320  # samples a code
N_MELS = 80
FRAMES_A_CODE = 2
LEAST_TRANSFORMERS = (5, 17)  # the first with NeuCodec
HOW_TO_INSTALL = 'pip install "transformers>=5.17"'


def encoder_unavailable() -> str:
    """Return why recordings cannot be encoded here; "" if they can."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return f"transformers is not installed ({HOW_TO_INSTALL})"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < LEAST_TRANSFORMERS:
        return f"transformers {version} has no NeuCodec yet ({HOW_TO_INSTALL}, and restart)"
    return ""


def require_encoder() -> None:
    """Raise KitError if recordings cannot be encoded."""
    why = encoder_unavailable()
    if why:
        raise KitError(
            f"NeuCodec encodes recordings with the transformers library, but {why}. Or choose "
            "`codec.kind: mel`. Speaking does not need the library."
        )


def library_settings(config: NeuCodecConfig):
    """Return the transformers configuration of a NeuCodec with the sizes of `config`."""
    from transformers import NeuCodecConfig as LibraryConfig

    semantic = {
        "model_type": "wav2vec2-bert",
        "hidden_size": config.semantic_width,
        "output_hidden_size": config.semantic_width,
        "intermediate_size": 4 * config.semantic_width,
        "num_hidden_layers": config.semantic_layers,
        "num_attention_heads": config.semantic_heads,
    }
    return LibraryConfig(
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.width // config.heads,
        encoder_hidden_size=config.acoustic_width,
        quantization_dim=config.latent_width,
        quantization_levels=LEVELS,
        semantic_model_config=semantic,
    )


def library_tensors(config: NeuCodecConfig) -> dict[str, Tensor]:
    """Return every tensor of a release of these sizes, by name, on the meta device."""
    from transformers import NeuCodecModel

    with torch.device("meta"):
        return NeuCodecModel(library_settings(config)).state_dict()


def load_encoder(folder: Path, config: NeuCodecConfig) -> nn.Module:
    """Load the encoder of the release in `folder`, in fp32 and eval mode, on the CPU."""
    from transformers import NeuCodecModel

    model = NeuCodecModel.from_pretrained(
        folder,
        config=library_settings(config),
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
    )
    del model.acoustic_decoder
    return model.eval()


def semantic_features(wave: Tensor) -> Tensor:
    """Waveform (L,) of 16 kHz -> log-mels, two frames side by side, (N, 2 M).

    Kaldi's filter bank of 16-bit samples, each mel with mean 0 and variance 1 over the clip.
    """
    mel = import_torchaudio().compliance.kaldi.fbank(
        wave[None].float() * 2**15,
        num_mel_bins=N_MELS,
        sample_frequency=ENCODER_SAMPLE_RATE,
        window_type="povey",
        dither=0.0,
        low_freq=20.0,
        high_freq=ENCODER_SAMPLE_RATE / 2,
    )  # (T, M)
    mel = (mel - mel.mean(0)) / (mel.var(0) + 1e-7).sqrt()
    codes = len(mel) // FRAMES_A_CODE
    return mel[: codes * FRAMES_A_CODE].reshape(codes, FRAMES_A_CODE * N_MELS)


def encode_clip(encoder: nn.Module, wave: Tensor) -> Tensor:
    """Return the codes (N,) of a clip (L,) of 16 kHz: one per full 20 ms, and at least one.

    As in the release, up to 20 ms of silence are appended, and an incomplete hop is dropped. The
    clip may be on any device; the codes are on that of `encoder`.
    """
    wave = wave.to(encoder.fc_encoder.weight.device)
    wave = F.pad(wave, (0, max(0, CODE_HOP - len(wave))))
    wave = F.pad(wave, (0, CODE_HOP - len(wave) % CODE_HOP))
    encoded = encoder.encode(wave[None, None], semantic_features(wave)[None])
    return encoded.audio_codes[0, 0].long()
