"""Sound while the codes are still coming.

A code's sound is settled once the codec has seen `ahead` codes after it. So the stream keeps the
last few codes, decodes them again with those that came since, and hands out the samples that no
later code can change: put together they are what `decode` makes of all codes at once. Knows a
codec's contract (codec.py); nothing of the model that makes the codes.

Shapes: N codes, L samples.
"""

import torch
from torch import Tensor

from kit.audio.codec import Codec


class AudioStream:
    """Push codes as they come, play what comes back; `finish` gives the rest.

    >>> stream = AudioStream(codec)
    >>> for codes in pieces:
    ...     play(stream.push(codes))
    >>> play(stream.finish())

    With a `speaker` (S,) the sound is made of states, too: each push hands on those of its codes.
    `first` and `longest` count codes. The first sound comes once `ahead` + `first` codes are
    known; then every piece is twice as long as the one before, up to `longest`. Short pieces come
    sooner, long ones cost less: with each, the codes around it are decoded again.
    """

    def __init__(
        self, codec: Codec, first: int = 8, longest: int = 64, speaker: Tensor | None = None
    ):
        self.codec = codec
        self.speaker = speaker
        self.context = codec.context if speaker is None else codec.state_context
        self.ahead = codec.ahead if speaker is None else codec.state_context
        self.first = first
        self.longest = longest
        self._begin()

    def _begin(self) -> None:
        self.codes = torch.zeros(0, dtype=torch.long)  # those that still matter, on their device
        self.states = None  # (N, D) of `codes`, where the sound is made of them
        self.start = 0  # number of codes[0] in the utterance
        self.heard = 0  # codes whose samples were handed out
        self.wanted = self.first  # settled codes that are worth decoding

    def push(self, codes: Tensor, states: Tensor | None = None) -> Tensor:
        """Codes (N,), on any device -> the samples (L,) settled by now, on the CPU; often none.

        `states` (N, D) are those that foretold the codes, where there is a speaker.
        Raises the codec's error for a code outside its vocabulary, at the latest in `finish`.
        """
        self.codes = torch.cat((self.codes.to(codes.device), codes))  # waits for no device
        if self.speaker is not None:
            self.states = states if self.states is None else torch.cat((self.states, states))
        settled = self.start + len(self.codes) - self.ahead
        if settled - self.heard < self.wanted:
            return torch.zeros(0)
        self.wanted = min(2 * self.wanted, self.longest)
        return self._decode_until(settled)

    def finish(self) -> Tensor:
        """The samples (L,) still owed. The next push begins another utterance."""
        end = self.start + len(self.codes)
        wave = self._decode_until(end) if end > self.heard else torch.zeros(0)
        self._begin()
        return wave

    def _decode(self) -> Tensor:
        """The sound (1, L) of the codes that still matter."""
        if self.speaker is None:
            return self.codec.decode(self.codes[None], self.start)
        states = None if self.states is None else self.states[None]
        speaker = self.speaker[None]
        return self.codec.decode(self.codes[None], self.start, states=states, speaker=speaker)

    def _decode_until(self, end: int) -> Tensor:
        """Samples of the codes from `heard` to `end`; forgets codes that no later sample needs."""
        wave = self._decode()[0].cpu()
        begin = self.codec.samples(self.start)
        heard = self.codec.samples(self.heard) - begin
        wave = wave[heard : self.codec.samples(end) - begin]
        keep = max(self.start, end - self.context)
        self.codes = self.codes[keep - self.start :]
        if self.states is not None:
            self.states = self.states[keep - self.start :]
        self.start = keep
        self.heard = end
        return wave
