"""The training panel's widgets and the few ways they change, and what all panels share."""

import dataclasses
import html
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ipywidgets as widgets

from kit.base.errors import KitError
from kit.base.formatting import describe_error, shorten
from kit.notebook.plots import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, THEME_STYLE

COLOURS = {"info": BLUE, "good": GREEN, "warn": ORANGE, "bad": RED}
# Where a step's time goes: fields of a StepEvent, in their order in the step.
PHASES = {
    "data_s": ("data", PURPLE),
    "copy_s": ("copy", SKY),
    "forward_s": ("forward", BLUE),
    "backward_s": ("backward", GREEN),
    "graph_s": ("forward and backward", BLUE),
    "reduce_s": ("gradients of all GPUs", RED),
    "update_s": ("update", ORANGE),
}


class Panel:
    """A panel shows its `box` to a person; its `run` does for a program what it can."""

    box: widgets.Widget
    status: widgets.HTML

    def say(self, text: str, kind: str = "info") -> None:
        self.status.value = message(text, kind)

    @contextmanager
    def errors_as_sentences(self) -> Iterator[None]:
        """Show an error of the block that follows instead of raising it."""
        try:
            yield
        except Exception as error:
            self.say(describe_error(error), "bad")

    def _ipython_display_(self) -> None:  # of a cell that ends with the panel
        self.run()


def boxed(*rows: widgets.Widget) -> widgets.VBox:
    layout = {"max_width": "820px", "padding": "4px", "overflow": "hidden"}
    return widgets.VBox([*rows, theme()], layout=layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A number that a training panel offers."""

    name: str
    label: str
    value: int | float  # at first, and again by its reset button
    comment: str  # its tooltip
    more: bool = False  # whether it is below "More settings"


class FieldBox:
    """The widgets of one `Field`: a text box, a reset button, and what is wrong with the value."""

    def __init__(self, field: Field):
        self.field = field
        self.text = widgets.Text(value=str(field.value), description=field.label)
        self.text.style = {"description_width": "122px"}
        self.text.layout = {"width": "222px"}
        set_tooltip(self.text, f"{field.comment}. At first: {field.value}")
        self.reset = button("", "undo", "", f"{field.label}: back to {field.value}")
        self.reset.layout = {"width": "34px"}
        self.reset.on_click(lambda _: setattr(self.text, "value", str(field.value)))
        self.problem = widgets.HTML()
        row = widgets.HBox([self.text, self.reset])
        self.box = widgets.VBox([row, self.problem], layout={"overflow": "hidden"})
        self.text.observe(lambda _: self.lock(self.text.disabled), "value")
        self.lock(False)

    @property
    def value(self) -> int | float:
        """The number in the box. Raises KitError, with the field's name, where there is none."""
        for number in (int, float):
            with suppress(ValueError):
                value = number(self.text.value)
                if abs(value) < 2**31:  # neither inf nor nan
                    return value
        got = shorten(repr(self.text.value), 40)
        message = f"{self.field.label} must be a number, such as {self.field.value}, got {got}."
        raise KitError(message, field=self.field.name)

    def lock(self, locked: bool) -> None:
        self.text.disabled = locked
        self.reset.disabled = locked or self.text.value == str(self.field.value)

    def show_problem(self, text: str) -> None:
        style = f"border-left:4px solid {RED};padding:0 8px;font-size:12px;line-height:1.3"
        alert = f'<div role="alert" style="{style}">{html.escape(text)}</div>'
        self.problem.value = alert if text else ""


class View:
    """The widgets of a training panel and the few ways they change. Called by one presenter."""

    def __init__(self, switches: list, fields: list[Field]):
        self.boxes = {s.name: _checkbox(s) for s in switches}
        self.unavailable = {s.name for s in switches if not s.available}
        self.fields = {field.name: FieldBox(field) for field in fields}
        self.start = button("Start", "play", "success", "Start training with these settings")
        self.stop = button("Stop", "stop", "", "Finish this step, save a checkpoint and stop")
        self.profile = button("Profile", "bar-chart", "", "Profile ten steps: which operators cost")
        self.bar = widgets.FloatProgress(value=0.0, min=0.0, max=1.0, layout={"flex": "1 1 auto"})
        set_tooltip(self.bar, "Share of the steps that are done")
        self.plan = widgets.HTML()
        self.status = widgets.HTML()
        self.tiles = widgets.HTML()
        self.players = widgets.HTML()
        self.notes = widgets.HTML()
        curve = {"width": "100%", "max_width": "1000px", "margin": "0"}
        self.image = widgets.Image(format="png", layout=curve)
        self.image.add_class("kit-chart")
        cell = {"overflow": "hidden"}  # no scroll bars for a pixel too many
        cells = [widgets.VBox([self.boxes[s.name], _reason(s)], layout=cell) for s in switches]
        shown = [each.box for each in self.fields.values() if not each.field.more]
        folded = [each.box for each in self.fields.values() if each.field.more]
        self.more = widgets.Accordion([_grid(folded)])
        self.more.set_title(0, "More settings")
        self.more.selected_index = None
        pressed = [self.start, self.stop, self.profile, self.bar]
        buttons = widgets.HBox(pressed, layout={"align_items": "center"})
        # The same widgets a second time, for a cell further down: a click on either counts.
        self.mirror = widgets.VBox([buttons, self.status], layout={"max_width": "1020px"})
        settings = [_grid(cells), _grid(shown)]
        if folded:
            settings.append(self.more)
        # An empty line that can get the focus, but not by Tab: a page scrolls to what gets it.
        self.anchor = widgets.Label(layout={"height": "1px", "margin": "0"})
        self.anchor.tabbable = False
        self.anchor.add_class("kit-anchor")
        outputs = [self.plan, self.status, self.tiles, self.image, self.players, self.notes]
        rows = [*settings, self.anchor, buttons, *outputs, theme()]
        self.box = widgets.VBox(rows, layout={"max_width": "1020px", "padding": "4px"})
        self.idle()

    def values(self) -> dict:
        """Switches and fields by name. Raises KitError for a field that holds no number."""
        on = {n: bool(b.value) and n not in self.unavailable for n, b in self.boxes.items()}
        return on | {name: field.value for name, field in self.fields.items()}

    def enable(self, settings=False, start=False, training=False) -> None:
        """Unlock what is named, Stop and Profile with `training`; all else can only be read."""
        self.can_start = start
        for name, box in self.boxes.items():
            box.disabled = not settings or name in self.unavailable
        for field in self.fields.values():
            field.lock(not settings)
        self.start.disabled = not start
        self.stop.disabled = self.profile.disabled = not training

    def running(self, started: bool = True) -> None:
        """Lock the settings; buttons work once the training has `started`."""
        self.enable(training=started)
        for name in self.unavailable:
            self.boxes[name].value = False
        self.bar.bar_style = "info"

    def idle(self) -> None:
        self.enable(settings=True, start=True)

    def count_down(self, left_s: float) -> None:
        """Announce that training starts in `left_s` seconds, and how to stop that."""
        self.stop.disabled = False
        self.say(
            f"Training starts in {left_s:.0f} s. Press Stop, or change a setting, and it waits for "
            "Start."
        )

    def come_into_sight(self) -> None:
        """Scroll the page to the panel's buttons, with settings above and the curve below.

        "Run all" in JupyterLab goes to the last cell. ipywidgets 7, as on Colab, has no `focus`.
        """
        if hasattr(self.anchor, "focus"):
            self.anchor.focus()

    def show_plan(self, text: str, kind: str, wrong_field: str = "") -> None:
        """Show `text`, what the settings would take or what is wrong, beside `wrong_field` if any.

        With something wrong (`kind` "bad") Start is off.
        """
        for name, box in self.fields.items():
            box.show_problem(text if name == wrong_field else "")
        if wrong_field in self.fields:
            field = self.fields[wrong_field].field
            if field.more:
                self.more.selected_index = 0
            text = f"Correct the setting {field.label}: Start is off until then."
        self.plan.value = message(text, kind) if text else ""
        self.start.disabled = kind == "bad" or not self.can_start

    def on_choice(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a setting has changed, or more of them are looked at."""
        for box in (*self.boxes.values(), *(field.text for field in self.fields.values())):
            box.observe(lambda _: callback(), "value")
        self.more.observe(lambda _: callback(), "selected_index")

    def say(self, text: str, kind: str = "info") -> None:
        self.status.value = message(text, kind)

    def show(
        self,
        rows: list[dict],
        latest: dict,
        texts: dict[str, str],
        png: bytes,
        players: str,
        more: str,
    ) -> None:
        """The curve, the `latest` numbers, `players`, and the newest notes with `more` below."""
        self.image.value = png
        self.image.layout.display = None if rows else "none"
        if not rows:
            return
        self.bar.value = rows[-1]["step"] / max(rows[-1]["steps"], 1)
        self.tiles.value = _tiles(texts) + _step_time(latest)
        self.players.value = players
        noted = [row for row in rows if row.get("note")][-3:]
        lines = [f"step {row['step']:,}: {row['note']}" for row in noted] + more.splitlines()
        text = "<br>".join(map(html.escape, lines))
        self.notes.value = f'<div style="font-size:12px;opacity:.8">{text}</div>'


def message(text: str, kind: str) -> str:
    """HTML of a status line; `kind` is a key of COLOURS."""
    style = f"border-left:4px solid {COLOURS[kind]};padding:3px 10px;line-height:1.4"
    return f'<div role="status" style="{style}">{html.escape(text)}</div>'


def _checkbox(switch) -> widgets.Checkbox:
    on = switch.on and switch.available
    layout = {"width": "auto", "margin": "0"}
    box = widgets.Checkbox(value=on, description=switch.label, indent=False, layout=layout)
    set_tooltip(box, switch.explanation)
    return box


def _reason(switch) -> widgets.HTML:
    text = switch.explanation
    style = "font-size:12px;line-height:1.3;opacity:.7;margin:-4px 8px 6px 20px"
    short = html.escape(textwrap.shorten(text, 110, placeholder="..."))
    measured = f"<b>{html.escape(switch.measured)}</b><br>" if switch.measured else ""
    return widgets.HTML(f'<div style="{style}" title="{html.escape(text)}">{measured}{short}</div>')


def _grid(children: list) -> widgets.GridBox:
    columns = {"grid_template_columns": "repeat(auto-fill, minmax(270px, 1fr))"}
    return widgets.GridBox(children, layout=columns)


def set_tooltip(widget: widgets.DOMWidget, text: str) -> None:
    """Set the tooltip of a widget with a description, which ipywidgets 8 renamed."""
    name = "tooltip" if widget.has_trait("tooltip") else "description_tooltip"
    setattr(widget, name, text)


def theme() -> widgets.HTML:
    """What turns charts and players of a panel dark where the page is; it takes no room."""
    no_line = "<style>.kit-anchor{outline:none!important}</style>"
    return widgets.HTML(THEME_STYLE + no_line, layout={"display": "none"})


def player() -> widgets.Audio:
    return widgets.Audio(value=b"", format="wav", autoplay=False, loop=False)


def button(label: str, icon: str, style: str, tip: str) -> widgets.Button:
    look = {"icon": icon, "button_style": style, "layout": {"width": "130px"}}
    return widgets.Button(description=label, tooltip=tip, **look)


def uploaded_files(value: dict | tuple) -> list[tuple[str, bytes]]:
    """Names and bytes of the files in a FileUpload's value, of ipywidgets 7 (by name) or 8."""
    if isinstance(value, dict):
        value = [{"name": name, **file} for name, file in value.items()]
    return [(file["name"], bytes(file["content"])) for file in value]


def _tiles(texts: dict[str, str]) -> str:
    cells = ""
    for name, text in texts.items():
        cells += f'<div><div style="font-size:11px;opacity:.65">{name}</div>'
        cells += f'<div style="font-size:16px;font-weight:600">{text}</div></div>'
    style = "display:flex;flex-wrap:wrap;gap:4px 26px;line-height:1.3;padding:4px 0"
    return f'<div style="{style};font-variant-numeric:tabular-nums">{cells}</div>'


def _step_time(row: dict) -> str:
    """A bar of how a step's time is divided; "" where the log does not say."""
    times = {key: row.get(key) or 0.0 for key in PHASES}
    total_s = sum(times.values())
    if total_s <= 0:
        return ""
    parts = ""
    names = f"<span>where a step's time goes ({total_s:.3g} s):</span>"
    for key, (name, colour) in PHASES.items():
        share = times[key] / total_s
        if share < 0.005:
            continue
        parts += f'<div style="width:{100 * share:.2f}%;background:{colour}"></div>'
        square = f'<span style="color:{colour}" aria-hidden="true">&#9632;</span>'
        names += f'<span style="white-space:nowrap">{square} {name} {share:.0%}</span>'
    text = "display:flex;flex-wrap:wrap;gap:0 14px;font-size:12px;line-height:1.5"
    bar = f'<div style="display:flex;height:10px;max-width:1000px">{parts}</div>'
    return f'<div style="{text}">{names}</div>{bar}'
