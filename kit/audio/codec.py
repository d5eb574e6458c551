"""What a codec is: sound to codes and back, and nothing that only one of them has.

Whoever prepares, trains, evaluates or speaks knows a codec by this contract alone. A new one is a
file of its own, and an entry in `CODECS` (codec_kinds.py).

Shapes: B batch, L samples, N codes, M mels, T mel frames.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from kit.audio.fitting import Course
from kit.audio.spectrogram import Mel, MelConfig, unpadded
from kit.audio.waveform import resampled


class CodecError(ValueError):
    """A codec that is missing, damaged or of another shape than its configuration."""


class CodecConfig(Protocol):
    """Plain settings of a codec, a frozen dataclass: a preset's section `codec`."""

    kind: str  # its name in `CODECS`

    @property
    def frame_rate(self) -> float:
        """Codes per second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatedClip:
    """A recording, its codes, and what a model that was told them knew at each."""

    wave: Tensor  # (L,) at the codec's `sample_rate`
    codes: Tensor  # (N,)
    states: Tensor  # (N, D), each the one that foretold its code


class Codec(Protocol):
    """Sound <-> codes: an `nn.Module` made of a `CodecConfig`, whose weights say all that it is.

    One that inherits from this needs `encode`, `decode` and the figures; what else is here serves
    as it stands. Making one gives the shape alone, at no cost: weights are trained by `fit`, taken
    by `take_release`, or loaded from a file.
    """

    config: CodecConfig
    sample_rate: int  # Hz, of the waveforms that come out
    frame_rate: float  # codes per second
    vocab_size: int
    context: int  # codes to either side that the samples of a code can depend on, none further
    mel_config: MelConfig | None = None  # of the log-mels `encode_mels` takes; None: it takes none
    # Of a codec that can make its sound of a model's states and a speaker; 0 where it cannot.
    state_width: int = 0  # of the states that its sound is made of
    state_context: int = 0  # as `context`, of such sound
    speaker_width: int = 0  # of who speaks; 0 where the states tell enough of that

    @property
    def levels(self) -> tuple[int, ...]:
        """Of each number that a code stands for, the first changes fastest; else the vocabulary."""
        return (self.vocab_size,)

    @property
    def heard_rate(self) -> int:
        """Hz, of the waveforms that go in: mostly that of those that come out."""
        return self.sample_rate

    def samples(self, codes: int) -> int:
        """How many samples the first `codes` codes of an utterance last."""
        return round(codes * self.sample_rate / self.frame_rate)

    @property
    def ahead(self) -> int:
        """Codes after a code that its samples can depend on; before it, `context` of them."""
        return self.context

    def take_release(self, progress: Callable) -> str:
        """Take weights that were trained elsewhere; whose, in words. "": it is trained here.

        `progress(bytes, of bytes)` is called while they are fetched.
        """
        return ""

    @abstractmethod
    def encode(self, wave: Tensor) -> Tensor:
        """Mono waveform (B, L) in [-1, 1] at `heard_rate` -> codes (B, N), where the codec is.

        The waveform may be on any device, as may all that the other methods take.
        """

    def encode_clips(self, waves: list[Tensor]) -> list[Tensor]:
        """The codes (N,) of clips (L,) of several lengths, where the codec is."""
        return [self.encode(wave[None])[0] for wave in waves]

    def encode_mels(self, mel: Tensor, frames: list[int]) -> list[Tensor]:
        """The codes (N,) of log-mels (B, M, T), padded to one length, and the frames of each."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        """Codes (B, N) -> waveform (B, L), where the codec is: of as many `samples`.

        `first` is the number of codes[:, 0] in its utterance, for a part cut out of one: with
        `context` codes around it a part sounds as in the whole. Raises CodecError for a code
        outside the vocabulary. One with a `state_width` takes two more by keyword: `states`
        (B, N, `state_width`), each the one that foretold its code, and `speaker` (B,
        `speaker_width`). Without them its sound is made of codes alone: its own round trip.
        """

    def speaker_of(self, wave: Tensor, sample_rate: int) -> Tensor:
        """Who speaks in a reference (L,) of `sample_rate` Hz, (`speaker_width`,).

        Raises VoiceReferenceError for one that no voice can be heard in. Asked only of a codec
        with a `speaker_width`.
        """
        raise NotImplementedError

    def round_trip(self, wave: Tensor) -> Tensor:
        """Encode and decode a clip (L,), both at `sample_rate`; the result is on the CPU."""
        heard = resampled(wave, self.sample_rate, self.heard_rate)
        return self.decode(self.encode(heard[None]))[0].cpu()

    def round_trips(self, wave: Tensor) -> dict[str, Tensor]:
        """The `round_trip` of a clip (L,), and what other means would make of it, by name."""
        return {"codec round trip": self.round_trip(wave)}

    def course(self, held: list[Tensor]) -> Course | None:
        """How long `fit` trains, judged by clips (L,) it never learns from; None: not at all."""
        return None

    def fit(
        self,
        waves: list[Tensor],
        device: str,
        precision: str,
        seed: int = 0,
        course: Course | None = None,
    ) -> Iterator[tuple[int, float]]:
        """Train on clips (L,), yielding (step, loss); leaves it on the CPU in eval mode."""
        return iter(())

    def sharpen(self, waves: list[Tensor], device: str, seed: int = 0) -> Iterator[tuple[int, int]]:
        """Train what makes the sound further, so that it is not blurred; the codes stay.

        On the clips (L,) that it was fitted on, yielding (step, steps); nothing where it has no
        such training.
        """
        return iter(())

    def train_vocoder(
        self, waves: list[Tensor], device: str, seed: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Train the network that makes samples, after `sharpen`; codes stay.

        On the clips (L,) that the codec was fitted on, yielding (step, steps); nothing where it
        has no such network.
        """
        return iter(())

    def with_states(self, width: int) -> "Codec | None":
        """A copy that can learn to make its sound of a model's states (..., `width`), too.

        Its codes are the same. None where it has no such training.
        """
        return None

    def learn_states(
        self, clips: list[StatedClip], steps: int, device: str, seed: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Train what makes the sound on `clips`, yielding (step, of how many); the codes stay.

        `steps` for each part that is trained in its turn. Leaves it on the CPU in eval mode.
        """
        raise NotImplementedError

    def sound_error(self, clips: list[StatedClip]) -> float:
        """How far the sound of the clips' codes and states is from them, as training sees it."""
        raise NotImplementedError


@torch.inference_mode()
def mels_and_codes(
    codec: Codec, front_end: Mel, waves: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-mels (M, T) as `front_end` makes them, and codes (N,), of clips (L,) at `heard_rate`.

    Where the codec begins with the same log-mels, they are made once. The mels are on the device of
    `front_end`, the codes on the codec's.
    """
    if codec.mel_config == front_end.config:
        mel, frames = front_end.padded(waves)
        return unpadded(mel, frames), codec.encode_mels(mel, frames)
    return front_end.log_mels(waves, codec.heard_rate), codec.encode_clips(waves)
