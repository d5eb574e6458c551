"""The training panel's widgets and the few ways they change, and what all panels share.

Core ipywidgets only, the same code for 7.7.1 and 8; no thread, no run, no event.
"""

import html
import textwrap
from collections.abc import Callable

import ipywidgets as widgets

from kit.notebook.style import BLUE, GREEN, ORANGE, RED

MOST = 2**31 - 1  # of a number that has no limit of its own
PANEL_LAYOUT = {"max_width": "820px", "padding": "4px", "overflow": "hidden"}
COLOURS = {"info": BLUE, "good": GREEN, "warn": ORANGE, "bad": RED}


class View:
    """The widgets of a training panel and the few ways they change. Called by one presenter."""

    def __init__(
        self,
        switches: list,
        numbers: dict[str, int],
        profile: bool = False,
        largest: dict[str, int] | None = None,
    ):
        self.boxes = {s.name: _checkbox(s) for s in switches}
        self.fixed = {s.name for s in switches if not s.available}
        largest = largest or {}
        self.numbers = {n: _number_box(n, v, largest.get(n, MOST)) for n, v in numbers.items()}
        self.start = button("Start", "play", "success", "Start training with these switches")
        self.stop = button("Stop", "stop", "", "Finish this step, save a checkpoint and stop")
        self.profile = button("Profile", "bar-chart", "", "Profile ten steps: which operators cost")
        self.bar = widgets.FloatProgress(value=0.0, min=0.0, max=1.0, layout={"flex": "1 1 auto"})
        self.tiles = widgets.HTML()
        self.status = widgets.HTML()
        self.notes = widgets.HTML()
        self.plan = widgets.HTML()
        self.players = widgets.HTML()
        curve = {"width": "100%", "max_width": "1000px", "margin": "0"}
        self.image = widgets.Image(format="png", layout=curve)
        grid = {"grid_template_columns": "repeat(auto-fill, minmax(270px, 1fr))"}
        cell = {"overflow": "hidden"}  # no scroll bars for a pixel too many
        cells = [widgets.VBox([self.boxes[s.name], _reason(s)], layout=cell) for s in switches]
        options = widgets.GridBox(cells + list(self.numbers.values()), layout=grid)
        pressed = [self.start, self.stop, *([self.profile] if profile else [])]
        buttons = widgets.HBox([*pressed, self.bar], layout={"align_items": "center"})
        outputs = [self.plan, self.status, self.tiles, self.image, self.players, self.notes]
        rows = [options, buttons, *outputs]
        self.box = widgets.VBox(rows, layout={"max_width": "1020px", "padding": "4px"})
        self.idle("Start")

    def values(self) -> dict:
        on = {n: bool(b.value) and n not in self.fixed for n, b in self.boxes.items()}
        return on | {name: box.value for name, box in self.numbers.items()}

    def running(self, values: dict, profile: bool = False) -> None:
        for name, box in (self.boxes | self.numbers).items():
            box.disabled = True
            box.value = values.get(name, box.value)
        self.start.disabled = True
        self.stop.disabled = False
        self.profile.disabled = not profile
        self.bar.bar_style = "info"

    def idle(self, start_label: str) -> None:
        for name, box in (self.boxes | self.numbers).items():
            box.disabled = name in self.fixed
        self.start.description = start_label
        self.start.disabled = False
        self.stop.disabled = True
        self.profile.disabled = True

    def close(self) -> None:
        """Leave everything to be read and nothing to be pressed."""
        boxes = (*self.boxes.values(), *self.numbers.values())
        for box in (*boxes, self.start, self.stop, self.profile):
            box.disabled = True

    def on_choice(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a switch or a number has changed."""
        for box in (*self.boxes.values(), *self.numbers.values()):
            box.observe(lambda _: callback(), "value")

    def say(self, text: str, kind: str = "info") -> None:
        self.status.value = message(text, kind)

    def show(
        self, rows: list[dict], texts: dict[str, str], png: bytes, players: str, more: str = ""
    ) -> None:
        """The curve, the latest numbers, `players`, and the newest notes with `more` below them."""
        self.image.value = png
        self.image.layout.display = None if rows else "none"
        if not rows:
            return
        self.bar.value = rows[-1]["step"] / max(rows[-1]["steps"], 1)
        self.tiles.value = _tiles(texts)
        self.players.value = players
        noted = [row for row in rows if row.get("note")][-3:]
        lines = [f"step {row['step']:,}: {html.escape(row['note'])}" for row in noted]
        if more:
            lines.append(html.escape(more))
        self.notes.value = f'<div style="font-size:12px;opacity:.8">{"<br>".join(lines)}</div>'


def message(text: str, kind: str) -> str:
    """HTML of a status line; `kind` is a key of COLOURS."""
    style = f"border-left:4px solid {COLOURS[kind]};padding:3px 10px;line-height:1.4"
    return f'<div role="status" style="{style}">{html.escape(text)}</div>'


def _checkbox(switch) -> widgets.Checkbox:
    on = switch.on and switch.available
    box = widgets.Checkbox(value=on, description=switch.label, indent=False)
    # ipywidgets 8 renamed it.
    tip = "tooltip" if box.has_trait("tooltip") else "description_tooltip"
    setattr(box, tip, switch.reason)
    box.disabled = not switch.available
    box.layout = widgets.Layout(width="auto", margin="0")
    return box


def _reason(switch) -> widgets.HTML:
    text = switch.reason if switch.available else f"not available: {switch.reason}"
    style = "font-size:12px;line-height:1.3;opacity:.7;margin:-4px 8px 6px 20px"
    short = html.escape(textwrap.shorten(text, 110, placeholder="..."))
    whole = html.escape(text)
    measured = f"<b>{html.escape(switch.measured)}</b><br>" if switch.measured else ""
    return widgets.HTML(value=f'<div style="{style}" title="{whole}">{measured}{short}</div>')


def _number_box(name: str, value: int, largest: int) -> widgets.BoundedIntText:
    layout = widgets.Layout(width="200px")
    style = {"description_width": "initial"}
    label = "GPUs" if name == "gpus" else name.replace("_", " ")
    return widgets.BoundedIntText(
        value=value, min=1, max=largest, description=label, layout=layout, style=style
    )


def button(label: str, icon: str, style: str, tip: str) -> widgets.Button:
    layout = {"width": "130px"}
    return widgets.Button(
        description=label, icon=icon, button_style=style, tooltip=tip, layout=layout
    )


def uploaded_files(value: dict | tuple) -> list[tuple[str, bytes]]:
    """Names and bytes of the files in a FileUpload's value, of ipywidgets 7 or 8."""
    if isinstance(value, dict):  # ipywidgets 7: by name
        return [(name, bytes(file["content"])) for name, file in value.items()]
    return [(file["name"], bytes(file["content"])) for file in value]


def _tiles(texts: dict[str, str]) -> str:
    name = "font-size:11px;opacity:.65"
    figure = "font-size:16px;font-weight:600"
    cells = (
        f'<div><div style="{name}">{n}</div><div style="{figure}">{t}</div></div>'
        for n, t in texts.items()
    )
    style = "display:flex;flex-wrap:wrap;gap:4px 26px;line-height:1.3;padding:4px 0"
    return f'<div style="{style};font-variant-numeric:tabular-nums">{"".join(cells)}</div>'
