"""The recorder and the upload panel: how a person's recordings get to the kernel.

The browser records (`SCRIPT`) and sends a 16-bit WAV file as base64 through a hidden Textarea.
Colab's widgets lose messages over 1 MB: there it comes in parts to a callback, and
google.colab.files uploads.
"""

import base64
import dataclasses
import html
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets
from IPython.display import Javascript, display

from kit.notebook.result import is_watched
from kit.notebook.widgets import Panel, button, message, player, set_tooltip, uploaded_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Take:
    """A recording that was checked; with problems it is saved only if a person wants it so."""

    seconds: float
    problems: tuple[str, ...] = ()  # each with what to do
    usable: bool = True  # whether it may be saved in spite of them


class RecorderPanel(Panel):
    """Shows the sentences left of `prompts`, a RecordingFolder. `colab`: in Colab's page."""

    def __init__(self, prompts, colab: bool = False):
        self.prompts = prompts
        self.folder = prompts.folder
        self.colab = colab
        self.id = uuid.uuid4().hex[:8]  # of the elements that the script looks for
        self.number = -1  # of the sentence that is shown
        self.wav = b""  # the last recording of the sentence that is shown
        self.parts: list[str] = []  # of the one that Colab is sending
        self.place = widgets.HTML()
        self.prompt = widgets.HTML()
        self.control = widgets.HTML(CONTROL.replace("ID", self.id))
        self.sent = widgets.Textarea(layout={"display": "none"})
        self.sent.add_class(f"kit-sent-{self.id}")
        self.buttons = {
            "Keep": button("Keep", "check", "", "Save this recording despite the warning"),
            "Back": button("Back", "backward", "", "The sentence before, to record it again"),
            "Skip": button("Skip", "forward", "", "The next sentence, without recording this one"),
        }
        self.status = widgets.HTML()
        self.player = player()
        row = widgets.HBox(list(self.buttons.values()), layout={"flex_flow": "row wrap"})
        row.layout.display = None if prompts.sentences else "none"
        rows = [self.place, self.prompt, self.control, row, self.status, self.player, self.sent]
        self.arrange(*rows)
        self.sent.observe(self._sent, "value")
        self.buttons["Keep"].on_click(lambda _: self._keep())
        self.buttons["Back"].on_click(lambda _: self._show(self.number - 1))
        self.buttons["Skip"].on_click(lambda _: self._skip())
        self.player.layout.display = "none"
        self._next()

    def describe(self) -> str:
        words = f"{len(self.prompts.sentences)} sentences to read, {self.prompts.progress()}"
        return f"{words} A notebook with a microphone records them into {self.folder}."

    def run(self) -> None:
        if self.colab:
            from google.colab import output

            output.register_callback(f"kit.record.{self.id}", self.receive_part)
        super().run()
        if is_watched():
            display(Javascript(SCRIPT.replace("ID", self.id)))

    def receive_part(self, text: str, first: bool, last: bool) -> None:
        """Take the next part of a recording, base64; the last one has it checked."""
        if first:  # what is left of a recording that was not sent to its end is dropped
            self.parts = []
        self.parts.append(text)
        if last:
            self.receive(base64.b64decode("".join(self.parts)))

    def receive(self, wav: bytes) -> None:
        """Check a recording of the sentence that is shown, and save it if nothing is wrong."""
        if self.over:
            return
        self.wav = wav
        self.player.value = wav
        self.player.layout.display = None
        self.buttons["Keep"].disabled = True
        with self.errors_as_sentences():
            take = self.prompts.check(self.sentence, wav)
            if not take.problems:
                self._save(f"{take.seconds:.1f} s")
            elif take.usable:
                self.buttons["Keep"].disabled = False
                self.say(" ".join([*take.problems, "Record it again, or press Keep."]), "warn")
            else:
                self.say(" ".join([*take.problems, "Record it again."]), "bad")

    @property
    def over(self) -> bool:
        return self.number >= len(self.prompts.sentences)

    @property
    def sentence(self) -> str:
        return self.prompts.sentences[self.number]

    def _sent(self, change: dict) -> None:
        if change["new"]:
            try:
                self.receive(base64.b64decode(change["new"]))
            finally:
                self.sent.value = ""  # the script waits for this

    def _keep(self) -> None:
        if self.wav:  # the second click of a double one comes when the next sentence is shown
            self._save("as it is")

    def _save(self, seconds: str) -> None:
        with self.errors_as_sentences():
            self.prompts.save(self.sentence, self.wav)
            words = f"Saved, {seconds}: {self.sentence} (Back records it again.)"
            self._next()
            self.say(words, "good")

    def _skip(self) -> None:
        if not self.prompts.done(self.sentence):
            self.prompts.skip(self.sentence)
        self._next()

    def _next(self) -> None:
        """Show the next sentence that is neither recorded nor skipped."""
        self.number += 1
        while not self.over and self.prompts.done(self.sentence):
            self.number += 1
        self._show(self.number)

    def _show(self, number: int) -> None:
        self.number = number
        self.wav = b""
        self.status.value = ""
        total = len(self.prompts.sentences)
        self.buttons["Keep"].disabled = True
        self.buttons["Back"].disabled = number == 0
        self.buttons["Skip"].disabled = self.over
        self.control.layout.display = "none" if self.over else None
        if self.over:
            words = f"No sentences left: {self.prompts.progress()} In {self.folder}"
            self.place.value = message(words, "good") if total else message(NO_SENTENCES, "warn")
            self.prompt.value = ""
            return
        place = f"Sentence {number + 1} of {total}. {self.prompts.progress()}"
        self.place.value = message(place, "info")
        style = "font-size:22px;line-height:1.5;padding:10px 4px"
        self.prompt.value = f'<div dir="auto" style="{style}">{html.escape(self.sentence)}</div>'


NO_SENTENCES = (
    "The kit has no sentences in this language to read aloud: write some into a text file, a "
    "sentence a line, and name it in SENTENCES."
)

CONTROL = """<div style="display:flex;align-items:center;gap:12px;flex-wrap:wrap">
<button class="jupyter-button widget-button mod-danger kit-record-ID" style="width:130px;margin:0"
>Record</button><meter class="kit-level-ID" aria-label="Level" min="0" max="1" low="0.5"
high="0.985" optimum="0.7" style="width:180px;height:16px"></meter><span class="kit-hint-ID"
style="flex:1 1 300px;line-height:1.4">Press Record, wait a moment, read the sentence,
wait again, press Stop.</span></div>"""

# Samples leave the recorder uncompressed where the browser can (Chromium), else as Opus of 256
# kbit/s. The tenth of a second at both ends is cut off: it has the clicks of the mouse.
SCRIPT = """(() => {
const RATE_HZ = 48000, MAX_S = 30, CLICK_S = 0.1, PART = 2 ** 18, MICROPHONE_OFF_MS = 60000;
const find = name => document.querySelector(`.kit-${name}-ID`);
const hint = text => { find("hint").textContent = text; };
const colab = window.google?.colab?.kernel;
let stream, recorder, off;

async function start() {
  if (!navigator.mediaDevices) throw Error("a page has a microphone only by https or at localhost");
  clearTimeout(off);
  if (!stream?.active) {
    const plain = {echoCancellation: false, noiseSuppression: false, autoGainControl: false};
    stream = await navigator.mediaDevices.getUserMedia({audio: {channelCount: 1, ...plain}});
  }
  const lossless = "audio/webm;codecs=pcm", parts = [];
  const type = MediaRecorder.isTypeSupported(lossless) ? {mimeType: lossless} : {};
  recorder = new MediaRecorder(stream, {...type, audioBitsPerSecond: 256000});
  recorder.ondataavailable = event => parts.push(event.data);
  recorder.onstop = () => attempt(() => finish(new Blob(parts)));
  recorder.onstart = watch;
  recorder.start();
}

function watch() {
  const context = new AudioContext(), analyser = context.createAnalyser(), began = Date.now();
  const wave = new Float32Array(analyser.fftSize);
  context.createMediaStreamSource(stream).connect(analyser);
  find("record").textContent = "Stop";
  const timer = setInterval(() => {
    const seconds = (Date.now() - began) / 1000;
    if (seconds > MAX_S && recorder.state === "recording") recorder.stop();
    if (recorder.state !== "recording") { clearInterval(timer); context.close(); return; }
    analyser.getFloatTimeDomainData(wave);
    const peak = wave.reduce((most, sample) => Math.max(most, Math.abs(sample)), 1e-3);
    find("level").value = 1 + Math.log10(peak) / 3;  // 0 is -60 dB, 1 full scale
    hint(`${seconds.toFixed(1)} s. Press Stop a moment after the last word.`);
  }, 50);
}

async function finish(blob) {
  off = setTimeout(() => stream.getTracks().forEach(track => track.stop()), MICROPHONE_OFF_MS);
  hint("Checking. If this stays, a cell is running, or the kernel was restarted.");
  const offline = new OfflineAudioContext(1, 1, RATE_HZ);
  const sound = await offline.decodeAudioData(await blob.arrayBuffer());
  const click = CLICK_S * RATE_HZ, all = sound.getChannelData(0);
  const wave = all.length > 4 * click ? all.subarray(click, all.length - click) : all;
  const reader = new FileReader();
  await new Promise(done => { reader.onload = done; reader.readAsDataURL(wavFile(wave)); });
  await send(reader.result.split(",")[1]);
  hint("");
}

function wavFile(wave) {
  const header = new DataView(new ArrayBuffer(44)), bytes = 2 * wave.length;
  const text = (at, word) => [...word].forEach((c, i) => header.setUint8(at + i, c.charCodeAt(0)));
  const wide = (at, value) => header.setUint32(at, value, true);
  const short = (at, value) => header.setUint16(at, value, true);
  text(0, "RIFF"); wide(4, 36 + bytes); text(8, "WAVEfmt "); wide(16, 16);
  short(20, 1); short(22, 1);  // PCM, one channel
  wide(24, RATE_HZ); wide(28, 2 * RATE_HZ); short(32, 2); short(34, 16);
  text(36, "data"); wide(40, bytes);
  const pcm = Int16Array.from(wave, s => Math.round(32767 * Math.max(-1, Math.min(1, s))));
  return new Blob([header, pcm]);
}

async function send(text) {
  if (colab) {
    for (let i = 0; i < text.length; i += PART) {
      const part = [text.slice(i, i + PART), i === 0, i + PART >= text.length];
      await colab.invokeFunction("kit.record.ID", part, {});
    }
    return;
  }
  const area = find("sent").querySelector("textarea");
  area.value = text;
  area.dispatchEvent(new Event("input", {bubbles: true}));
  while (area.value) await new Promise(done => setTimeout(done, 50));
}

async function attempt(act) {
  const button = find("record");
  button.disabled = true;
  try {
    await act();
  } catch (error) {
    hint(`No recording: ${error.message}. Is there a microphone, and may this page use it?`);
  }
  button.disabled = false;
  if (recorder?.state !== "recording") { button.textContent = "Record"; find("level").value = 0; }
}

document.addEventListener("click", event => {
  if (!event.target.closest?.(".kit-record-ID")) return;
  if (recorder?.state === "recording") recorder.stop(); else attempt(start);
});
})();"""


class UploadPanel(Panel):
    """`receive(file)` takes each uploaded file; it moves or reads it.

    `content(folder)` says in a line what is in a folder, and what to do with it. With `drive`, a
    Drive's folder, its folders can be chosen. `colab`: the page is Colab's.
    """

    def __init__(
        self,
        folder: Path,
        receive: Callable[[Path], None],
        content: Callable[[Path], str],
        drive: Path | None = None,
        colab: bool = False,
    ):
        self.folder = folder
        self.receive = receive
        self.content = content
        self.status = widgets.HTML(message(content(folder), "info"))
        self.output = widgets.Output()  # where Colab shows its own upload
        if colab:
            self.upload = button("Upload", "upload", "success", "Recordings, tables or a zip")
            self.upload.on_click(lambda _: self._upload_on_colab())
            hint = "Recordings, a table, or a zip of them."
        else:
            self.upload = widgets.FileUpload(multiple=True, button_style="success")
            self.upload.observe(self._uploaded, "value")
            hint = (
                "Recordings, a table, or a zip of them, up to 9 MB at a time. Drag what is larger "
                "into the file list of JupyterLab, and name it instead of this folder."
            )
        hint = widgets.HTML(f'<div style="line-height:1.4;padding:3px 8px">{hint}</div>')
        hint.layout.flex = "1 1 300px"
        rows = [widgets.HBox([self.upload, hint], layout={"flex_flow": "row wrap"}), self.output]
        if drive and drive.is_dir():
            self.drive = widgets.Dropdown(
                options=[("or a folder of your Drive ...", ""), *drive_folders(drive)],
                layout={"width": "420px"},
            )
            set_tooltip(self.drive, "A folder of your Drive")
            self.drive.observe(self._chosen, "value")
            rows.append(self.drive)
        self.arrange(*rows, self.status)

    def describe(self) -> str:
        return self.content(self.folder)

    def _uploaded(self, change: dict) -> None:
        files = uploaded_files(change["new"])
        if not files:
            return
        with self.errors_as_sentences(), tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, content in files:
                path = Path(folder) / Path(name).name
                path.write_bytes(content)
                paths.append(path)
            self._take(paths)
        self.upload.set_trait("value", type(self.upload.value)())  # else it stays in memory

    def _upload_on_colab(self) -> None:
        from google.colab import files

        self.output.clear_output()
        with self.output:
            names = list(files.upload())  # written into the current folder
        self._take([Path(name) for name in names])

    def _take(self, paths: list[Path]) -> None:
        with self.errors_as_sentences():
            for path in paths:
                self.receive(path)
            self.say(self.describe(), "good")

    def _chosen(self, change: dict) -> None:
        with self.errors_as_sentences():
            self.say(self.content(Path(change["new"] or self.folder)))


def drive_folders(drive: Path) -> list[tuple[str, str]]:
    """(name, path) of up to 300 folders of `drive` and in those: listing them takes its time."""
    folders = []
    level = [drive]
    for _ in range(2):
        children = [child for parent in level for child in sorted(parent.iterdir())]
        level = [c for c in children if c.is_dir() and not c.name.startswith(".")]
        folders += level
    return sorted((folder.relative_to(drive).as_posix(), str(folder)) for folder in folders[:300])
