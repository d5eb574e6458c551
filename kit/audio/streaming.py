"""Waveform pieces while the codes are still being generated.

A code's samples are final once the codec has seen `lookahead` codes after it. The stream keeps the
last few codes, decodes them again together with new ones, and returns the samples that no later
code can change: concatenated, they equal `decode` of all codes at once.

Shapes: N codes, L samples.
"""

import torch
from torch import Tensor

from kit.audio.codec import Codec


class AudioStream:
    """Push codes as they come and play what is returned; `finish` returns the rest.

    >>> stream = AudioStream(codec)
    >>> for codes in pieces:
    ...     play(stream.push(codes))
    >>> play(stream.finish())

    With a `speaker` (S,), each push also passes the hidden states of its codes. The first piece
    comes once `lookahead` + `first` codes are known, and every further one is twice as long, up to
    `longest` codes: short pieces come sooner, long ones cost less.
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
        """Add codes (N,), on any device; return the samples (L,) that are final now, on the CPU.

        `states` (N, D) are those that predicted the codes, if there is a speaker. Raises the
        codec's error for a code outside its vocabulary, at the latest in `finish`.
        """
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

    def _decode(self) -> Tensor:
        """Decode the codes that are still needed, to (1, L)."""
        if self.speaker is None:
            return self.codec.decode(self.codes[None], self.start)
        states = None if self.states is None else self.states[None]
        speaker = self.speaker[None]
        return self.codec.decode(self.codes[None], self.start, states=states, speaker=speaker)

    def _decode_until(self, end: int) -> Tensor:
        """Return samples of the codes from `returned` to `end`; drop codes no longer needed."""
        wave = self._decode()[0].cpu()
        first_sample = self.codec.samples(self.start)
        returned = self.codec.samples(self.returned) - first_sample
        wave = wave[returned : self.codec.samples(end) - first_sample]
        keep = max(self.start, end - self.context)
        self.codes = self.codes[keep - self.start :]
        if self.states is not None:
            self.states = self.states[keep - self.start :]
        self.start = keep
        self.returned = end
        return wave
