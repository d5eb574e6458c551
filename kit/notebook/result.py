"""The result of a step of a recipe, and how a notebook shows results and errors.

Drawn in a notebook, printed as one line elsewhere. A link comes first, then pictures, sounds, and
tables.
"""

import base64
import dataclasses
import html
import os
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from IPython import get_ipython
from IPython.display import display
from torch import Tensor

from kit.base.files import encode_wav
from kit.base.formatting import grid_html, table_html
from kit.notebook.plots import THEME_STYLE, picture_html


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sound:
    """Something to listen to: samples (L,) in -1 to 1, on the CPU."""

    caption: str
    wave: np.ndarray
    sample_rate_hz: int

    def wav_bytes(self) -> bytes:
        return encode_wav(np.asarray(self.wave), self.sample_rate_hz)


def players_of(waves: dict[str, Tensor], sample_rate: int) -> list[Sound]:
    return [
        Sound(caption=caption, wave=wave.numpy(), sample_rate_hz=sample_rate)
        for caption, wave in waves.items()
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One line for a log, and what a notebook draws beside it.

    `figures` are plain numbers and strings by name, the very ones that go into the run's record.
    """

    line: str
    pictures: Sequence = ()  # matplotlib figures, or functions that draw one once it is shown
    sounds: Sequence[Sound] = ()
    # Sounds of the same sentences, a column for each name.
    compared: dict[str, Sequence[Sound]] = dataclasses.field(default_factory=dict)
    figures: dict = dataclasses.field(default_factory=dict)
    shown: bool = True  # draw `figures` as a table, too
    grid: Sequence[tuple[str, ...]] = ()  # rows of cells, the headings first
    link: Path | None = None  # a file to download
    failed: bool = False  # something does not pass: a command exits with 3

    def __str__(self) -> str:
        return self.line

    __repr__ = __str__  # the plain-text side of a cell's output

    def _repr_html_(self) -> str:
        # A preset's lines begin with spaces.
        return f"<p style='white-space:pre-wrap'>{html.escape(self.line)}</p>{self.drawn()}"

    def drawn(self) -> str:
        """HTML of all but the line; "" if nothing else is shown."""
        parts = []
        if self.link:
            parts.append(link_html(self.link))
        if self.pictures:
            first_line = [html.escape(line) for line in self.line.splitlines()[:1]]
            drawn = [picture() if callable(picture) else picture for picture in self.pictures]
            parts += [picture_html(picture, first_line) for picture in drawn]
        parts += [sound_html(sound) for sound in self.sounds]
        if self.compared:
            parts.append(compared_html(self.compared))
        if self.grid:
            parts.append(grid_html(self.grid))
        if self.figures and self.shown:
            parts.append(table_html(self.figures))
        if self.pictures or self.sounds or self.compared:
            parts.append(THEME_STYLE)
        return "".join(parts)


def sound_html(sound: Sound) -> str:
    return f"<p>{html.escape(sound.caption)}<br>{player_html(sound)}</p>"


def player_html(sound: Sound) -> str:
    data = base64.b64encode(sound.wav_bytes()).decode()
    return f"<audio controls preload='none' src='data:audio/wav;base64,{data}'></audio>"


def compared_html(columns: dict[str, Sequence[Sound]]) -> str:
    """A table with a row for each sentence, which is the sounds' caption, and a player a column."""
    left = "style='text-align:left'"
    names = "".join(f"<th {left}>{html.escape(name)}</th>" for name in columns)
    table = f"<table><thead><tr><th></th>{names}</tr></thead>"
    for sounds in zip(*columns.values(), strict=True):
        players = "".join(f"<td>{player_html(sound)}</td>" for sound in sounds)
        table += f"<tr><td {left}>{html.escape(sounds[0].caption)}</td>{players}</tr>"
    return f"{table}</table>"


def link_html(path: Path) -> str:
    """A link that downloads `path`, relative to the notebook: Jupyter serves such files."""
    path = Path(os.path.relpath(path))
    address = urllib.parse.quote(path.as_posix())
    label = f"Download {path.name} ({path.stat().st_size / 1e6:.1f} MB)"
    return f"<p><a href='{address}' download>{html.escape(label)}</a></p>"


def is_watched() -> bool:
    """Whether a person sees this cell: programs that run notebooks (nbmake) take no input."""
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(kernel and kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def plain_errors() -> None:
    """From now on an error that the kit itself raises shows as one sentence, without the frames.

    Its message says what was wrong and what to do; where in the kit it was noticed helps nobody.
    Any other error keeps its traceback, and the cell fails either way.
    """

    def show_error(shell, kind, error, trace, tb_offset=None) -> list[str]:
        if kind.__module__.startswith("kit."):
            lines = [f"{kind.__name__}: {error}"]
        else:
            lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset)
        shell._showtraceback(kind, error, lines)
        return lines

    def print_error(kind, error, trace) -> None:
        if kind.__module__.startswith("kit."):
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    shell = get_ipython()
    if shell is not None:
        shell.set_custom_exc((ValueError, RuntimeError, OSError), show_error)
    else:
        sys.excepthook = print_error


def print_results() -> None:
    """Where a program runs the notebook, print each Result's line, and display only the rest.

    A log has no displays, and the executed notebook holds the line once.
    """

    def print_result(result: Result) -> None:
        print(result, flush=True)
        drawn = result.drawn()
        if drawn:
            display({"text/html": drawn}, raw=True)

    shell = get_ipython()
    if shell is not None and not is_watched():
        shell.display_formatter.ipython_display_formatter.for_type(Result, print_result)
