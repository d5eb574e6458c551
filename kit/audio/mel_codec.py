"""The built-in codec: log-mel -> codes -> log-magnitude -> waveform.

A convolutional encoder turns log-mels into a few numbers per code, each rounded to a handful of
levels (FSQ). The decoder predicts log-magnitudes; Griffin-Lim or a neural vocoder finds the phase.
The decoder can also take the hidden states of the model that predicted the codes.

Shapes: B batch, L samples, T mel frames, N codes, M mels, F frequency bins, C channels, Q numbers
per code, D width of a model's hidden states.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.audio import vocoder
from kit.audio.codec import ClipWithStates, Codec, Progress, require_codes
from kit.audio.fitting import FSQ, ConvNeXtBlock, FitSchedule, Losses, fit_model
from kit.audio.spectrogram import Mel
from kit.settings import MelCodecConfig

HELD_OUT_CROPS = 64  # per evaluation
# Log-magnitude: after the round trip a man's recordings score DNSMOS 2.78, without this 2.68. From
# -2 on the score stays and letters are misheard (docs/measurements-archive.md).
PAUSE_LEVEL = -3.0
DROPPED_SHARE = 0.1  # of the crops: trained without states, as a round trip has none
NOISE_SHARE = 0.5  # of the crops: trained with noise instead of rounding


class StateCrops(NamedTuple):
    """Crops of recordings with their codes and a model's states."""

    wave: Tensor  # (B, L), margins included
    codes: Tensor  # (B, N)
    states: Tensor  # (B, N, D), each the one that predicted its code
    dropped: Tensor  # (B, 1, 1): rows to be decoded without states


class MelCodec(nn.Module, Codec):
    """Convolutional autoencoder over log-mels with an FSQ bottleneck, and a vocoder."""

    config_class = MelCodecConfig

    def __init__(self, config: MelCodecConfig):
        super().__init__()
        c = config
        f = config.frames_per_code
        self.config = config
        self.sample_rate = c.sample_rate
        self.frame_rate = c.frame_rate
        self.vocab_size = math.prod(c.levels)
        self.state_width = c.state_width
        self.mel_config = c.mel_config
        self.fsq = FSQ(c.levels)
        self.mel = Mel(c.mel_config)
        self.encoder = nn.Sequential(
            nn.Conv1d(c.n_mels, c.width, 5, padding=2),
            ConvNeXtBlock(c.width),
            nn.Conv1d(c.width, c.width, f, stride=f),
            *(ConvNeXtBlock(c.width) for _ in range(c.blocks - 1)),
        )
        self.norm = nn.LayerNorm(c.width)  # without it tanh saturates and two codes are left
        self.to_code = nn.Linear(c.width, len(c.levels))
        self.from_code = nn.Linear(len(c.levels), c.width)
        self.from_state = nn.Linear(c.state_width, c.width) if c.state_width else None
        self.decoder = nn.Sequential(
            *(ConvNeXtBlock(c.width) for _ in range(c.blocks - 1)),
            nn.ConvTranspose1d(c.width, c.width, f, stride=f),
            *(ConvNeXtBlock(c.width) for _ in range(c.blocks)),
        )
        self.mel_head = nn.Linear(c.width, c.n_mels)
        self.magnitude_head = nn.Linear(c.width, c.n_fft // 2 + 1)
        self.griffin_lim = vocoder.GriffinLim(c.n_fft, c.hop_length, c.griffin_lim_iters)
        self.vocoder = None
        if c.vocoder_steps:
            self.vocoder = vocoder.Vocoder(c.vocoder_width, c.vocoder_blocks, c.n_fft, c.hop_length)
        reach = ConvNeXtBlock.reach
        frames = reach * c.blocks + (self.vocoder or self.griffin_lim).context
        self.context = reach * (c.blocks - 1) + math.ceil(frames / f)
        self.state_context = self.context

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(self.config.levels)

    def quantized(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel (B, M, T), T a multiple of frames_per_code -> values (B, N, Q), codes (B, N)."""
        h = self.encoder((mel + 5) / 3)  # roughly zero mean, unit variance
        z = self.to_code(self.norm(h.mT)).float()
        return self.fsq.quantize(z, NOISE_SHARE if self.training else 0.0)

    def decode_values(
        self, values: Tensor, states: Tensor | None = None, dropped: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantised values (B, N, Q) -> log-mel (B, M, T), log-magnitude (B, F, T).

        `states` (B, N, D) are used as well, except in rows where `dropped` (B, 1, 1) is true.
        """
        h = self.from_code(values)
        if states is not None:
            offset = self.from_state(states)
            h = h + (offset if dropped is None else offset.masked_fill(dropped, 0.0))
        h = self.decoder(h.mT).mT
        return self.mel_head(h).mT.float() * 3 - 5, self.magnitude_head(h).mT.float() * 3 - 3

    @torch.inference_mode()
    def encode(self, wave: Tensor) -> Tensor:
        return self.quantized(self._pad_frames(self.mel.log_mel(wave)))[1]

    def encode_clips(self, waves: list[Tensor]) -> list[Tensor]:
        return self.encode_mels(*self.mel.padded(waves))

    @torch.inference_mode()
    def encode_mels(self, mel: Tensor, frames: list[int]) -> list[Tensor]:
        codes = self.quantized(self._pad_frames(mel.to(self.fsq.levels.device)))[1]
        counts = [-(-count // self.config.frames_per_code) for count in frames]
        return [row[:count] for row, count in zip(codes, counts)]

    def _pad_frames(self, mel: Tensor) -> Tensor:
        return F.pad(mel, (0, -mel.shape[-1] % self.config.frames_per_code), mode="replicate")

    @torch.inference_mode()
    def decode(
        self, codes: Tensor, first: int = 0, states: Tensor | None = None, speaker: object = None
    ) -> Tensor:
        """Codes (B, N) -> waveform (B, L); `speaker` is not used."""
        codes = codes.to(self.fsq.levels.device)
        if not codes.numel():
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        require_codes(codes, self.vocab_size)
        states = None if states is None else states.to(codes.device)
        log_magnitude = self.log_magnitude_of(codes, states)
        if self.vocoder:
            return self.vocoder(log_magnitude)
        return self.by_griffin_lim(log_magnitude, first * self.config.frames_per_code)

    def log_magnitude_of(
        self, codes: Tensor, states: Tensor | None = None, dropped: Tensor | None = None
    ) -> Tensor:
        """Codes (B, N) -> log-magnitude (B, F, T); see `decode_values`."""
        return self.decode_values(self.fsq.dequantize(codes).float(), states, dropped)[1]

    def by_griffin_lim(self, log_magnitude: Tensor, first: int = 0) -> Tensor:
        """Log-magnitude (B, F, T) -> waveform (B, L); `first` is the index of its first frame."""
        # Log-mels end at a floor, so decoded pauses hiss: below PAUSE_LEVEL go twice as far down.
        log_magnitude = log_magnitude - F.relu(PAUSE_LEVEL - log_magnitude)
        return self.griffin_lim((self.config.griffin_lim_power * log_magnitude).exp(), first)

    def _crop_spectrograms(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel (B, M, T) and log-magnitude (B, F, T) of crops (B, L)."""
        return tuple(x[..., : self.config.crop_frames] for x in self.mel(wave))

    def loss(self, wave: Tensor) -> Tensor:
        """L1 loss of log-mel and log-magnitude after a round trip of crops (B, L)."""
        mel, magnitude = self._crop_spectrograms(wave)
        values, _ = self.quantized(mel)
        decoded_mel, decoded_magnitude = self.decode_values(values)
        magnitude_loss = F.l1_loss(decoded_magnitude, magnitude)
        return F.l1_loss(decoded_mel, mel) + self.config.magnitude_weight * magnitude_loss

    def fit_schedule(self, held_out: list[Tensor]) -> FitSchedule:
        if not held_out:
            return FitSchedule(self.config)
        samples = self.config.crop_samples
        batch = vocoder.crops(held_out, samples, HELD_OUT_CROPS, torch.Generator().manual_seed(0))

        @torch.no_grad()
        def held_out_loss() -> float:
            return self.loss(batch.to(self.mel_head.weight.device)).item()

        return FitSchedule(self.config, held_out_loss)

    def _draw_crops(self, waves: list[Tensor], device: str) -> Callable[[], Tensor]:
        generator = torch.Generator().manual_seed(0)
        c = self.config
        return lambda: vocoder.crops(waves, c.crop_samples, c.batch, generator).to(device)

    def fit(
        self, waves: list[Tensor], device: str, precision: str, schedule: FitSchedule | None = None
    ) -> Losses:
        draw = self._draw_crops(waves, device)
        schedule = schedule or FitSchedule(self.config)
        adamw = {"lr": self.config.lr, "betas": (0.8, 0.99), "warmup_share": 0.1}
        yield from fit_model(schedule, self, lambda: self.loss(draw()), device, precision, **adamw)

    def train_adversarial(self, waves: list[Tensor], device: str) -> Progress:
        draw = self._draw_crops(waves, device)
        total = self.config.sharpen_steps

        def compare() -> vocoder.Comparison:
            with torch.no_grad():
                mel, magnitude = self._crop_spectrograms(draw())
                codes = self.quantized(mel)[1]
            return self._compare(mel, magnitude, codes)

        parameters = self._decoder_parameters()
        losses = vocoder.train_generator(parameters, compare, total, adversarial=True)
        return self._train(losses, total, device)

    def train_vocoder(self, waves: list[Tensor], device: str) -> Progress:
        total = self.config.vocoder_steps
        if not total:
            return iter(())
        draw = self._draw_crops(waves, device)

        @torch.no_grad()
        def pairs() -> vocoder.Pair:
            wave = draw()
            return self.log_magnitude_of(self.encode(wave)), wave

        losses = vocoder.train_vocoder(self.vocoder, self.mel, pairs, total)
        return self._train(losses, total, device)

    def with_state_inputs(self, width: int) -> "MelCodec":
        codec = MelCodec(dataclasses.replace(self.config, state_width=width))
        weights = self.state_dict()
        if self.state_width != width:
            # Untrained, states change nothing.
            nn.init.zeros_(codec.from_state.weight)
            nn.init.zeros_(codec.from_state.bias)
            weights.update(codec.from_state.state_dict(prefix="from_state."))
        codec.load_state_dict(weights)
        return codec.eval()

    def finetune_decoder(self, clips: list[ClipWithStates], steps: int, device: str) -> Progress:
        batch = self.config.batch
        generator = torch.Generator().manual_seed(0)

        def compare() -> vocoder.Comparison:
            return self._compare_states(self.state_crops(clips, batch, generator))

        @torch.no_grad()
        def pairs() -> vocoder.Pair:
            drawn = self.state_crops(clips, batch, generator)
            magnitude = self.log_magnitude_of(drawn.codes, drawn.states, drawn.dropped)
            margin = self._margin * self.config.hop_length
            return magnitude, drawn.wave[:, margin:-margin]

        adversarial = self.config.sharpen_steps > 0
        losses = vocoder.train_generator(self._decoder_parameters(), compare, steps, adversarial)
        if not self.vocoder:
            return self._train(losses, steps, device)
        # Its input has changed.
        more = vocoder.train_vocoder(self.vocoder, self.mel, pairs, steps, l1_share=0.0)
        return self._train(itertools.chain(losses, more), 2 * steps, device)

    def _train(self, losses: Losses, steps: int, device: str) -> Progress:
        """Train on `device`; end on the CPU without gradients, also when it fails."""
        self.to(device).eval()
        try:
            for step, _ in enumerate(losses, 1):
                yield step, steps
        finally:
            self.zero_grad(set_to_none=True)
            self.cpu()

    @torch.no_grad()
    def decoder_error(self, clips: list[ClipWithStates]) -> float:
        generator = torch.Generator().manual_seed(0)
        drawn = self.state_crops(clips, HELD_OUT_CROPS, generator, dropped_share=0.0)
        return self._compare_states(drawn)[2].item()

    def state_crops(
        self,
        clips: list[ClipWithStates],
        count: int,
        generator: torch.Generator,
        dropped_share: float = DROPPED_SHARE,
    ) -> StateCrops:
        """Draw `count` crops; those of too short a clip repeat its last code, in silence."""
        c = self.config
        codes = c.crop_frames // c.frames_per_code
        margin = self._margin * c.hop_length
        length = c.crop_samples + 2 * margin
        drawn = []
        for _ in range(count):
            clip = clips[int(torch.randint(len(clips), (), generator=generator))]
            starts = max(1, len(clip.codes) - codes + 1)
            start = int(torch.randint(starts, (), generator=generator))
            index = torch.arange(start, start + codes).clamp(max=len(clip.codes) - 1)
            first = start * c.frames_per_code * c.hop_length - margin
            wave = F.pad(clip.wave, (max(0, -first), max(0, first + length - len(clip.wave))))
            wave = wave[max(0, first) :][:length]
            drawn.append((wave, clip.codes[index], clip.states[index].float()))
        dropped = torch.rand(count, 1, 1, generator=generator) < dropped_share
        parts = (*map(torch.stack, zip(*drawn)), dropped)
        return StateCrops(*(part.to(self.fsq.levels.device) for part in parts))

    @property
    def _margin(self) -> int:
        """Mel frames that cutting a waveform out of a longer one can change."""
        return math.ceil(self.config.n_fft / 2 / self.config.hop_length)

    def _compare_states(self, drawn: StateCrops) -> vocoder.Comparison:
        with torch.no_grad():
            mel, magnitude = (x[..., self._margin : -self._margin] for x in self.mel(drawn.wave))
        return self._compare(mel, magnitude, drawn.codes, drawn.states, drawn.dropped)

    def _decoder_parameters(self) -> Iterator[nn.Parameter]:
        for part in (self.from_code, self.decoder, self.mel_head, self.magnitude_head):
            yield from part.parameters()
        if self.from_state:
            yield from self.from_state.parameters()

    def _compare(
        self,
        mel: Tensor,
        magnitude: Tensor,
        codes: Tensor,
        states: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> vocoder.Comparison:
        """Compare log-magnitude and log-mel with those decoded from codes (and states)."""
        values = self.fsq.dequantize(codes).float()
        decoded_mel, decoded_magnitude = self.decode_values(values, states, dropped)
        # The waveform is made of the magnitudes, so their mels are compared as well.
        audible_mel = self.mel.log_scale(decoded_magnitude.exp())
        error = F.l1_loss(audible_mel, mel) + F.l1_loss(decoded_mel, mel)
        error = error + self.config.magnitude_weight * F.l1_loss(decoded_magnitude, magnitude)
        return [magnitude, mel], [decoded_magnitude, audible_mel], error
