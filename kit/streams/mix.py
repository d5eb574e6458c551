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
    """Records of several streams (or mixes), drawn by weight; it never ends.

    The n-th draw is decided by (seed, epoch, share, n) alone, so a position is those of the streams
    and a count. A stream that ends begins its next epoch.
    """

    def __init__(self, sources: list[Stream], weights: list[float], *, seed: int = 0):
        if len(sources) != len(weights) or not sources or min(weights) <= 0:
            raise DatasetError(
                f"A mix needs one weight above 0 for each stream, got {list(weights)} for "
                f"{len(sources)} streams."
            )
        super().__init__(sources[0].config)
        self.sources = list(sources)
        self.weights = [float(weight) for weight in weights]
        self.seed = seed
        self._drawn = 0
        self._ready = False  # `seek` has set where to begin

    def _settings(self) -> dict:
        return {"weights": self.weights, "seed": self.seed}

    def identity(self) -> dict:
        return self._settings() | {"parts": [source.identity() for source in self.sources]}

    def require_identity(self, identity: object) -> None:
        require_same("This mix", self._settings(), identity)
        for source, part in zip(self.sources, identity["parts"]):
            source.require_identity(part)

    def position(self) -> list:
        """[epoch, draws, positions of all streams]."""
        return [self.epoch, self._drawn, [source.position() for source in self.sources]]

    def seek(self, position: list) -> None:
        self.epoch, self._drawn, positions = position
        for source, own in zip(self.sources, positions):
            source.seek(own)
        self._ready = True

    def begin_epoch(self, epoch: int) -> None:
        for source in self.sources:
            source.begin_epoch(epoch)
        self.seek([epoch, 0, [source.position() for source in self.sources]])

    def __iter__(self) -> Iterator:
        if not self._ready:
            self.begin_epoch(self.epoch)
        self._ready = False
        return self._draw([iter(source) for source in self.sources])

    def _draw(self, parts: list[Iterator]) -> Iterator:
        bounds = list(itertools.accumulate(self.weights))
        for number in self._random_numbers(self._drawn):
            chosen = bisect.bisect(bounds, number * bounds[-1])
            record = next(parts[chosen], END)
            if record is END:
                source = self.sources[chosen]
                source.set_epoch(source.epoch + 1)
                parts[chosen] = iter(source)
                record = next(parts[chosen], END)
            if record is END:
                raise DatasetError(
                    f"Stream {chosen + 1} of this mix has no records, or fewer groups of them than "
                    "there are ranks and workers."
                )
            self._drawn += 1
            yield record

    def _random_numbers(self, drawn: int) -> Iterator[float]:
        """Numbers in [0, 1) that decide draw `drawn` and those after it."""
        first, skip = divmod(drawn, DRAWS)
        for chunk in itertools.count(first):
            key = (self.seed, self.epoch, self.role()[0], chunk)
            yield from np.random.Generator(np.random.PCG64(key)).random(DRAWS).tolist()[skip:]
            skip = 0
