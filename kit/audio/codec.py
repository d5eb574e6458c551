"""The codec interface: waveform <-> codes, streamed too; codecs made, saved and loaded by name.

Shapes: B batch, L samples, N codes, M mels, T mel frames.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kit.audio.clip import resampled
from kit.audio.fitting import FitSchedule, Losses
from kit.audio.spectrogram import Mel
from kit.base import extras
from kit.base.config import build, checked
from kit.base.errors import KitError
from kit.base.tensor_file import load_module, save_module
from kit.settings import MelConfig

# `kind` in the settings and in a codec's file -> its class, imported when it is chosen. Extras
# bring others.
CODECS = {"mel": "kit.audio.mel_codec:MelCodec"}


class CodecConfig(Protocol):
    """Settings of a codec, a frozen dataclass: section `codec` of a preset."""

    kind: str  # its name in `CODECS`, here or of an extra
    frame_rate: float  # codes per second


Progress = Iterator[tuple[int, int]]  # (step, steps) of a training


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipWithStates:
    """A recording, its codes, and the hidden states from which a model predicted them."""

    wave: Tensor  # (L,) at the codec's `sample_rate`
    codes: Tensor  # (N,)
    states: Tensor  # (N, D), each the one that predicted its code


class Codec(Protocol):
    """An `nn.Module` made of its config, which turns waveforms into codes and back.

    A subclass needs `encode`, `decode` and the attributes without a default. One with a
    `mel_config` also has `encode_mels(mel, frames)`: padded log-mels (B, M, T) of so many frames
    each -> codes (N,) of each; one with a `speaker_width`, `speaker_embedding(wave, sample_rate)`:
    reference (L,) -> (S,); one that does not decode, `references_and_codes(waves)`: clips (L,) ->
    references (M, T) and codes (N,). What `with_state_inputs` returns has `finetune_decoder(clips,
    steps, device)`, which yields (step, steps), and `decoder_error(clips)`, the loss.
    """

    config_class: type  # its `CodecConfig`
    config: CodecConfig
    sample_rate: int  # Hz, of decoded waveforms
    frame_rate: float  # codes per second
    vocab_size: int
    context: int  # codes on either side that can influence the samples of a code
    mel_config: MelConfig | None = None  # of the log-mels `encode_mels` takes; None: it takes none
    # For a codec that decodes from a model's hidden states and a speaker embedding; 0: it does not.
    state_width: int = 0
    state_context: int = 0  # `context` when decoding from states
    speaker_width: int = 0
    decodes: bool = True  # False: `decode` raises KitError, and another package makes the sound

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of values of each digit of a code, the fastest first; else the vocabulary."""
        return (self.vocab_size,)

    @property
    def input_sample_rate(self) -> int:
        """Hz, of the waveforms that `encode` takes."""
        return self.sample_rate

    def samples(self, codes: int) -> int:
        """Return how many samples the first `codes` codes of an utterance decode to."""
        return round(codes * self.sample_rate / self.frame_rate)

    @property
    def lookahead(self) -> int:
        """Codes after a code that can influence its samples."""
        return self.context

    def load_release(self) -> str:
        """Fill it with released weights and describe them; "" for a codec that is trained here."""
        return ""

    @abstractmethod
    def encode(self, wave: Tensor) -> Tensor:
        """Mono waveform (B, L) in [-1, 1], on any device -> codes (B, N) on the codec's."""

    def encode_clips(self, waves: list[Tensor]) -> list[Tensor]:
        """Clips (L,) of several lengths -> codes (N,) of each."""
        return [self.encode(wave[None])[0] for wave in waves]

    @abstractmethod
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        """Codes (B, N) -> waveform (B, L), of as many `samples`.

        `first` is the index of codes[:, 0] in its utterance: a slice with `context` codes around it
        decodes as in the full one. With a `state_width`, it also takes `states` (B, N, D), each the
        one that predicted its code, and `speaker` (B, S). Raises KitError for an unknown code.
        """

    def round_trip(self, wave: Tensor) -> Tensor:
        """Encode and decode a clip (L,) at `sample_rate`; the result is on the CPU."""
        wave = resampled(wave, self.sample_rate, self.input_sample_rate)
        return self.decode(self.encode(wave[None]))[0].cpu()

    def fit_schedule(self, held_out: list[Tensor]) -> FitSchedule | None:
        """Return how long to `fit`, evaluated on clips (L,); None for no training at all."""
        return None

    def fit(
        self, waves: list[Tensor], device: str, precision: str, schedule: FitSchedule | None = None
    ) -> Losses:
        """Train on clips (L,), yielding (step, loss); ends on the CPU in eval mode."""
        return iter(())

    def train_adversarial(self, waves: list[Tensor], device: str) -> Progress:
        """Train the decoder further, against critics; yields (step, steps). Codes stay."""
        return iter(())

    def train_vocoder(self, waves: list[Tensor], device: str) -> Progress:
        """Train its vocoder, yielding (step, steps)."""
        return iter(())

    def with_state_inputs(self, width: int) -> "Codec | None":
        """Return a copy whose decoder can learn to use states (..., `width`); None if it cannot."""
        return None


def require_codes(codes: Tensor, vocab_size: int) -> None:
    """Raise KitError for codes outside the vocabulary."""
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < vocab_size:
        raise KitError(f"Codes must be in 0..{vocab_size - 1}, got {codes.unique()}.")


@torch.inference_mode()
def mels_and_codes(
    codec: Codec, front_end: Mel, waves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-mels (M, T) by `front_end` and codes (N,) of clips (L,) at `input_sample_rate`."""
    if not codec.decodes:
        return codec.references_and_codes(waves)
    if codec.mel_config == front_end.config:  # the same log-mels are computed once
        mel, frames = front_end.padded(waves)
        mels = [row[:, :count] for row, count in zip(mel, frames)]
        return mels, codec.encode_mels(mel, frames)
    return front_end.log_mels(waves, codec.input_sample_rate), codec.encode_clips(waves)


def codec_config(values: dict) -> CodecConfig:
    """Return the settings in plain `values`. Raises KitError for an unknown kind or value."""
    kind = str(values.get("kind", "mel"))
    return build(extras.load("CODECS", kind, CODECS).config_class, values)


def make_codec(config: CodecConfig) -> Codec:
    return extras.load("CODECS", config.kind, CODECS)(config)


def save_codec(codec: Codec, path: Path, dtype: torch.dtype = torch.float32) -> None:
    save_module(path, codec, dtype, config=dataclasses.asdict(codec.config))


def load_codec(path: Path, fix: str = "run notebook 01_data_prep.") -> Codec:
    """Load the codec saved at `path`, in eval mode. Raises KitError with `fix`."""
    return load_module(path, _from_header, KitError, fix)


def _from_header(header: dict) -> Codec:
    return make_codec(codec_config(checked(header.get("config"), (dict, 0, 100), "its config")))


class AudioStream:
    """Waveform pieces while the codes are still being generated; `finish` returns the rest.

    A code's samples are final once the codec has seen `lookahead` codes after it. The last few
    codes are decoded again together with new ones: concatenated, the pieces equal `decode` of all.
    The first one comes once `lookahead` + `first` codes are known, and every further one is twice
    as long, up to `longest` codes: short pieces come sooner, long ones cost less.
    """

    def __init__(
        self, codec: Codec, first: int = 8, longest: int = 64, speaker: Tensor | None = None
    ):
        self.codec = codec
        self.speaker = speaker
        self.context = codec.context if speaker is None else codec.state_context
        self.lookahead = codec.lookahead if speaker is None else codec.state_context
        self.first = first
        self.longest = longest
        self._reset()

    def _reset(self) -> None:
        self.codes = torch.zeros(0, dtype=torch.long)  # those still needed, on their device
        self.states = None  # (N, D) of `codes`
        self.start = 0  # index of codes[0] in the utterance
        self.returned = 0  # codes whose samples were returned
        self.min_codes = self.first  # final codes that are worth decoding

    def push(self, codes: Tensor, states: Tensor | None = None) -> Tensor:
        """Add codes (N,), with a speaker also states (N, D); return the samples (L,) final now."""
        self.codes = torch.cat((self.codes.to(codes.device), codes))  # does not wait for a device
        if self.speaker is not None:
            self.states = states if self.states is None else torch.cat((self.states, states))
        final = self.start + len(self.codes) - self.lookahead
        if final - self.returned < self.min_codes:
            return torch.zeros(0)
        self.min_codes = min(2 * self.min_codes, self.longest)
        return self._decode_until(final)

    def finish(self) -> Tensor:
        """Return the remaining samples (L,). The next push starts another utterance."""
        end = self.start + len(self.codes)
        wave = self._decode_until(end) if end > self.returned else torch.zeros(0)
        self._reset()
        return wave

    def _decode_until(self, end: int) -> Tensor:
        """Return samples of the codes from `returned` to `end`; drop codes no longer needed."""
        voice = {}
        if self.speaker is not None:
            voice = {"states": self.states[None], "speaker": self.speaker[None]}
        wave = self.codec.decode(self.codes[None], self.start, **voice)[0].cpu()
        samples = self.codec.samples
        first_sample = samples(self.start)
        wave = wave[samples(self.returned) - first_sample : samples(end) - first_sample]
        dropped = max(0, end - self.context - self.start)
        self.codes = self.codes[dropped:]
        if self.states is not None:
            self.states = self.states[dropped:]
        self.start += dropped
        self.returned = end
        return wave
