"""The speaking panel: a text box, choices, a Speak button and an audio player.

Core ipywidgets only, the same code for 7.7.1 (Colab's) and 8. The caller passes `speak`,
which turns text and choices into sound.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets as widgets
from IPython.display import Audio, display

from kit.base.formatting import describe_error
from kit.notebook.kernel import front_end
from kit.notebook.panel.widgets import PANEL_LAYOUT, button, message, uploaded_files


class SpeakPanel:
    """`panel.run()` shows it. `speak(text, choices)` returns WAV bytes or an IPython Audio.

    Or either with a remark, which is shown beside the player. `choices` are a list to choose from,
    (least, most, value) for a slider, or a bool for a switch. A ValueError of `speak` is shown as
    the sentence it is, any other exception with its type. With `reference` it is called with a
    third argument, the path of a recording that was uploaded or named, "" where there is none.
    """

    def __init__(
        self,
        speak: Callable,
        sentence: str,
        choices: dict[str, list | tuple | bool] | None = None,
        reference: bool = False,
    ):
        self.speak = speak
        self.recording = Recording() if reference else None
        wide = {"width": "100%", "margin": "0"}
        self.text = widgets.Textarea(
            value=sentence, rows=3, layout=wide, placeholder="Text to speak"
        )
        self.choices = {name: _control(name, some) for name, some in (choices or {}).items()}
        self.button = button("Speak", "volume-up", "success", "Speak the text above")
        self.player = widgets.Audio(value=b"", format="wav", autoplay=False, loop=False)
        self.player.layout.display = "none"
        self.status = widgets.HTML()
        row = widgets.HBox([*self.choices.values(), self.button], layout={"flex_flow": "row wrap"})
        asked = [self.recording.box] if self.recording else []
        rows = [self.text, row, *asked, self.status, self.player]
        self.box = widgets.VBox(rows, layout=PANEL_LAYOUT)
        self.button.on_click(lambda _: self._clicked())

    def run(self, mode: str | None = None) -> None:
        """Show the panel; without a front end speak once, and raise what goes wrong."""
        if (mode or front_end()[0]) == "plain":
            wav, remark = self._made()
            if remark:
                print(remark)
            display(Audio(data=wav))
        else:
            display(self.box)

    def _made(self) -> tuple[bytes, str]:
        """WAV bytes and a remark, which is mostly empty."""
        values = {name: choice.value for name, choice in self.choices.items()}
        if self.recording:
            with self.recording.path() as path:
                made = self.speak(self.text.value, values, path)
        else:
            made = self.speak(self.text.value, values)
        made, remark = made if isinstance(made, tuple) else (made, "")
        return made.data if isinstance(made, Audio) else made, remark

    def _clicked(self) -> None:
        self.button.disabled = True
        self.status.value = message("Speaking...", "info")
        try:
            self.player.value, remark = self._made()
            self.player.layout.display = None
            self.status.value = message(remark, "info") if remark else ""
        except Exception as error:
            self.status.value = message(describe_error(error), "bad")
        finally:
            self.button.disabled = False


class Recording:
    """Widgets that take a recording of somebody, from this machine's disk or uploaded to it."""

    def __init__(self):
        self.wanted = widgets.Checkbox(
            value=False, indent=False, description="speak as in this recording:"
        )
        self.wanted.layout.width = "230px"
        self.upload = widgets.FileUpload(accept="audio/*", multiple=False)
        self.named = widgets.Text(placeholder="or its path, 6 to 30 s of one person")
        self.upload.observe(self._given, "value")
        self.named.observe(self._given, "value")
        row = [self.wanted, self.upload, self.named]
        self.box = widgets.HBox(row, layout={"flex_flow": "row wrap"})

    def _given(self, change: dict) -> None:
        """Use a recording as soon as it is given."""
        self.wanted.value = bool(change["new"])

    @contextlib.contextmanager
    def path(self) -> Iterator[str]:
        """Yield the path of the recording during the block; "" if none is used.

        A path that was named counts more than an upload, which cannot be taken back. Raises
        ValueError where one is wanted and none was given.
        """
        named = self.named.value.strip()
        files = uploaded_files(self.upload.value)
        if not self.wanted.value:
            yield ""
        elif named:
            yield named
        elif files:
            name, content = files[0]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / Path(name).name
                file.write_bytes(content)
                yield str(file)
        else:
            raise ValueError("There is no recording yet: upload one, or write its path.")


def _control(name: str, options: list | tuple | bool) -> widgets.Widget:
    look = {"layout": {"width": "260px"}, "style": {"description_width": "initial"}}
    if isinstance(options, bool):
        return widgets.Checkbox(value=options, description=name, indent=False, **look)
    if isinstance(options, tuple):
        low, high, value = options
        step = 1 if isinstance(value, int) else 0.05
        kind = widgets.IntSlider if isinstance(value, int) else widgets.FloatSlider
        limits = {"min": low, "max": max(high, value), "step": step}
        return kind(value=value, description=name, **limits, **look)
    return widgets.Dropdown(options=options, description=name, **look)
