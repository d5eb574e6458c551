"""Figures as tables: HTML where it is drawn, aligned lines elsewhere.

Knows no figure by name.
"""

import html


def table_html(figures: dict) -> str:
    """Nested figures as one HTML table, names joined by dots."""
    rows = "".join(_html_row((name, figure_text(value)), "td") for name, value in flat(figures))
    return f"<table>{rows}</table>"


def text_table(figures: dict) -> str:
    """Nested figures as lines, one a figure, names joined by dots."""
    return "\n".join(f"{name:28} {figure_text(value)}" for name, value in flat(figures))


def text_grid(cells: list[tuple[str, ...]]) -> str:
    """Rows of cells, the headings first, as lines in columns."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]
    return "\n".join(lines)


def grid_html(cells: list[tuple[str, ...]]) -> str:
    """Rows of cells, the headings first, as one HTML table."""
    head, *rows = cells
    body = "".join(_html_row(row, "td") for row in rows)
    return f"<table><thead>{_html_row(head, 'th')}</thead>{body}</table>"


def _html_row(cells: tuple[str, ...], tag: str) -> str:
    inside = "".join(f"<{tag} style='text-align:left'>{html.escape(c)}</{tag}>" for c in cells)
    return f"<tr>{inside}</tr>"


def flat(figures: dict, prefix: str = "") -> list[tuple[str, object]]:
    rows = []
    for key, value in figures.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{key}.")
        elif key != "samples":
            rows.append((prefix + key, value))
    return rows


def figure_text(value) -> str:
    """A figure as a person would write it."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
