"""Audio <-> codes as a released XTTS-v2 has them: its parts (xtts_*.py) behind one contract.

Its codes say what was spoken, and hardly by whom: its sound is made of the GPT's states at the
codes and of a speaker. From codes alone the DVAE's own log-mels are sounded by Griffin-Lim, which
tells what the codes hold, and is no voice to speak with. Keeps the contract of codec.py.

Shapes: B batch, L samples, N codes, D width of the states, S speaker width, T frames, F bins.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from kit.audio.clip import resampled
from kit.audio.codec import Codec
from kit.audio.fitting import FitSchedule
from kit.audio.griffin_lim import GriffinLim
from kit.audio.reference import require_reference
from kit.audio.spectrogram import triangles
from kit.base.config import require, require_within
from kit.base.errors import KitError
from kit.releases.xtts_v2.dvae import DVAE
from kit.releases.xtts_v2.mel import (
    DVAE_FFT,
    N_MELS,
    REFERENCE_FFT,
    XTTSMel,
    XTTSMelConfig,
    htk_hz,
    require_stats,
)
from kit.releases.xtts_v2.sound import (
    mel_stats_of,
    require_rates,
    require_sound_names,
    xtts_dvae,
    xtts_speaker_encoder,
    xtts_vocoder,
)
from kit.releases.xtts_v2.speaker import SPEAKER_RATE, SpeakerEncoder
from kit.releases.xtts_v2.vocoder import (
    CODE_RATE,
    CODE_SAMPLES,
    FRAME_SAMPLES,
    VOCODER_RATE,
    HiFiGAN,
    frames_of,
    to_frames,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XTTSCodecConfig:
    """Sizes of the parts; the defaults are those of the release, whose `mel_stats` are its own."""

    kind: str = "xtts"
    mel_stats: tuple = (1.0,) * N_MELS  # what the log-mels are divided by
    codes: int = 1024  # the vocabulary
    code_width: int = 512  # of the DVAE's codebook
    dvae_width: int = 512  # channels at half the mel frames; at a quarter, twice as many
    latent_width: int = 1024  # of the GPT's states
    speaker_width: int = 512
    channels: int = 512  # of the vocoder's first stage; each has half of the one before
    filters: tuple = (32, 64, 128, 256)  # channels of the speaker encoder
    attention_width: int = 128  # of its pooling
    griffin_lim_iters: int = 24

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return CODE_RATE / CODE_SAMPLES

    def __post_init__(self):
        require_stats(self, N_MELS)
        require_within(self, 2, 2**20, "codes")
        require_within(self, 1, 65_536, "code_width", "dvae_width", "latent_width")
        require_within(self, 1, 65_536, "speaker_width", "attention_width")
        require_within(self, 16, 65_536, "channels")
        require_within(self, 8, 65_536, "filters")
        require(len(self.filters) == 4, self, "filters", "give four numbers of channels.")
        require_within(self, 0, 1000, "griffin_lim_iters")


class XTTSCodec(nn.Module, Codec):
    """The DVAE hears, HiFi-GAN speaks, and a speaker encoder listens to references."""

    config_class = XTTSCodecConfig
    sample_rate = VOCODER_RATE
    input_sample_rate = CODE_RATE
    frame_rate = CODE_RATE / CODE_SAMPLES

    def __init__(self, config: XTTSCodecConfig):
        super().__init__()
        c = config
        self.config = config
        self.mel = XTTSMel(XTTSMelConfig(n_fft=DVAE_FFT, mel_stats=c.mel_stats))
        self.reference_mel = XTTSMel(XTTSMelConfig(n_fft=REFERENCE_FFT, mel_stats=c.mel_stats))
        self.dvae = DVAE(c.codes, c.dvae_width, c.code_width)
        self.speaker_encoder = SpeakerEncoder(c.filters, c.attention_width, c.speaker_width)
        self.vocoder = HiFiGAN(c.latent_width, c.speaker_width, c.channels)
        self.griffin_lim = GriffinLim(DVAE_FFT, FRAME_SAMPLES, c.griffin_lim_iters)

    @property
    def vocab_size(self) -> int:
        return self.config.codes

    @property
    def context(self) -> int:
        """Codes to either side that the samples of a code can depend on, and none further.

        Those of codes alone. Sound made of states depends on `state_context`, which is less.
        """
        frames = self.griffin_lim.context + 2  # and two between which a frame is interpolated
        return DVAE.reach + math.ceil(frames / frames_of(1000) * 1000)

    @property
    def state_width(self) -> int:
        return self.config.latent_width

    @property
    def state_context(self) -> int:
        return self.vocoder.context

    @property
    def speaker_width(self) -> int:
        return self.config.speaker_width

    def samples(self, codes: int) -> int:
        return frames_of(codes) * FRAME_SAMPLES

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        codes = self.dvae.encode(self.mel.log_mel(wave))
        # A frame more than the sound is long: where it begins a code of its own, that is left out.
        return codes[:, : -(-wave.shape[-1] // CODE_SAMPLES)]

    @torch.inference_mode()
    def decode(
        self,
        codes: Tensor,
        first: int = 0,
        states: Tensor | None = None,
        speaker: Tensor | None = None,
    ) -> Tensor:
        """Codes (B, N) -> waveform (B, L), as `Codec.decode` does.

        `states` (B, N, D) are the GPT's after its final norm, each the one that predicted its code:
        at START and at every code but the last. `speaker` (B, S) is the `speaker_embedding` of a
        reference. With both, the sound is the release's own.
        """
        device = self.vocoder.conv_post.weight.device
        codes = codes.to(device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        if not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise KitError(f"Codes must lie in 0..{self.vocab_size - 1}, got {codes.unique()}.")
        if states is None and speaker is None:
            mel = to_frames(self.dvae.decode(codes), first)
            return self.griffin_lim(self.magnitude(mel), frames_of(first))
        self.require_states(codes, states, speaker)
        return self.vocoder(states.to(device), speaker.to(device), first)

    def require_states(self, codes: Tensor, states: Tensor | None, speaker: Tensor | None) -> None:
        """Raise KitError unless there are a state for each code and a speaker for each row."""
        wanted = {
            "states": (*codes.shape, self.config.latent_width),
            "speaker": (len(codes), self.config.speaker_width),
        }
        for name, given in (("states", states), ("speaker", speaker)):
            shape = "missing" if given is None else tuple(given.shape)
            if shape != wanted[name]:
                raise KitError(
                    f"XTTS's sound is made of states and a speaker: `{name}` must be "
                    f"{wanted[name]} for these codes, it is {shape}."
                )

    def magnitude(self, mel: Tensor) -> Tensor:
        """Log-mels (B, M, T) as the DVAE has them -> magnitudes (B, F, T), for Griffin-Lim."""
        config = self.mel.config
        hz = htk_hz(config.n_mels, config.top_hz)
        fb = triangles(hz, self.sample_rate, config.n_fft).to(mel.device)  # (F, M)
        energy = (mel * self.mel.mel_stats[:, None]).exp()
        # Each bin's power is a weighted mean of its mels': right where a spectrum is flat.
        power = fb @ energy / (fb @ fb.sum(0)).clamp(min=1e-12)[:, None]
        return power.sqrt()

    @torch.inference_mode()
    def speaker_embedding(self, wave: Tensor, sample_rate: int) -> Tensor:
        """A reference (L,) of `sample_rate` Hz -> who speaks, (S,), of length 1.

        Raises SpeechError for one that no voice can be heard in.
        """
        require_reference(wave, sample_rate)
        # By way of CODE_RATE, as references are heard elsewhere.
        wave = resampled(resampled(wave, sample_rate, CODE_RATE), CODE_RATE, SPEAKER_RATE)
        device = self.vocoder.conv_post.weight.device
        return self.speaker_encoder(wave.to(device)[None])[0]

    def fit_schedule(self, held: list[Tensor]) -> FitSchedule | None:
        raise KitError(
            "XTTS's codec is not trained here: it comes with a release. Take its folder as the "
            "start, or choose `codec.kind: mel`."
        )


def xtts_codec(sound: dict[str, Tensor], dvae: dict[str, Tensor], settings: dict) -> XTTSCodec:
    """The codec of a release, of what `load_xtts` found; in eval mode, on the CPU.

    `sound` and `dvae` are its tensors by the release's names, `settings` its configuration. Raises
    KitError for tensors that are missing, misshapen, unknown or not finite, and for parts or
    rates that do not belong together.
    """
    require_rates(settings)
    require_sound_names(sound)
    hears = xtts_dvae(dvae)
    listens = xtts_speaker_encoder(sound)
    speaks = xtts_vocoder(sound)
    layers = (listens.layer1, listens.layer2, listens.layer3, listens.layer4)
    config = XTTSCodecConfig(
        mel_stats=mel_stats_of(sound),
        codes=hears.codebook.embed.shape[1],
        code_width=hears.codebook.embed.shape[0],
        dvae_width=hears.encoder[0][0].out_channels,
        latent_width=speaks.conv_pre.in_channels,
        speaker_width=speaks.cond_layer.in_channels,
        channels=speaks.conv_pre.out_channels,
        filters=tuple(layer[0].conv1.out_channels for layer in layers),
        attention_width=listens.attention[0].out_channels,
    )
    if listens.fc.out_features != config.speaker_width:
        raise KitError(
            f"The speaker encoder gives {listens.fc.out_features} numbers, the vocoder takes "
            f"{config.speaker_width}: they are of different releases."
        )
    told = settings.get("model_args", {}).get("gpt_start_audio_token")
    if told not in (None, config.codes):
        raise KitError(
            f"The DVAE has {config.codes} codes, the configuration's GPT {told}: they are of "
            "different releases. Take dvae.pth from the same place as the weights."
        )
    codec = XTTSCodec(config)
    codec.dvae = hears
    codec.speaker_encoder = listens
    codec.vocoder = speaks
    return codec.eval()
