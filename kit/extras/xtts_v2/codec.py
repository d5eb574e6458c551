"""Audio <-> codes with the DVAE, speaker encoder and HiFi-GAN of a released XTTS-v2.

A code holds what was spoken and little of the voice: HiFi-GAN makes sound of the GPT's hidden
states at the codes and a speaker vector. Codes alone are decoded by the DVAE and Griffin-Lim, which
lets you hear what the codes hold but is no voice to speak with. Layers are named as in the release.

Shapes: B batch, L samples, N codes, D width of the states, S speaker width, M mels, T mel frames
(of the DVAE, 4 N), C channels, F bins.
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.clip import resampled
from kit.audio.codec import Codec, require_codes
from kit.audio.fitting import FitSchedule
from kit.audio.spectrogram import Mel, require_reference, triangles
from kit.audio.vocoder import GriffinLim
from kit.base.config import Section, require, require_within, within
from kit.base.errors import KitError
from kit.base.tensor_file import describe_mismatch, require_finite
from kit.extras.xtts_v2 import vocoder
from kit.extras.xtts_v2.tensor_names import MEL_STATS, SPEAKER, VOCODER
from kit.settings import MelConfig

# Of the log-mels of the DVAE and of the speaker conditioning, in samples.
DVAE_FFT = 1024
REFERENCE_FFT = 2048
N_MELS = 80
RESIDUAL_BLOCKS = 3
# Kept from training of the DVAE: running sums of the codebook and of how codes are used.
DVAE_TRAINING = ("codebook.cluster_size", "codebook.embed_avg", "discrete_loss.")
# {field of the configuration: (tensor, dimension) that gives it}
SIZES = {
    "codes": ("dvae.codebook.embed", 1),
    "code_width": ("dvae.codebook.embed", 0),
    "dvae_width": ("dvae.encoder.0.0.weight", 0),
    "latent_width": ("vocoder.conv_pre.weight", 1),
    "speaker_width": ("vocoder.cond_layer.weight", 1),
    "channels": ("vocoder.conv_pre.weight", 0),
    "attention_width": ("speaker_encoder.attention.0.weight", 0),
}
SAME_RELEASE = "Take all files from the same release."


# --- log-mels and the DVAE ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTSMelConfig(MelConfig):
    """Settings of the log-mels; equal configurations give equal numbers."""

    kind: str = "xtts"
    win_length: int = 1024  # samples of the window, centred in n_fft
    top_hz: int = 8000  # of the highest mel
    mel_stats: tuple = within((), -1e4, 1e4)  # each log-mel is divided by its own number

    def __post_init__(self):
        super().__post_init__()
        require_within(self, 1, self.n_fft, "win_length")
        require_within(self, 100, self.sample_rate // 2, "top_hz")
        require_stats(self, self.n_mels)


def require_stats(config, n_mels: int) -> None:
    fix = f"give {n_mels} numbers, one for each mel, none of them 0: the release's own."
    require(len(config.mel_stats) == n_mels, config, "mel_stats", fix)
    for number in config.mel_stats:  # log-mels are in -12 to 10, so a scale beyond these is damage
        plausible = isinstance(number, int | float) and 1e-4 <= abs(number) <= 1e4
        require(plausible, config, "mel_stats", fix)


class XTTSMel(Mel):
    """Waveform (B, L) -> log-mel (B, M, T)."""

    config_class = XTTSMelConfig
    in_pieces = True

    def __init__(self, config: XTTSMelConfig):
        super().__init__(config)
        hz = htk_hz(config.n_mels, config.top_hz)
        self.spectrogram.window = nn.Buffer(torch.hann_window(config.win_length))
        self.scale.fb = nn.Buffer(triangles(hz, config.sample_rate, config.n_fft))
        self.mel_stats = nn.Buffer(torch.tensor(config.mel_stats), persistent=False)

    def log_scale(self, magnitude: Tensor) -> Tensor:
        mel = (magnitude.square().mT @ self.scale.fb).mT
        return mel.clamp(min=1e-5).log() / self.mel_stats[:, None]


def htk_hz(n_mels: int, top_hz: float) -> Tensor:
    """Return frequencies (M + 2,), equally spaced on HTK's mel scale, from 0 to `top_hz`."""
    top = 2595 * math.log10(1 + top_hz / 700)
    return 700 * (10 ** (torch.linspace(0, top, n_mels + 2) / 2595) - 1)


class DVAEBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T)
        return x + self.net(x)


class UpsampleBlock(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv = nn.Conv1d(width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T) -> (B, C', 2 T)
        return self.conv(x.repeat_interleave(2, dim=-1))


class Codebook(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embed = nn.Buffer(torch.randn(width, vocab_size))

    def nearest(self, x: Tensor) -> Tensor:
        """Vectors (B, N, C) -> codes (B, N)."""
        squares = x.square().sum(-1, keepdim=True)  # constant, but it rounds as in training
        return (squares - 2 * x @ self.embed + self.embed.square().sum(0)).argmin(-1)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> vectors (B, N, C)."""
        return F.embedding(codes, self.embed.T)


class DVAE(nn.Module):
    """Log-mel (B, M, T) <-> codes (B, N); the defaults are the sizes of the release.

    Convolutions halve the frames twice, and the nearest entry of a codebook is the code (Betker
    2023; van den Oord et al. 2017).
    """

    reach = 2 * RESIDUAL_BLOCKS + 1  # codes to either side that a decoded frame depends on

    def __init__(self, vocab_size: int = 1024, width: int = 512, code_width: int = 512):
        super().__init__()
        wide = 2 * width
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv1d(N_MELS, width, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(width, wide, 3, stride=2, padding=1), nn.ReLU()),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Conv1d(wide, code_width, 1),
        )
        self.codebook = Codebook(vocab_size, code_width)
        self.decoder = nn.Sequential(
            nn.Conv1d(code_width, wide, 1),
            *(DVAEBlock(wide) for _ in range(RESIDUAL_BLOCKS)),
            nn.Sequential(UpsampleBlock(wide, wide), nn.ReLU()),
            nn.Sequential(UpsampleBlock(wide, width), nn.ReLU()),
            nn.Conv1d(width, N_MELS, 1),
        )

    def encode(self, mel: Tensor) -> Tensor:
        """Log-mel (B, M, T) -> codes (B, N), one for every four frames, the last may have fewer."""
        return self.codebook.nearest(self.encoder(mel).mT)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, N) -> log-mel (B, M, 4 N)."""
        return self.decoder(self.codebook(codes).mT)


# --- the codec ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTSCodecConfig(Section):
    """Sizes of the parts; the defaults are those of the release, except for `mel_stats`."""

    kind: str = "xtts"
    mel_stats: tuple = within((1.0,) * N_MELS, -1e4, 1e4)  # divisors of the log-mels
    codes: int = within(1024, 2, 2**20)  # the vocabulary
    code_width: int = within(512, 1, 8192)  # of the DVAE's codebook
    # Channels after the first halving; twice as many after the second.
    dvae_width: int = within(512, 1, 8192)
    latent_width: int = within(1024, 1, 8192)  # of the GPT's states
    speaker_width: int = within(512, 1, 8192)
    channels: int = within(512, 16, 8192)  # of the vocoder's first stage, halved by each upsampling
    filters: tuple[int, ...] = within((32, 64, 128, 256), 8, 8192)  # of the speaker encoder
    attention_width: int = within(128, 1, 8192)  # of its pooling
    griffin_lim_iters: int = within(24, 0, 1000)
    frame_rate: ClassVar[float] = vocoder.CODE_RATE / vocoder.CODE_SAMPLES

    def __post_init__(self):
        super().__post_init__()
        require_stats(self, N_MELS)
        require(len(self.filters) == 4, self, "filters", "give four numbers of channels.")


class XTTSCodec(nn.Module, Codec):
    """Encodes with the DVAE, decodes with HiFi-GAN; embeds references with a speaker encoder."""

    config_class = XTTSCodecConfig
    sample_rate = vocoder.VOCODER_RATE
    input_sample_rate = vocoder.CODE_RATE
    frame_rate = XTTSCodecConfig.frame_rate
    state_context = vocoder.HiFiGAN.context

    def __init__(self, config: XTTSCodecConfig):
        super().__init__()
        c = config
        self.config = config
        self.mel = XTTSMel(XTTSMelConfig(n_fft=DVAE_FFT, mel_stats=c.mel_stats))
        self.reference_mel = XTTSMel(XTTSMelConfig(n_fft=REFERENCE_FFT, mel_stats=c.mel_stats))
        self.dvae = DVAE(c.codes, c.dvae_width, c.code_width)
        self.speaker_encoder = vocoder.SpeakerEncoder(c.filters, c.attention_width, c.speaker_width)
        self.vocoder = vocoder.HiFiGAN(c.latent_width, c.speaker_width, c.channels)
        self.griffin_lim = GriffinLim(DVAE_FFT, vocoder.FRAME_SAMPLES, c.griffin_lim_iters)
        self.vocab_size = c.codes
        self.state_width = c.latent_width
        self.speaker_width = c.speaker_width
        frames = self.griffin_lim.context + 2  # a frame is interpolated between two
        self.context = DVAE.reach + math.ceil(frames / vocoder.frames_of(1000) * 1000)

    def samples(self, codes: int) -> int:
        return vocoder.frames_of(codes) * vocoder.FRAME_SAMPLES

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        codes = self.dvae.encode(self.mel.log_mel(wave))
        # The log-mel has one more frame than the wave is long, which may start a code too many.
        return codes[:, : -(-wave.shape[-1] // vocoder.CODE_SAMPLES)]

    @torch.inference_mode()
    def decode(
        self,
        codes: Tensor,
        first: int = 0,
        states: Tensor | None = None,
        speaker: Tensor | None = None,
    ) -> Tensor:
        """Codes (B, N) -> waveform (B, L); `first` is the position of codes[:, 0].

        `states` (B, N, D) are the GPT's after its final norm, each the one that predicted its code:
        at START and at every code but the last. `speaker` (B, S) is the `speaker_embedding` of a
        reference. Give both to get the release's own sound.
        """
        device = self.vocoder.conv_post.weight.device
        codes = codes.to(device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        require_codes(codes, self.vocab_size)
        if states is None and speaker is None:
            mel = vocoder.to_frames(self.dvae.decode(codes), first)
            return self.griffin_lim(self.magnitude(mel), vocoder.frames_of(first))
        assert states.shape == (*codes.shape, self.state_width)
        assert speaker.shape == (len(codes), self.speaker_width)
        return self.vocoder(states.to(device), speaker.to(device), first)

    def magnitude(self, mel: Tensor) -> Tensor:
        """Log-mels (B, M, T) of the DVAE -> magnitudes (B, F, T) at 24 kHz, for Griffin-Lim."""
        config = self.mel.config
        hz = htk_hz(config.n_mels, config.top_hz)
        fb = triangles(hz, self.sample_rate, config.n_fft).to(mel.device)  # (F, M)
        energy = (mel * self.mel.mel_stats[:, None]).exp()
        # A bin's power is the weighted mean of its mels': exact for a flat spectrum.
        power = fb @ energy / (fb @ fb.sum(0)).clamp(min=1e-12)[:, None]
        return power.sqrt()

    @torch.inference_mode()
    def speaker_embedding(self, wave: Tensor, sample_rate: int) -> Tensor:
        """Return the speaker vector (S,), of length 1, of a reference (L,).

        Raises SpeechError for one that is too short or silent.
        """
        require_reference(wave, sample_rate)
        # By way of the rate of references elsewhere.
        wave = resampled(wave, sample_rate, vocoder.CODE_RATE)
        wave = resampled(wave, vocoder.CODE_RATE, vocoder.SPEAKER_RATE)
        device = self.vocoder.conv_post.weight.device
        return self.speaker_encoder(wave.to(device)[None])[0]

    def fit_schedule(self, held: list[Tensor]) -> FitSchedule | None:
        raise KitError(
            "XTTS's codec is not trained here: it comes with a release. Start from the folder "
            "of one, or choose `codec.kind: mel`."
        )


def xtts_codec(sound: dict[str, Tensor], dvae: dict[str, Tensor], settings: dict) -> XTTSCodec:
    """Return the codec of a release, in eval mode, on the CPU.

    `sound` and `dvae` are tensors by the release's names; `settings` is its config.json. Raises
    KitError for tensors that are missing, unknown, misshapen or damaged, and for parts that do not
    belong together.
    """
    if not dvae:
        raise KitError(
            "There is no DVAE, which encodes recordings: put dvae.pth, from where the model was "
            "published, beside its weights."
        )
    tensors = {f"dvae.{n}": t for n, t in dvae.items() if not n.startswith(DVAE_TRAINING)}
    for part, prefix in (("speaker_encoder.", SPEAKER), ("vocoder.", VOCODER)):
        stored = {n: t for n, t in sound.items() if n.startswith(prefix)}
        tensors |= {part + n.removeprefix(prefix): t for n, t in fold_weight_norm(stored).items()}
    sizes = {}
    for field, (name, dim) in SIZES.items():
        if name in tensors and tensors[name].ndim > dim:  # else it is reported below
            sizes[field] = tensors[name].shape[dim]
    filters = [tensors.get(f"speaker_encoder.layer{i}.0.conv1.weight") for i in range(1, 5)]
    if all(weight is not None for weight in filters):
        sizes["filters"] = tuple(len(weight) for weight in filters)
    codec = XTTSCodec(XTTSCodecConfig(mel_stats=mel_stats_of(sound), **sizes))
    prefixes = ("speaker_encoder.", "vocoder.", "dvae.")
    wanted = {n: t for n, t in codec.state_dict().items() if n.startswith(prefixes)}
    mismatch = describe_mismatch(tensors, wanted)
    if mismatch:
        raise KitError(f"Its sound is not that of an XTTS-v2; {mismatch}. {SAME_RELEASE}")
    codes = settings.get("model_args", {}).get("gpt_start_audio_token")
    if codes not in (None, codec.vocab_size):
        raise KitError(
            f"The DVAE has {codec.vocab_size} codes, the configuration's GPT {codes}. "
            f"{SAME_RELEASE}"
        )
    require_finite(tensors, "Its sound")
    codec.load_state_dict(tensors, strict=False)  # the rest are spectrograms' constants
    return codec.eval()


def mel_stats_of(sound: dict[str, Tensor]) -> tuple[float, ...]:
    stats = sound.get(MEL_STATS)
    if stats is None or stats.shape != (N_MELS,) or not stats.is_floating_point():
        actual = "missing" if stats is None else f"{tuple(stats.shape)} of {stats.dtype}"
        raise KitError(
            f"{MEL_STATS} must be {N_MELS} numbers, none of them 0; it is {actual}. Put the "
            "release's mel_stats.pth beside its weights."
        )
    return tuple(stats.float().tolist())


def fold_weight_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace each pair of norms and directions by the weight (Salimans and Kingma 2016)."""
    today = "parametrizations.weight.original"  # older names are weight_g and weight_v
    folded = {}
    for name, tensor in tensors.items():
        name = name.replace("weight_g", f"{today}0").replace("weight_v", f"{today}1")
        folded[name] = tensor
    for name in list(folded):
        layer = name.removesuffix(f"{today}1")
        if layer != name and f"{layer}{today}0" in folded:
            norms = folded.pop(f"{layer}{today}0").float()
            v = folded.pop(name).float()
            folded[f"{layer}weight"] = v * (norms / v.flatten(1).norm(dim=1).view(norms.shape))
    return folded
