"""Figures as tables: HTML where it is drawn, aligned lines elsewhere; and a run's report.html."""

import base64
import html
from pathlib import Path

PAGE_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "td{padding:.15rem .8rem;border-bottom:1px solid #ddd;vertical-align:top}"
    "audio{display:block;width:100%;margin:.2rem 0 1rem}"
)


def table_html(figures: dict) -> str:
    """Return nested figures as one HTML table, names joined by dots."""
    rows = "".join(_html_row((name, figure_text(value)), "td") for name, value in flat(figures))
    return f"<table>{rows}</table>"


def text_table(figures: dict) -> str:
    """Return nested figures as lines, one a figure, names joined by dots."""
    return "\n".join(f"{name:28} {figure_text(value)}" for name, value in flat(figures))


def text_grid(cells: list[tuple[str, ...]]) -> str:
    """Return rows of cells, the headings first, as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]
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
    """Return nested figures as (dotted name, value) pairs, without the samples."""
    rows = []
    for key, value in figures.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        elif key != "samples":
            rows.append((prefix + key, value))
    return rows


def figure_text(value) -> str:
    """Return a figure as text of at most four digits."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report_page(report: dict, folder: Path) -> str:
    """Return the record of the run in `folder` as one self-contained HTML page."""
    players = "".join(_player(sample, folder) for sample in report.get("samples", []))
    samples = f"<h2>Samples</h2>{players}" if players else ""
    head = "<!doctype html><meta charset=utf-8><title>Run record</title>"
    head += f"<style>{PAGE_STYLE}</style>"
    return f"{head}<h1>{html.escape(folder.name)}</h1>{table_html(report)}{samples}"


def _player(sample: dict, folder: Path) -> str:
    """Return a sample as an audio player; "" if its file is gone.

    The page may be sent to others, so no file from outside the run's folder goes into it.
    """
    path = (folder / sample["wav"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        text = f"{sample['wav']} is left out: it is not in the run's folder."
        return f"<p>{html.escape(text)}</p>"
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(f"{sample['text']} ({sample['split']}, {Path(sample['wav']).stem})")
    return f"<p>{text}<audio controls src='data:audio/wav;base64,{data}'></audio></p>"
