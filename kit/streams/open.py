"""Any file of records as a stream, its rows with line numbers, and several streams as a mix."""

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kit.base.errors import DatasetError
from kit.streams.file import BadRecord
from kit.streams.json_array import JsonArray
from kit.streams.lines import JsonLines, Table, TextLines
from kit.streams.stream import FileStream, Stream, StreamConfig, require_same

DRAWS = 1024  # random numbers of a mix made at a time
END = object()
# The class that reads files with this suffix; one more format is one more line.
FORMATS: dict[str, type[FileStream]] = {
    ".txt": TextLines,
    ".csv": Table,
    ".tsv": Table,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonArray,
}


def open_source(
    path: Path,
    config: StreamConfig | None = None,
    *,
    columns: list[str] | None = None,
    delimiter: str | None = None,
    quoting: bool = True,
    **hooks,
) -> FileStream:
    """The stream for `path`, chosen by its suffix; with a `delimiter`, any file is a table.

    `columns`, `delimiter` and `quoting` are Table's, `hooks` are `keep` and `on_bad_record`.
    """
    if not delimiter:
        require_known_format(path)
    kind = Table if delimiter else FORMATS[Path(path).suffix.lower()]
    if kind is Table:
        hooks.update(columns=columns, delimiter=delimiter, quoting=quoting)
    return kind(path, config, **hooks)


def require_known_format(path: Path) -> None:
    """Raise DatasetError for a file whose suffix has no format."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise DatasetError(
            f"{path}: unknown format `{suffix}`. Known: {' '.join(FORMATS)}. Save the file as one "
            "of these, pass a `delimiter` if it is a table, or add a format (docs/extending.md)."
        )


def rows(path: Path) -> Iterator[tuple[int, dict | str | BadRecord]]:
    """(line number, record or BadRecord) in the order of the file, in constant memory.

    Raises DatasetError when the file cannot be read at all.
    """
    return open_source(path, on_bad_record=lambda record: None).rows()


class Mix(Stream):
    """Records of several streams (or mixes), drawn by weight.

    The n-th draw is decided by (seed, epoch, share, n) alone, so a position is those of the streams
    and a count. When a stream ends, the others continue in their proportions; with `repeat` it
    begins its next epoch, and the mix never ends. Raises DatasetError for weights that do not fit.
    """

    def __init__(self, sources: list[Stream], weights: list[float], *, seed=0, repeat=False):
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
        if self.repeat:
            source = self.sources[ended]
            source.set_epoch(source.epoch + 1)
            parts[ended] = iter(source)
            record = next(parts[ended], END)
            if record is not END:
                return record
        self._set_draw(self._drawn, [*self._ended, ended])
        return END
