"""The result of a step of a recipe: drawn in a notebook, printed as one line elsewhere.

Pictures come first, then sounds, then tables.
"""

import base64
import dataclasses
import html
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from kit.base.tables import grid_html, table_html
from kit.base.wav import encode_wav
from kit.notebook.style import png, shown_width_px


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sound:
    """Something to listen to: samples (L,) in -1 to 1, on the CPU."""

    caption: str
    wave: np.ndarray
    sample_rate_hz: int

    def wav_bytes(self) -> bytes:
        """A 16-bit WAV file."""
        return encode_wav(np.asarray(self.wave), self.sample_rate_hz)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line for a log, and what a notebook draws beside it.

    `figures` are plain numbers and strings by name, the very ones that go into the run's record.
    """

    line: str
    pictures: Sequence[Figure] = ()
    sounds: Sequence[Sound] = ()
    figures: dict = dataclasses.field(default_factory=dict)
    shown: bool = True  # draw `figures` as a table, too
    grid: Sequence[tuple[str, ...]] = ()  # rows of cells, the headings first

    def __str__(self) -> str:
        return self.line

    __repr__ = __str__  # the plain-text side of a cell's output

    def _repr_html_(self) -> str:
        lines = [html.escape(line) for line in self.line.splitlines()]
        parts = [f"<p>{'<br>'.join(lines)}</p>"]
        parts += [picture_html(picture) for picture in self.pictures]
        parts += [sound_html(sound) for sound in self.sounds]
        if self.grid:
            parts.append(grid_html(self.grid))
        if self.figures and self.shown:
            parts.append(table_html(self.figures))
        return "".join(parts)


def picture_html(picture: Figure) -> str:
    """`picture` as an image that is sharp on dense screens and never wider than the cell."""
    data = base64.b64encode(png(picture)).decode()
    width_px = shown_width_px(picture)
    return f"<img style='max-width:100%' width={width_px} src='data:image/png;base64,{data}'>"


def sound_html(sound: Sound) -> str:
    data = base64.b64encode(sound.wav_bytes()).decode()
    player = f"<audio controls preload='none' src='data:audio/wav;base64,{data}'></audio>"
    return f"<p>{html.escape(sound.caption)}<br>{player}</p>"
