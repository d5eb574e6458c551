"""Audio <-> codes with a released NeuCodec: 50 codes a second, of 65,536; output at 24 kHz.

It is not trained here. The decoder (decoder.py), 188 million parameters, is the kit's own and is in
the codec file of a run and a voice. The encoder, 442 million, is that of transformers, an optional
dependency (`pip install "transformers>=5.17"`), and is read from the release when a recording must
be encoded, so speaking does not need it. In it w2v-BERT 2.0 (Barrault et al. 2023) encodes what is
said, a stack of convolutions (BigCodec: Xin et al. 2024) how it sounds. Its input features are
computed here, as by w2v-BERT's own feature extractor.

Shapes: B batch, L samples, N codes, n samples of a window, T mel frames, M mels.
"""

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.clip import import_torchaudio
from kit.audio.codec import Codec, require_codes
from kit.base.errors import KitError
from kit.releases.neucodec.decoder import HOP, LEVELS, WINDOW, DigitsToLatents, NeuCodecDecoder
from kit.releases.neucodec.files import (
    LICENCE,
    NeuCodecConfig,
    neucodec_folder,
    read_tensors,
    require_release_tensors,
    require_version,
)

ENCODER_SAMPLE_RATE = 16_000  # Hz
CODE_HOP = 320  # samples a code
N_MELS = 80
FRAMES_A_CODE = 2
LEAST_TRANSFORMERS = (5, 17)  # the first with NeuCodec
HOW_TO_INSTALL = 'pip install "transformers>=5.17"'
BESIDE = WINDOW // HOP // 2  # codes to either side whose windows overlap the samples of a code


class NeuCodec(nn.Module, Codec):
    """The codec. Its attributes are named so that its tensors have the names of the release."""

    config_class = NeuCodecConfig
    sample_rate = 24_000
    input_sample_rate = ENCODER_SAMPLE_RATE
    vocab_size = math.prod(LEVELS)

    def __init__(self, config: NeuCodecConfig):
        super().__init__()
        c = config
        self.config = config
        self.quantizer = DigitsToLatents(c.latent_width)
        self.acoustic_decoder = NeuCodecDecoder(c.latent_width, c.width, c.layers, c.heads)

    @property
    def frame_rate(self) -> float:
        return self.config.frame_rate

    @property
    def context(self) -> int:
        c = self.config
        return BESIDE + c.block - 1 + max(c.before, c.after)

    @property
    def lookahead(self) -> int:
        return BESIDE + self.config.block - 1 + self.config.after

    def release(self, progress: Callable = lambda *_: None) -> tuple[Path, str]:
        """Return the folder of the release, fetched if missing, and the SHA-256 of its file.

        Raises KitError without transformers, or for a file that is damaged or of another model;
        KitError and DiskError if it cannot be fetched.
        """
        require_encoder()  # before anything is fetched
        folder = neucodec_folder(self.config, progress)
        sha256 = require_version(folder, self.config)
        require_release_tensors(folder, library_tensors(self.config))
        return folder, sha256

    def load_release(self, progress: Callable) -> str:
        """Load the weights of the `release`; return a description of them."""
        folder, sha256 = self.release(progress)
        self.load_state_dict(read_tensors(folder, list(self.state_dict())))
        self.config = dataclasses.replace(self.config, sha256=sha256)
        return f"the released NeuCodec ({LICENCE}, SHA-256 {sha256[:12]}) in {folder}"

    @cached_property  # not a submodule, so it is not saved in the codec's file
    def encoder(self) -> nn.Module:
        """The encoder, read from the `release`."""
        folder, _ = self.release()
        return load_encoder(folder, self.config).to(self.device)

    def _apply(self, fn: Callable, recurse: bool = True) -> "NeuCodec":
        """As `nn.Module._apply`, by which `to` works: the encoder moves along."""
        if "encoder" in vars(self):  # it has been loaded
            self.encoder._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        encoder = self.encoder
        return torch.stack([encode_clip(encoder, row) for row in wave])

    @property
    def device(self) -> torch.device:
        return self.quantizer.project_out.weight.device

    @torch.inference_mode()
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        codes = codes.to(self.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        require_codes(codes, self.vocab_size)
        spans = block_spans(first, codes.shape[1], self.config.block)
        windows = torch.cat([self._windows(codes, start, end) for start, end in spans], dim=1)
        return self.acoustic_decoder.head.sound(windows)

    def _windows(self, codes: Tensor, start: int, end: int) -> Tensor:
        begin = max(0, start - self.config.before)
        around = codes[:, begin : end + self.config.after]
        windows = self.acoustic_decoder(self.quantizer(around))
        return windows[:, start - begin : end - begin]


def block_spans(first: int, count: int, block: int) -> list[tuple[int, int]]:
    """Split `count` codes where positions in the utterance are multiples of `block`.

    The first code is at position `first`. Returns (start, end) pairs, counted from that code.
    """
    cuts = range(block - first % block, count, block)
    starts = [0, *cuts]
    return list(zip(starts, [*cuts, count], strict=True))


# --- the encoder ----------------------------------------------------------------------------------


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
    why = encoder_unavailable()
    if why:
        raise KitError(
            f"NeuCodec encodes recordings with the transformers library, but {why}. Or choose "
            "`codec.kind: mel`. Speaking does not need the library."
        )


def library_settings(config: NeuCodecConfig):
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
    """Return every tensor of a release of these sizes, on the meta device."""
    from transformers import NeuCodecModel

    with torch.device("meta"):
        return NeuCodecModel(library_settings(config)).state_dict()


def load_encoder(folder: Path, config: NeuCodecConfig) -> nn.Module:
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

    As in the release, up to 20 ms of silence are appended, and an incomplete hop is dropped.
    """
    wave = wave.to(encoder.fc_encoder.weight.device)
    wave = F.pad(wave, (0, max(0, CODE_HOP - len(wave))))
    wave = F.pad(wave, (0, CODE_HOP - len(wave) % CODE_HOP))
    encoded = encoder.encode(wave[None, None], semantic_features(wave)[None])
    return encoded.audio_codes[0, 0].long()
