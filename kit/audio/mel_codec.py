"""Audio <-> discrete codes: the small mel codec behind the embedded default.

A log-mel spectrogram goes through a convolutional encoder to a few numbers per code, each rounded
to a handful of levels (fsq.py). The decoder predicts log magnitudes, sharpened against critics
where there is time for it; Griffin-Lim finds a phase, or a neural vocoder that was trained to.
Codes leave much open; where a model is at hand, whose states know text and speaker and all codes
before, the decoder takes those, too. Keeps the contract of codec.py. Knows nothing of text or the
GPT.

Shapes: B batch, L samples, T mel frames, N codes, M mels, F frequency bins, C channels, D width of
a model's states.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio.codec import Codec, CodecError, StatedClip
from kit.audio.convnext import Block
from kit.audio.fitting import Course, CourseConfig, train_course
from kit.audio.fsq import FSQ
from kit.audio.griffin_lim import GriffinLim
from kit.audio.sharpening import Views, sharpen, train_maker
from kit.audio.spectrogram import Mel, MelConfig
from kit.audio.stretches import Stretches, StretchShape, crops, stretches
from kit.audio.vocoder import Pair, Vocoder, VocoderConfig, train_vocoder, tune_vocoder
from kit.base.config import require, require_within

MOST_CODES = 2**20  # in a vocabulary: 32 times any codec of today
HELD_CROPS = 64  # stretches of held-out clips that the codec is judged by
# Nats, of a spectrogram's magnitude: a man's recordings are rated DNSMOS 2.78 after the round trip,
# without it 2.68. From -2 on rated alike, but letters are misheard (docs/measurements.md).
QUIETER_BELOW = -3.0
UNTOLD_SHARE = 0.1  # of the clips that are learnt without states, as a round trip has none
NOISE_SHARE = 0.5  # of the clips of a training step whose numbers get noise in place of rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class MelCodecConfig(MelConfig, CourseConfig, VocoderConfig):
    kind: str = "mel"
    levels: tuple = (8, 8, 5, 5)  # of each quantised number; their product is the vocabulary
    frames_per_code: int = 2  # mel frames one code stands for
    width: int = 192  # channels
    blocks: int = 3  # residual blocks on each side of the bottleneck
    griffin_lim_iters: int = 24
    magnitude_weight: float = 0.25  # of the log-magnitude loss beside the log-mel loss
    steps: int = 1200  # training steps, at least
    good: float = 0.45  # loss on held-out clips, in nats, that is good enough
    batch: int = 8  # clips per training step
    crop_frames: int = 48  # mel frames per training clip
    lr: float = 4e-3
    sharpen_steps: int = 0  # of the decoder alone, afterwards, against critics; codes stay
    state_width: int = 0  # of a model's states that the decoder takes, too; 0: none

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return self.frames_per_s / self.frames_per_code

    @property
    def crop_samples(self) -> int:
        """Of a training clip, from the middle of its first frame to that of its last."""
        return (self.crop_frames - 1) * self.hop_length

    @property
    def mel_config(self) -> MelConfig:
        """The log-mels it begins with."""
        names = [field.name for field in dataclasses.fields(MelConfig)]
        return MelConfig(**{name: getattr(self, name) for name in names})

    def __post_init__(self):
        MelConfig.__post_init__(self)
        CourseConfig.__post_init__(self)
        VocoderConfig.__post_init__(self)
        require_within(self, 2, 1000, "levels")
        vocabulary = math.prod(self.levels)
        few = 2 <= vocabulary <= MOST_CODES
        require(few, self, "levels", f"make a vocabulary of {vocabulary}, not 2 to {MOST_CODES}.")
        require_within(self, 1, 1000, "frames_per_code", "blocks")
        require_within(self, 1, 65_536, "width")
        require_within(self, 0, 1000, "griffin_lim_iters")
        require_within(self, 0, 1e6, "magnitude_weight")
        require_within(self, 1, 1e6, "batch", "crop_frames")
        require_within(self, 1e-12, 10, "lr")
        require_within(self, 0, 1e9, "sharpen_steps")
        require_within(self, 0, 65_536, "state_width")
        ok = self.crop_frames % self.frames_per_code == 0
        require(ok, self, "crop_frames", "must be a multiple of frames_per_code.")
        require(self.n_fft % self.hop_length == 0, self, "hop_length", "must divide n_fft.")


class MelCodec(nn.Module, Codec):
    """Convolutional autoencoder over log-mels with an FSQ bottleneck, and a vocoder."""

    def __init__(self, config: MelCodecConfig):
        super().__init__()
        c = config
        f = config.frames_per_code
        self.config = config
        self.mel_config = config.mel_config
        self.fsq = FSQ(config.levels)
        self.mel = Mel(config.mel_config)
        self.encoder = nn.Sequential(
            nn.Conv1d(c.n_mels, c.width, 5, padding=2),
            Block(c.width),
            nn.Conv1d(c.width, c.width, f, stride=f),
            *(Block(c.width) for _ in range(c.blocks - 1)),
        )
        self.norm = nn.LayerNorm(c.width)  # without it tanh saturates, and all codes become two
        self.to_code = nn.Linear(c.width, len(c.levels))
        self.from_code = nn.Linear(len(c.levels), c.width)
        self.from_state = nn.Linear(c.state_width, c.width) if c.state_width else None
        self.decoder = nn.Sequential(
            *(Block(c.width) for _ in range(c.blocks - 1)),
            nn.ConvTranspose1d(c.width, c.width, f, stride=f),
            *(Block(c.width) for _ in range(c.blocks)),
        )
        self.mel_head = nn.Linear(c.width, c.n_mels)
        self.magnitude_head = nn.Linear(c.width, c.n_fft // 2 + 1)
        self.griffin_lim = GriffinLim(c.n_fft, c.hop_length, c.griffin_lim_iters)
        self.vocoder = Vocoder(c, c.n_fft, c.hop_length) if c.vocoder_steps else None

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def frame_rate(self) -> float:
        """Codes per second."""
        return self.config.frame_rate

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(self.config.levels)

    @property
    def vocab_size(self) -> int:
        return math.prod(self.config.levels)

    @property
    def context(self) -> int:
        """Codes to either side that the samples of a code can depend on, and none further."""
        c = self.config
        sound = self.vocoder or self.griffin_lim
        frames = Block.reach * c.blocks + sound.context
        return Block.reach * (c.blocks - 1) + math.ceil(frames / c.frames_per_code)

    @property
    def state_width(self) -> int:
        return self.config.state_width

    @property
    def state_context(self) -> int:
        return self.context

    def quantized(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel (B, M, T), T a multiple of frames_per_code -> values (B, N, Q), codes (B, N)."""
        h = self.encoder((mel + 5) / 3)  # roughly zero mean, unit spread
        z = self.to_code(self.norm(h.mT)).float()
        return self.fsq.quantize(z, NOISE_SHARE if self.training else 0.0)

    def decode_values(
        self, values: Tensor, states: Tensor | None = None, untold: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantised values (B, N, Q) -> log-mel (B, M, T), log-magnitude (B, F, T).

        With `states` (B, N, D) of these, too, but in the rows where `untold` (B, 1, 1) is true.
        """
        h = self.from_code(values)
        if states is not None:
            told = self.from_state(states)
            h = h + (told if untold is None else told.masked_fill(untold, 0.0))
        h = self.decoder(h.mT).mT
        return self.mel_head(h).mT.float() * 3 - 5, self.magnitude_head(h).mT.float() * 3 - 3

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        return self.quantized(self._whole(self.mel.log_mel(wave)))[1]

    def encode_clips(self, waves: list[Tensor]) -> list[Tensor]:
        return self.encode_mels(*self.mel.padded(waves))

    @torch.inference_mode()
    def encode_mels(self, mel: Tensor, frames: list[int]) -> list[Tensor]:
        codes = self.quantized(self._whole(mel.to(self.fsq.levels.device)))[1]
        counts = [-(-count // self.config.frames_per_code) for count in frames]
        return [row[:count] for row, count in zip(codes, counts)]

    def _whole(self, mel: Tensor) -> Tensor:
        return F.pad(mel, (0, -mel.shape[-1] % self.config.frames_per_code), mode="replicate")

    @torch.inference_mode()
    def decode(
        self,
        codes: Tensor,
        first: int = 0,
        states: Tensor | None = None,
        speaker: Tensor | None = None,
    ) -> Tensor:
        """Codes (B, N) -> waveform (B, L), as `Codec.decode` does, without a use for `speaker`."""
        codes = codes.to(self.fsq.levels.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        if not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise CodecError(f"Codes must lie in 0..{self.vocab_size - 1}, got {codes.unique()}.")
        states = None if states is None else states.to(codes.device)
        log_magnitude = self.log_magnitude_of(codes, states)
        if self.vocoder:
            return self.vocoder(log_magnitude)
        return self.by_griffin_lim(log_magnitude, first * self.config.frames_per_code)

    def log_magnitude_of(
        self, codes: Tensor, states: Tensor | None = None, untold: Tensor | None = None
    ) -> Tensor:
        """Codes (B, N) -> log-magnitude (B, F, T); `states` and `untold` as in `decode_values`."""
        return self.decode_values(self.fsq.dequantize(codes).float(), states, untold)[1]

    def by_griffin_lim(self, log_magnitude: Tensor, first: int = 0) -> Tensor:
        """Log-magnitude (B, F, T) -> waveform (B, L); `first` is the number of its first frame."""
        return self.griffin_lim(with_quieter_pauses(log_magnitude).exp(), first)

    @torch.inference_mode()
    def round_trips(self, wave: Tensor) -> dict[str, Tensor]:
        codes = self.encode(wave[None])
        sounds = {"codec round trip": self.decode(codes)[0].cpu()}
        if self.vocoder:
            again = self.by_griffin_lim(self.log_magnitude_of(codes))
            sounds["the same codes by Griffin-Lim"] = again[0].cpu()
        return sounds

    def _cropped(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel (B, M, T) and log-magnitude (B, F, T) of (B, L), T the frames of a crop."""
        return tuple(x[..., : self.config.crop_frames] for x in self.mel(wave))

    def loss(self, wave: Tensor) -> Tensor:
        """Mean absolute error of log-mel and log-magnitude after the round trip of (B, L)."""
        mel, magnitude = self._cropped(wave)
        values, _ = self.quantized(mel)
        mel_again, magnitude_again = self.decode_values(values)
        rough = F.l1_loss(magnitude_again, magnitude)
        return F.l1_loss(mel_again, mel) + self.config.magnitude_weight * rough

    def course(self, held: list[Tensor]) -> Course:
        """Ends when the loss on `held` is low or falls no more; without any, after `steps`."""
        if not held:
            return Course(self.config)
        samples = self.config.crop_samples
        held_crops = crops(held, samples, HELD_CROPS, torch.Generator().manual_seed(0))

        @torch.no_grad()
        def look() -> float:
            self.eval()
            loss = self.loss(held_crops.to(self.mel_head.weight.device)).item()
            self.train()
            return loss

        return Course(self.config, look)

    def fit(
        self,
        waves: list[Tensor],
        device: str,
        precision: str,
        seed: int = 0,
        course: Course | None = None,
    ) -> Iterator[tuple[int, float]]:
        """Train on clips (L,), yielding (step, loss); leaves it on the CPU in eval mode.

        `course` says how long; without one, `config.steps`.
        """
        c = self.config
        generator = torch.Generator().manual_seed(seed)
        yield from train_course(
            course or Course(c),
            self,
            lambda: self.loss(crops(waves, c.crop_samples, c.batch, generator).to(device)),
            device,
            precision,
            lr=c.lr,
            betas=(0.8, 0.99),
            warmup_share=0.1,
        )

    def sharpen(self, waves: list[Tensor], device: str, seed: int = 0) -> Iterator[tuple[int, int]]:
        c = self.config
        generator = torch.Generator().manual_seed(seed)

        def views() -> Views:
            with torch.no_grad():
                wave = crops(waves, c.crop_samples, c.batch, generator).to(device)
                mel, magnitude = self._cropped(wave)
                codes = self.quantized(mel)[1]
            return self._views(mel, magnitude, codes)

        with self._training_on(device):
            for step, _ in sharpen(self._makers(), views, c.sharpen_steps, device, seed):
                yield step, c.sharpen_steps

    def train_vocoder(
        self, waves: list[Tensor], device: str, seed: int = 0
    ) -> Iterator[tuple[int, int]]:
        c = self.config
        if not c.vocoder_steps:
            return
        generator = torch.Generator().manual_seed(seed)

        @torch.no_grad()
        def pairs() -> Pair:
            wave = crops(waves, c.crop_samples, c.batch, generator).to(device)
            return self.log_magnitude_of(self.encode(wave)), wave

        with self._training_on(device):
            for step, _ in train_vocoder(self.vocoder, self.mel, pairs, device, seed):
                yield step, c.vocoder_steps

    def with_states(self, width: int) -> "MelCodec":
        codec = MelCodec(dataclasses.replace(self.config, state_width=width))
        weights = self.state_dict()
        if self.state_width != width:
            # Before it has learnt what states mean, they change nothing.
            nn.init.zeros_(codec.from_state.weight)
            nn.init.zeros_(codec.from_state.bias)
            own = codec.state_dict()
            weights.update({name: own[name] for name in ("from_state.weight", "from_state.bias")})
        codec.load_state_dict(weights)
        return codec.eval()

    def learn_states(
        self, clips: list[StatedClip], steps: int, device: str, seed: int = 0
    ) -> Iterator[tuple[int, int]]:
        batch = self.config.batch
        generator = torch.Generator().manual_seed(seed)
        train = sharpen if self.config.sharpen_steps else train_maker
        in_all = 2 * steps if self.vocoder else steps

        def views() -> Views:
            return self._stated_views(self._stretches(clips, batch, generator))

        @torch.no_grad()
        def pairs() -> Pair:
            drawn = self._stretches(clips, batch, generator)
            magnitude = self.log_magnitude_of(drawn.codes, drawn.states, drawn.untold)
            return magnitude, drawn.inner_wave

        with self._training_on(device):
            for step, _ in train(self._makers(), views, steps, device, seed):
                yield step, in_all
            if self.vocoder:  # what it is given to sound has changed
                for step, _ in tune_vocoder(self.vocoder, self.mel, pairs, steps, device, seed):
                    yield steps + step, in_all

    @contextmanager
    def _training_on(self, device: str) -> Iterator[None]:
        """On `device` while a part of it learns, and back on the CPU, without gradients."""
        self.to(device).eval()
        try:
            yield
        finally:
            self.zero_grad(set_to_none=True)
            self.cpu()

    @torch.no_grad()
    def sound_error(self, clips: list[StatedClip]) -> float:
        generator = torch.Generator().manual_seed(0)
        drawn = self._stretches(clips, HELD_CROPS, generator, untold_share=0.0)
        return self._stated_views(drawn)[2].item()

    def _stretches(
        self,
        clips: list[StatedClip],
        count: int,
        generator: torch.Generator,
        untold_share: float = UNTOLD_SHARE,
    ) -> Stretches:
        c = self.config
        shape = StretchShape(
            codes=c.crop_frames // c.frames_per_code,
            code_samples=c.frames_per_code * c.hop_length,
            samples=c.crop_samples,
            margin=self._margin * c.hop_length,
        )
        drawn = stretches(clips, shape, count, generator, untold_share)
        return drawn.to(self.fsq.levels.device)

    def _stated_views(self, drawn: Stretches) -> Views:
        with torch.no_grad():
            mel, magnitude = (x[..., self._margin : -self._margin] for x in self.mel(drawn.wave))
        return self._views(mel, magnitude, drawn.codes, drawn.states, drawn.untold)

    def _makers(self) -> list[nn.Parameter]:
        """What makes the sound of codes, and of states where it takes them."""
        parts = [self.from_code, self.decoder, self.mel_head, self.magnitude_head]
        parts += [self.from_state] if self.state_width else []
        return [p for part in parts for p in part.parameters()]

    @property
    def _margin(self) -> int:
        """Mel frames that the edge of a waveform cut out of another can change."""
        return math.ceil(self.config.n_fft / 2 / self.config.hop_length)

    def _views(
        self,
        mel: Tensor,
        magnitude: Tensor,
        codes: Tensor,
        states: Tensor | None = None,
        untold: Tensor | None = None,
    ) -> Views:
        """Log-magnitude and log-mel, the same as codes (and states) are decoded, and the error."""
        values = self.fsq.dequantize(codes).float()
        mel_again, magnitude_again = self.decode_values(values, states, untold)
        # The sound is made of magnitudes; what they are as mels is what is heard of them.
        heard = self.mel.log_scale(magnitude_again.exp())
        error = F.l1_loss(heard, mel) + F.l1_loss(mel_again, mel)
        error = error + self.config.magnitude_weight * F.l1_loss(magnitude_again, magnitude)
        return [magnitude, mel], [magnitude_again, heard], error


def with_quieter_pauses(magnitude: Tensor) -> Tensor:
    """Log-magnitudes whose quiet parts are quieter still: below `QUIETER_BELOW`, twice as far.

    What is made of codes has no true silence (log-mels end at a floor), so it hisses between words.
    """
    return magnitude - F.relu(QUIETER_BELOW - magnitude)
