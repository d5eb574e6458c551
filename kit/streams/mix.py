"""Several streams drawn from by weight, as one stream.

Which stream gives the n-th record is decided by (seed, epoch, role, n) alone, so a place in a mix
is its streams' places and a count. Knows nothing of files.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from kit.streams.file import Fault, StreamError
from kit.streams.position import Stream, check_same

DRAWS = 1024  # decided at a time
END = object()


class Mix(Stream):
    """Records of several streams (or mixes), each with its weight.

    When a stream ends, the others go on in their proportions until all have ended; with `repeat` it
    begins its next epoch instead, and the mix never ends. Raises StreamError for weights that do
    not fit.
    """

    def __init__(self, sources: list[Stream], weights: list[float], *, seed=0, repeat=False):
        if len(sources) != len(weights) or not sources or min(weights) <= 0:
            raise StreamError(
                f"A mix needs one weight above 0 for each stream, got {list(weights)} for "
                f"{len(sources)} streams."
            )
        super().__init__(sources[0].config)
        self.sources = list(sources)
        self.weights = [float(weight) for weight in weights]
        self.seed = seed
        self.repeat = repeat
        self._ready = False  # to begin where `go_to` said
        self._stand(0, [])

    def take_role(self, role: int, roles: int) -> None:
        super().take_role(role, roles)
        for source in self.sources:
            source.take_role(role, roles)

    def identity(self) -> dict:
        settings = {"weights": self.weights, "seed": self.seed, "repeat": self.repeat}
        return settings | {"parts": [source.identity() for source in self.sources]}

    def check(self, identity: object) -> None:
        own = self.identity()
        del own["parts"]  # each is better judged by its own stream
        check_same("This mix", own, identity)
        for source, part in zip(self.sources, identity["parts"]):
            source.check(part)

    def place(self) -> list:
        """[epoch, draws, streams that have ended, places of all streams]."""
        places = [source.place() for source in self.sources]
        return [self.epoch, self._drawn, list(self._ended), places]

    def go_to(self, place: list) -> None:
        self.epoch, drawn, ended, places = place
        self._stand(drawn, ended)
        for source, own in zip(self.sources, places):
            source.go_to(own)
        self._ready = True

    def begin_epoch(self, epoch: int) -> None:
        for source in self.sources:
            source.begin_epoch(epoch)
        self.go_to([epoch, 0, [], [source.place() for source in self.sources]])

    def send_faults(self, to: Callable[[Fault], None]) -> None:
        for source in self.sources:
            source.send_faults(to)

    def hear(self, fault: Fault) -> bool:
        return any(source.hear(fault) for source in self.sources)

    def _stand(self, drawn: int, ended: list[int]) -> None:
        self._drawn = drawn
        self._ended = list(ended)
        left = [0 if i in ended else weight for i, weight in enumerate(self.weights)]
        self._bounds = list(itertools.accumulate(left))

    def __iter__(self) -> Iterator:
        if not self._ready:
            self.begin_epoch(self.epoch)
        self._ready = False
        return self._draw([iter(source) for source in self.sources])

    def _draw(self, parts: list[Iterator]) -> Iterator:
        for number in self._numbers(self._drawn):
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

    def _numbers(self, drawn: int) -> Iterator[float]:
        """The numbers in [0, 1) that decide draw `drawn` and those after it."""
        first, skip = divmod(drawn, DRAWS)
        for chunk in itertools.count(first):
            key = (self.seed, self.epoch, self.role()[0], chunk)
            yield from np.random.Generator(np.random.PCG64(key)).random(DRAWS).tolist()[skip:]
            skip = 0

    def _restart(self, parts: list[Iterator], ended: int):
        """The first record of the stream's next epoch; END, and it is drawn no more, if none."""
        if self.repeat:
            source = self.sources[ended]
            source.set_epoch(source.epoch + 1)
            parts[ended] = iter(source)
            if (record := next(parts[ended], END)) is not END:
                return record
        self._stand(self._drawn, [*self._ended, ended])
        return END
