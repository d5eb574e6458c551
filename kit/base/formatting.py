"""Names, paths, sizes, durations and errors as text; figures as tables of text or HTML."""

import difflib
import html
import math


def nearest(name: str, known) -> str:
    """' Did you mean `x`?' when a known name is close to `name`, else the list of known names."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(map(str, known))}."


def shorten(value: object, max_chars: int = 200) -> str:
    """`value` as text, with "..." where it is long: a message may quote a whole file."""
    text = str(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def join_names(names: list[str], max_names: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {more} more" if more > 0 else "")


def non_utf8_problem(path) -> str:
    """What is wrong with a path whose name is not UTF-8: no table or page can hold it. Else ""."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{str(path)!a} has a name that is not UTF-8: rename it in plain letters"
    return ""


def as_utf8(text: str) -> str:
    """`text` with "?" for what UTF-8 cannot write: lone surrogates, as of damaged file names."""
    return text.encode(errors="replace").decode()


def clock(seconds: float) -> str:
    """125 -> "2:05", 3725 -> "1:02:05"."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe_error(error: BaseException) -> str:
    """An exception as one line. A ValueError's message is written for the user already."""
    text = shorten(" ".join(str(error).split()), 400)
    if text and not isinstance(error, ValueError):
        return f"{type(error).__name__}: {text}"
    return text or type(error).__name__


def format_gib(size_bytes: float) -> str:
    """2_500_000_000 -> "2.33 GiB"."""
    return f"{size_bytes / 2**30:.2f} GiB"


def format_memory(size_bytes: float, sign: str = "-") -> str:
    """2_500_000_000 -> "2.33 GiB", 4_000_000 -> "3.8 MiB"; `sign` "+" makes it "+3.8 MiB"."""
    if abs(size_bytes) >= 2**30:
        return f"{size_bytes / 2**30:{sign}.2f} GiB"
    return f"{size_bytes / 2**20:{sign}.1f} MiB"


def table_html(figures: dict) -> str:
    """Return nested figures as one HTML table, names joined by dots."""
    rows = "".join(_html_row(row, "td") for row in named_texts(figures))
    return f"<table>{rows}</table>"


def text_table(figures: dict) -> str:
    """Return nested figures as lines, one a figure, names joined by dots."""
    return "\n".join(f"{name:28} {text}" for name, text in named_texts(figures))


def named_texts(figures: dict) -> list[tuple[str, str]]:
    """Return nested figures as (dotted name, text) pairs; bytes as MiB or GiB."""
    pairs = []
    for name, value in flat(figures):
        if name.endswith("_bytes") and isinstance(value, int | float):
            pairs.append((name.removesuffix("_bytes"), format_memory(value)))
        else:
            pairs.append((name, figure_text(value)))
    return pairs


def text_grid(cells: list[tuple[str, ...]]) -> str:
    """Return rows of cells, the headings first, as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines)


def grid_html(cells: list[tuple[str, ...]]) -> str:
    """Return rows of cells, the headings first, as one HTML table."""
    head, *rows = cells
    body = "".join(_html_row(row, "td") for row in rows)
    return f"<table><thead>{_html_row(head, 'th')}</thead>{body}</table>"


def _html_row(cells: tuple[str, ...], tag: str) -> str:
    inside = "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells)
    return f"<tr>{inside}</tr>"


def flat(figures: dict, prefix: str = "") -> list[tuple[str, object]]:
    """Return nested figures as (dotted name, value) pairs, without samples, checks and curves."""
    rows = []
    for key, value in figures.items():
        if key in ("samples", "checks", "curve"):
            continue
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, value))
    return rows


def figure_text(value) -> str:
    """Return a figure as text of at most four digits."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def replace_non_finite(figures):
    """Return `figures` with None for every number that is not finite: JSON cannot hold those."""
    if isinstance(figures, dict):
        return {key: replace_non_finite(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [replace_non_finite(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures
