"""Audio <-> codes with a released NeuCodec: 50 codes a second, of 65,536; output at 24 kHz.

NeuCodec (Julian et al. 2025) is X-Codec 2 (Ye et al. 2025) trained on data with free licences. Its
weights are under the Apache-2.0 licence, those of w2v-BERT 2.0 among them under MIT. One file holds
all 629,937,706 parameters, by the names that transformers reads. No code in it is executed.

It is not trained here. The decoder, 188 million parameters, is the kit's own and is in the codec
file of a run and a voice. The encoder, 442 million, is that of transformers, an optional
dependency, and is read from the release only to encode recordings, so speaking does not need it.

Shapes: B batch, L samples, N codes, C channels, F frequency bins, n samples of a window, T mel
frames, M mels.
"""

import dataclasses
import importlib.metadata
import itertools
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.clip import import_torchaudio
from kit.audio.codec import Codec, require_codes
from kit.audio.vocoder import overlap_add
from kit.base.config import Section, within
from kit.base.errors import KitError
from kit.base.files import file_digest, make_folder
from kit.base.hub import fetch_model, fetched
from kit.base.tensor_file import describe_mismatch, opened, read_tensors

LICENCE = "Apache-2.0"
WEIGHTS_FILE = "model.safetensors"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
ENCODER_SAMPLE_RATE = 16_000  # Hz
CODE_HOP = 320  # samples a code
N_MELS = 80
HOW_TO_INSTALL = 'pip install "transformers>=5.17"'
LEVELS = (4,) * 8  # of each digit of a code; their product is the vocabulary
GROUPS = 32
HOP = 480  # samples a code, at 24 kHz
WINDOW = 4 * HOP  # samples
BESIDE = WINDOW // HOP // 2  # codes to either side whose windows overlap the samples of a code


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuCodecConfig(Section):
    """Which release, its sizes (by default those of the release), and the blocks of decoding."""

    kind: str = "neucodec"
    repository: str = "neuphonic/neucodec"  # on the Hugging Face hub
    revision: str = "main"  # or a commit
    folder: str = ""  # local folder with the file; "": fetch it
    # SHA-256 of the file. "": accept any; the codec's own file records it, and later no other is
    # accepted.
    sha256: str = dataclasses.field(default="", compare=False)
    width: int = within(1024, 1, 8192)  # of the decoder, and of the convolutional encoder
    layers: int = within(12, 1, 128)
    heads: int = within(16, 1, 128)
    semantic_width: int = within(1024, 1, 8192)  # of w2v-BERT
    semantic_layers: int = within(16, 1, 128)
    semantic_heads: int = within(16, 1, 128)
    acoustic_width: int = within(48, 1, 4096)  # channels of the first convolution of the encoder
    # The decoder attends to all codes of an utterance. To decode while codes are still generated,
    # `block` of them are decoded at a time, with `before` and `after` as context.
    block: int = within(50, 1, 10_000)
    before: int = within(50, 0, 10_000)
    after: int = within(10, 0, 10_000)
    frame_rate: ClassVar[float] = 50.0

    @property
    def latent_width(self) -> int:
        """Width of what is quantised: the outputs of both encoders, concatenated."""
        return self.width + self.semantic_width


class NeuCodec(nn.Module, Codec):
    """The codec. Its attributes are named so that its tensors have the names of the release."""

    config_class = NeuCodecConfig
    sample_rate = 24_000
    input_sample_rate = ENCODER_SAMPLE_RATE
    frame_rate = NeuCodecConfig.frame_rate
    vocab_size = math.prod(LEVELS)

    def __init__(self, config: NeuCodecConfig):
        super().__init__()
        self.config = config
        self.quantizer = DigitsToLatents(config.latent_width)
        self.acoustic_decoder = NeuCodecDecoder(config)
        self.context = BESIDE + config.block - 1 + max(config.before, config.after)

    @property
    def lookahead(self) -> int:
        return BESIDE + self.config.block - 1 + self.config.after

    def release(self) -> tuple[Path, str]:
        """Return the folder of the release, fetched if missing, and the SHA-256 of its file.

        Raises KitError without transformers, or for a file that is damaged or of another model;
        KitError and DiskError if it cannot be fetched.
        """
        why = encoder_unavailable()  # before anything is fetched
        if why:
            raise KitError(
                f"NeuCodec encodes recordings with the transformers library, but {why}. Or choose "
                "`codec.kind: mel`. Speaking does not need the library."
            )
        folder = neucodec_folder(self.config)
        sha256 = require_version(folder, self.config)
        require_release_tensors(folder, library_tensors(self.config))
        return folder, sha256

    def load_release(self) -> str:
        """Load the weights of the `release`; return a description of them."""
        folder, sha256 = self.release()
        self.load_state_dict(read_tensors(folder / WEIGHTS_FILE, self.state_dict()))
        self.config = dataclasses.replace(self.config, sha256=sha256)
        return f"the released NeuCodec ({LICENCE}, SHA-256 {sha256[:12]}) in {folder}"

    @cached_property  # not a submodule, so it is not saved in the codec's file
    def encoder(self) -> nn.Module:
        return load_encoder(self.release()[0], self.config).to(self.device)

    def _apply(self, fn: Callable, recurse: bool = True) -> "NeuCodec":
        """As `nn.Module._apply`, by which `to` works: the encoder moves along."""
        if "encoder" in vars(self):  # it has been loaded
            self.encoder._apply(fn, recurse)
        return super()._apply(fn, recurse)

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        return torch.stack([encode_clip(self.encoder, row) for row in wave])

    @property
    def device(self) -> torch.device:
        return self.quantizer.project_out.weight.device

    @torch.inference_mode()
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        codes = codes.to(self.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        require_codes(codes, self.vocab_size)
        block = self.config.block
        count = codes.shape[1]
        # Blocks begin where positions in the utterance are multiples of `block`.
        cuts = range(block - first % block, count, block)
        windows = []
        for start, end in itertools.pairwise([0, *cuts, count]):
            begin = max(0, start - self.config.before)
            around = codes[:, begin : end + self.config.after]
            around = self.acoustic_decoder(self.quantizer(around))
            windows.append(around[:, start - begin : end - begin])
        return self.acoustic_decoder.head.sound(torch.cat(windows, dim=1))


# --- the decoder ----------------------------------------------------------------------------------
#
# Eight digits of four levels a code (finite scalar quantisation, Mentzer et al. 2023), convolutions
# and a transformer over all codes given, and a spectrum for each, turned into sound by overlap-add
# (Vocos: Siuzdak 2023; Llasa's X-Codec 2: Ye et al. 2025). Layers are named as in the release's
# `model.safetensors`. The release rotates queries and keys by the number of their *head* where
# rotary embeddings mean the time; both of a head rotate alike, which changes nothing and is left
# out, and no layer knows where in an utterance it is.


class DigitsToLatents(nn.Module):
    """Codes (B, N) -> latents (B, N, C); the encoder does the opposite."""

    def __init__(self, width: int):
        super().__init__()
        self.project_out = nn.Linear(len(LEVELS), width)

    def forward(self, codes: Tensor) -> Tensor:
        basis = torch.tensor([4**place for place in range(len(LEVELS))], device=codes.device)
        digits = (codes[..., None] // basis % 4 - 2) / 2  # (B, N, 8), in [-1, 1)
        return self.project_out(digits.to(self.project_out.weight.dtype))


class ResidualConvolutions(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, width, eps=1e-6)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, N)
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class NoPEAttention(nn.Module):
    """Every code attends to all others, with no positional encoding (NoPE)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        attended = F.scaled_dot_product_attention(q, k, v)  # (B, heads, N, C / heads)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class NoPELayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.self_attn = NoPEAttention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(width, 4 * width, bias=False))
        self.mlp.add_module("act", nn.SiLU())
        self.mlp.add_module("fc2", nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, C)
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class SpectrumHead(nn.Module):
    """States (B, N, C) -> the window of sound that each code adds (B, N, n)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, WINDOW + 2)  # magnitude and phase of F = n / 2 + 1
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        magnitude, phase = self.linear(x).float().chunk(2, dim=-1)
        spectrum = torch.polar(magnitude.exp().clamp(max=100.0), phase)  # as in training
        return torch.fft.irfft(spectrum, WINDOW) * self.window

    def sound(self, windows: Tensor) -> Tensor:
        """Windows (B, N, n), a code after the other -> waveform (B, L), `HOP` samples a code."""
        square = self.window.square().expand(1, windows.shape[1], -1)
        weight = overlap_add(square, HOP).clamp(min=1e-11)
        beside = (WINDOW - HOP) // 2  # a code's own samples are in the middle of its window
        return (overlap_add(windows, HOP) / weight)[:, beside:-beside]


class NeuCodecDecoder(nn.Module):
    """Latents (B, N, C') -> the windows of sound that the codes add (B, N, n)."""

    def __init__(self, config: NeuCodecConfig):
        super().__init__()
        width = config.width
        heads = config.heads
        self.fc = nn.Linear(config.latent_width, width)
        self.embed = nn.Conv1d(width, width, 7, padding=3)
        self.prior_net = nn.Sequential(*(ResidualConvolutions(width) for _ in range(2)))
        self.layers = nn.Sequential(*(NoPELayer(width, heads) for _ in range(config.layers)))
        self.post_net = nn.Sequential(*(ResidualConvolutions(width) for _ in range(2)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = SpectrumHead(width)

    def forward(self, latents: Tensor) -> Tensor:
        h = self.prior_net(self.embed(self.fc(latents).mT))
        h = self.post_net(self.layers(h.mT).mT)
        return self.head(self.norm(h.mT))


# --- the encoder ----------------------------------------------------------------------------------
#
# w2v-BERT 2.0 (Barrault et al. 2023) encodes what is said, a stack of convolutions (BigCodec: Xin
# et al. 2024) how it sounds. The input features are computed here, as by w2v-BERT's own extractor.


def encoder_unavailable() -> str:
    """Return why recordings cannot be encoded here; "" if they can."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return f"transformers is not installed ({HOW_TO_INSTALL})"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < (5, 17):  # the first with NeuCodec
        return f"transformers {version} has no NeuCodec yet ({HOW_TO_INSTALL}, and restart)"
    return ""


def library_settings(config: NeuCodecConfig):
    from transformers import NeuCodecConfig as LibraryConfig

    def sizes(width: int, layers: int, heads: int) -> dict:
        size = {"hidden_size": width, "intermediate_size": 4 * width}
        return size | {"num_hidden_layers": layers, "num_attention_heads": heads}

    semantic = sizes(config.semantic_width, config.semantic_layers, config.semantic_heads)
    semantic |= {"model_type": "wav2vec2-bert", "output_hidden_size": config.semantic_width}
    return LibraryConfig(
        **sizes(config.width, config.layers, config.heads),
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
    codes = len(mel) // 2
    return mel[: 2 * codes].reshape(codes, 2 * N_MELS)


def encode_clip(encoder: nn.Module, wave: Tensor) -> Tensor:
    """Return the codes (N,) of a clip (L,) of 16 kHz: one per full 20 ms, and at least one.

    As in the release, up to 20 ms of silence are appended, and an incomplete hop is dropped.
    """
    wave = wave.to(encoder.fc_encoder.weight.device)
    wave = F.pad(wave, (0, max(0, CODE_HOP - len(wave))))
    wave = F.pad(wave, (0, CODE_HOP - len(wave) % CODE_HOP))
    encoded = encoder.encode(wave[None, None], semantic_features(wave)[None])
    return encoded.audio_codes[0, 0].long()


# --- the file -------------------------------------------------------------------------------------


def neucodec_folder(config: NeuCodecConfig) -> Path:
    """Return `config.folder`, or the folder of the release, which is fetched once.

    All runs of this machine share it, in `HF_HOME`. Raises KitError for a folder without it,
    KitError and DiskError if it cannot be fetched.
    """
    if config.folder:
        folder = Path(config.folder).expanduser()
        if not (folder / WEIGHTS_FILE).is_file():
            raise KitError(
                f"codec.folder = {folder} has no {WEIGHTS_FILE} of NeuCodec: name the folder that "
                "has it. Its pytorch_model.bin lacks the encoder."
            )
        return folder
    from kit.base.lock import held  # not needed for speaking

    name = f"{config.repository.replace('/', '--')}@{config.revision}"
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    folder = home / "voicekit" / name
    if fetched(folder, [WEIGHTS_FILE]):
        return folder
    lock = make_folder(folder.parent) / f".{name}.lock"
    licence = ("LICENSE", "README.md")  # if they exist, to be kept with the weights
    with held(lock, f"fetching {config.repository}", math.inf, print):
        fetch_model(config.repository, config.revision, [WEIGHTS_FILE], folder, licence)
    return folder


def require_version(folder: Path, config: NeuCodecConfig) -> str:
    path = folder / WEIGHTS_FILE
    card = fetched(folder, [WEIGHTS_FILE])
    sha256 = card["files"][WEIGHTS_FILE]["sha256"] if card else file_digest(path)
    if config.sha256 not in ("", sha256):
        raise KitError(
            f"{path} is another NeuCodec than this codec was taken from (SHA-256 "
            f"{sha256[:12]}, not {config.sha256[:12]}): its codes may mean something else. Name "
            "the folder of that one as `codec.folder`, or its commit as `codec.revision`; or "
            "prepare a new run with this."
        )
    return sha256


def require_release_tensors(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Raise KitError, naming them, unless the file has exactly the tensors of `wanted`.

    Only its header is read; `wanted` may be on the meta device.
    """
    path = folder / WEIGHTS_FILE
    stored = {}
    with opened(path) as file:
        for name in file.keys():
            entry = file.get_slice(name)
            kind = FLOATS.get(entry.get_dtype(), torch.int64)
            stored[name] = torch.empty(entry.get_shape(), dtype=kind, device="meta")
    faults = describe_mismatch(stored, wanted)
    if faults:
        raise KitError(
            f"{path} is not a NeuCodec as transformers has it; {faults}. Take it from "
            "neuphonic/neucodec."
        )
