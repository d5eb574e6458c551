"""Records of several streams, drawn by weight, and resumed at any position."""

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from kit.base.errors import DatasetError
from kit.streams.stream import Stream, require_same

DRAWS = 1024  # random numbers made at a time
END = object()


class Mix(Stream):
    """Records of several streams (or mixes), drawn by weight.

    The n-th draw is decided by (seed, epoch, share, n) alone, so a position is those of the streams
    and a count. When a stream ends, the others continue in their proportions; with `repeat` it
    begins its next epoch, and the mix never ends.
    """

    def __init__(
        self, sources: list[Stream], weights: list[float], *, seed: int = 0, repeat: bool = False
    ):
        if len(sources) != len(weights) or not sources or min(weights) <= 0:
            raise DatasetError(
                f"A mix needs one weight above 0 for each stream, got {list(weights)} for "
                f"{len(sources)} streams."
            )
        super().__init__(sources[0].config)
        self.sources = list(sources)
        self.weights = [float(weight) for weight in weights]
        self.seed = seed
        self.repeat = repeat
        self._ready = False  # `seek` has set where to begin
        self._set_draw(0, [])

    def _settings(self) -> dict:
        return {"weights": self.weights, "seed": self.seed, "repeat": self.repeat}

    def identity(self) -> dict:
        return self._settings() | {"parts": [source.identity() for source in self.sources]}

    def require_identity(self, identity: object) -> None:
        require_same("This mix", self._settings(), identity)
        for source, part in zip(self.sources, identity["parts"]):
            source.require_identity(part)

    def position(self) -> list:
        """[epoch, draws, streams that have ended, positions of all streams]."""
        positions = [source.position() for source in self.sources]
        return [self.epoch, self._drawn, list(self._ended), positions]

    def seek(self, position: list) -> None:
        self.epoch, drawn, ended, positions = position
        self._set_draw(drawn, ended)
        for source, own in zip(self.sources, positions):
            source.seek(own)
        self._ready = True

    def begin_epoch(self, epoch: int) -> None:
        for source in self.sources:
            source.begin_epoch(epoch)
        self.seek([epoch, 0, [], [source.position() for source in self.sources]])

    def _set_draw(self, drawn: int, ended: list[int]) -> None:
        self._drawn = drawn
        self._ended = list(ended)
        weights = [0 if i in ended else weight for i, weight in enumerate(self.weights)]
        self._bounds = list(itertools.accumulate(weights))

    def __iter__(self) -> Iterator:
        if not self._ready:
            self.begin_epoch(self.epoch)
        self._ready = False
        return self._draw([iter(source) for source in self.sources])

    def _draw(self, parts: list[Iterator]) -> Iterator:
        for number in self._random_numbers(self._drawn):
            record = END
            while record is END:
                if not self._bounds[-1]:
                    return
                chosen = bisect.bisect(self._bounds, number * self._bounds[-1])
                record = next(parts[chosen], END)
                if record is END:
                    record = self._restart(parts, chosen)
            self._drawn += 1
            yield record

    def _random_numbers(self, drawn: int) -> Iterator[float]:
        """Numbers in [0, 1) that decide draw `drawn` and those after it."""
        first, skip = divmod(drawn, DRAWS)
        for chunk in itertools.count(first):
            key = (self.seed, self.epoch, self.role()[0], chunk)
            yield from np.random.Generator(np.random.PCG64(key)).random(DRAWS).tolist()[skip:]
            skip = 0

    def _restart(self, parts: list[Iterator], ended: int):
        """The first record of the stream's next epoch; without one END, and no more draws of it."""
        record = END
        if self.repeat:
            source = self.sources[ended]
            source.set_epoch(source.epoch + 1)
            parts[ended] = iter(source)
            record = next(parts[ended], END)
        if record is END:
            self._set_draw(self._drawn, [*self._ended, ended])
        return record
