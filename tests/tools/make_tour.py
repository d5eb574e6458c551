"""Write docs/tour.md from the executed notebooks of a run: what each of them shows, to look at.

`python tests/tools/make_tour.py runs/demo`: texts come from notebooks/ as they are, pictures and
sounds from the run's own copies, matched by cell id. What was not executed is left out.
"""

import base64
import io
import re
import sys
from html import unescape
from pathlib import Path

import nbformat
import soundfile
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs" / "tour"  # pictures and sounds
MAX_LINES = 6  # of what a cell prints
MAX_SOUNDS = 2  # of a cell
WIDTH_PX = 900
ALT = re.compile(r"<img[^>]*? alt='([^']*)'")
DATA = re.compile(r"<(img|audio|source)[^>]*?src=['\"]data:[a-z]+/[a-z]+;base64,([^'\"]+)")
HIDDEN = re.compile(r"<(table|audio|style)\b.*?</\1>", re.DOTALL)  # what has no sentence
TAG = re.compile(r"<(?:br|/p|/tr|/h\d)[^>]*>")


def save_picture(data: bytes, name: str, caption: str) -> str:
    """Save a PNG of few colours; returns the Markdown that shows it."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    if picture.width > WIDTH_PX:
        height = round(picture.height * WIDTH_PX / picture.width)
        picture = picture.resize((WIDTH_PX, height), Image.Resampling.LANCZOS)
    picture.quantize(256, Image.Quantize.FASTOCTREE).save(FOLDER / f"{name}.png", optimize=True)
    return f"![{caption}](tour/{name}.png)"


def save_sound(data: bytes, name: str, _caption: str) -> str:
    """Save a WAV file as MP3; returns a link to it."""
    wave, rate_hz = soundfile.read(io.BytesIO(data))
    soundfile.write(FOLDER / f"{name}.mp3", wave, rate_hz, format="MP3")
    return f"[listen: {len(wave) / rate_hz:.1f} s](tour/{name}.mp3)"


def plain(html: str) -> str:
    """The first line of an HTML output, without tables and players."""
    text = re.sub(r"<[^>]+>", "", TAG.sub("\n", HIDDEN.sub("", html)))
    return next((line.strip() for line in unescape(text).splitlines() if line.strip()), "")


def shown(outputs: list, name: str) -> list[str]:
    """Markdown of a code cell's outputs: its sentence, pictures, sounds."""
    lines, printed, sounds, said = [], [], 0, ""
    for output in outputs:
        data = output.get("data", {})
        html = data.get("text/html", "")
        sentence = plain(html)
        if html and not sentence and said:  # a Result prints its line, and displays the rest
            sentence = said
        lines += filter(None, [sentence])
        said = ""
        described = ALT.search(html)  # of a picture that a cell shows by itself
        sentence_or_alt = sentence or (unescape(described[1]) if described else "A picture")
        caption = re.sub(r"['\[\]]", "", sentence_or_alt)
        contents = [("img", data["image/png"])] if "image/png" in data else DATA.findall(html)
        for kind, content in contents:
            save = save_picture if kind == "img" else save_sound
            sounds += kind != "img"
            if kind == "img" or sounds <= MAX_SOUNDS:
                lines.append(save(base64.b64decode(content), f"{name}-{len(lines)}", caption))
        if output.output_type == "stream" and output.name == "stdout":
            printed += output.text.splitlines()
            said = printed[-1] if printed else ""
    if printed and not any(line.startswith("![") for line in lines):
        lines.insert(0, "\n".join(["```text", *printed[-MAX_LINES:], "```"]))
    return lines


def tour_of(path: Path, executed: Path) -> list[str]:
    """A notebook's headings, the first sentence before each cell, and what the cell showed."""
    cells = nbformat.read(executed, as_version=4).cells
    outputs = {cell.id: cell.outputs for cell in cells if cell.cell_type == "code"}
    notebook = nbformat.read(path, as_version=4)
    short = path.stem.split("_")[0]  # 00 to 07, or your
    first = notebook.cells[0]
    title, *paragraphs = first.source.split("\n\n")
    lines = [f"#{title}", f"[The notebook](../notebooks/{path.name})"]
    for picture in first.get("attachments", {}).values():
        alt = re.search(r"!\[([^]]*)\]\(attachment:", first.source)[1]
        lines.append(save_picture(base64.b64decode(picture["image/png"]), f"{short}-00", alt))
    lines.append(next(text for text in paragraphs if not text.startswith(("[!", "!["))))
    text = ""
    for number, cell in enumerate(notebook.cells[1:-1], 1):
        if cell.cell_type == "markdown":
            text = cell.source
            continue
        result = shown(outputs.get(cell.id, []), f"{short}-{number:02d}")
        if any(line.startswith(("![", "[listen")) for line in result):
            lines += [re.sub(r"^##", "###", text), *result]
    return [*lines, notebook.cells[-1].source.replace("## ", "### ")]


def main(run: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    parts = ["# A tour of the notebooks", "What `make demo` showed, for those who only look."]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        executed = run / "notebooks" / path.name
        if executed.exists():
            parts += tour_of(path, executed)
    text = "\n\n".join(parts).replace(str(run.resolve()), f"runs/{run.name}")
    (ROOT / "docs" / "tour.md").write_text(f"{text}\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"docs/tour.md, with {size / 1e6:.1f} MB of pictures and sounds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
