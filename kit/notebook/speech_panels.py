"""Panels that play speech: a text box, clips to proofread; a download button."""

import contextlib
import dataclasses
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets as widgets
from IPython.display import Audio, display

from kit.base.files import atomic_path, require_disk
from kit.notebook.result import is_watched
from kit.notebook.widgets import Panel, boxed, button, message, player, set_tooltip, uploaded_files


class SpeakPanel(Panel):
    """`speak(text, choices, reference)` returns a WAV file, and a remark to show beside it.

    `choices` are a list to choose from, (least, most, value) for a slider, or a bool for a switch.
    `reference` is the path of a recording that was uploaded or named, "" where there is none.
    """

    def __init__(
        self,
        speak: Callable[[str, dict, str], tuple[bytes, str]],
        sentence: str,
        choices: dict[str, list | tuple | bool],
    ):
        self.speak = speak
        self.recording = Recording()
        look = {"rows": 3, "layout": {"width": "100%", "margin": "0"}}
        self.text = widgets.Textarea(value=sentence, placeholder="Text to speak", **look)
        set_tooltip(self.text, "Text to speak")
        self.choices = {name: _control(name, some) for name, some in choices.items()}
        self.button = button("Speak", "volume-up", "success", "Speak the text above")
        self.player = player()
        self.player.layout.display = "none"
        self.status = widgets.HTML()
        row = widgets.HBox([*self.choices.values(), self.button], layout={"flex_flow": "row wrap"})
        self.box = boxed(self.text, row, self.recording.box, self.status, self.player)
        self.button.on_click(self._clicked)

    def run(self) -> None:
        """Show the panel. Where nobody watches, speak once; errors are raised."""
        if is_watched():
            display(self.box)
            return
        wav, remark = self._made()
        print(remark)
        display(Audio(data=wav))

    def _made(self) -> tuple[bytes, str]:
        values = {name: choice.value for name, choice in self.choices.items()}
        with self.recording.path() as path:
            return self.speak(self.text.value, values, path)

    def _clicked(self, _button) -> None:
        self.button.disabled = True
        self.say("Speaking...")
        try:
            with self.errors_as_sentences():
                self.player.value, remark = self._made()
                self.player.layout.display = None
                self.say(remark)
        finally:
            self.button.disabled = False


class Recording:
    """Widgets that take a recording of somebody, from this machine's disk or uploaded to it."""

    def __init__(self):
        look = {"indent": False, "layout": {"width": "230px"}}
        self.wanted = widgets.Checkbox(description="speak as in this recording:", **look)
        self.upload = widgets.FileUpload(accept="audio/*", multiple=False)
        self.named = widgets.Text(placeholder="or its path, 6 to 30 s of one person")
        set_tooltip(self.named, "Path of a recording")
        self.upload.observe(self._given, "value")
        self.named.observe(self._given, "value")
        row = [self.wanted, self.upload, self.named]
        self.box = widgets.HBox(row, layout={"flex_flow": "row wrap"})

    def _given(self, change: dict) -> None:
        self.wanted.value = bool(change["new"])  # it is used as soon as it is given

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
        whole = isinstance(value, int)
        kind, step = (widgets.IntSlider, 1) if whole else (widgets.FloatSlider, 0.05)
        limits = {"min": low, "max": max(high, value), "step": step}
        return kind(value=value, description=name, **limits, **look)
    return widgets.Dropdown(options=options, description=name, **look)


def zip_folder(folder: Path, path: Path) -> None:
    """Write the files of `folder` to the zip file `path`; they unpack into a folder of its name.

    Weights hardly compress, so nothing is compressed. Raises DiskError with a fix if the disk is
    full, and leaves an older `path` then.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name[0] != "."]
    require_disk(folder, sum(file.stat().st_size for file in files))
    with atomic_path(path) as part, zipfile.ZipFile(part, "w", strict_timestamps=False) as archive:
        for file in files:
            archive.write(file, Path(path.stem, file.relative_to(folder)))


def show_download_button(path: Path) -> None:
    """Show a button that sends `path` to the browser. For Colab, which serves no files by link."""

    def send(_):
        from google.colab import files

        files.download(str(path))

    label = f"Download {path.name} ({path.stat().st_size / 1e6:.1f} MB)"
    download = button(label, "download", "success", "Send the file to this browser")
    download.layout.width = "auto"
    download.on_click(send)
    display(download)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenClip:
    """A clip to proofread."""

    id: str
    wav: Path
    text: str
    confidence: float  # 0 to 1


class ProofreadPanel(Panel):
    """A clip and its text; `save(id, text)` is called at once, with None for one left out."""

    def __init__(self, clips: list[WrittenClip], save: Callable[[str, str | None], None]):
        self.clips = clips
        self.number = 0  # of the one that is shown
        self.save = save
        self.player = player()
        self.text = widgets.Textarea(rows=3, layout={"width": "100%", "margin": "0"})
        set_tooltip(self.text, "Text of the clip")
        looks = {
            "Save": ("check", "success", "Write this text to metadata.csv"),
            "Leave out": ("trash", "", "Take this clip out of metadata.csv"),
            "Next": ("forward", "", "The next clip; this one stays as it is"),
        }
        self.buttons = {name: button(name, *look) for name, look in looks.items()}
        self.place = widgets.HTML()
        self.status = widgets.HTML()
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        self.box = boxed(self.place, self.player, self.text, row, self.status)
        self.buttons["Save"].on_click(lambda _: self.finish(lambda: self._save(self.text.value)))
        self.buttons["Leave out"].on_click(lambda _: self.finish(lambda: self._save(None)))
        self.buttons["Next"].on_click(lambda _: self.finish(lambda: "Not changed."))
        self.show()

    def run(self) -> None:
        if is_watched():
            display(self.box)
        else:
            print(f"{len(self.clips)} clips to proofread; a notebook plays them.")

    def finish(self, work: Callable[[], str]) -> None:
        """Show what `work` returns, and the next clip; an error is shown, and the clip stays."""
        if self.number == len(self.clips):  # the second click of a double one on the last clip
            return
        with self.errors_as_sentences():
            self.say(work())
            self.number += 1
            self.show()

    def show(self) -> None:
        over = self.number == len(self.clips)
        for each in self.buttons.values():
            each.disabled = over
        if over:
            self.place.value = message("No clips to proofread left.", "good")
            return
        clip = self.clips[self.number]
        self.text.value = clip.text
        self.player.value = b""
        with self.errors_as_sentences():
            self.player.value = clip.wav.read_bytes()
        place = f"{self.number + 1} of {len(self.clips)}: {clip.id}, {clip.confidence:.0%} certain"
        self.place.value = message(place, "info")

    def _save(self, text: str | None) -> str:
        self.save(self.clips[self.number].id, text)
        return "Left out." if text is None else "Saved."
