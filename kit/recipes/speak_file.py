"""`python -m kit speak --file`: a file of sentences, spoken into a folder with an index."""

import csv
from pathlib import Path

from kit.base.errors import KitError, SpeechError
from kit.base.files import atomic_path, encode_wav, make_folder, write_atomic
from kit.base.formatting import clock
from kit.inference.voice import Voice
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.settings import GenerateConfig

BATCH = 16  # sentences that are spoken before their files are written
INDEX = "index.csv"
COLUMNS = ("audio", "text", "speaker", "seconds", "ended")


def speak_file(
    voice: Voice, file: Path, folder: Path, config: GenerateConfig, speaker: str = ""
) -> Result:
    """Speak each line of `file` into `folder`: 00001.wav ... by its number, and index.csv.

    What is in the index is not spoken again. Raises KitError for a file that cannot be read and a
    folder with other texts, SpeechError, before any work, for a line that cannot be spoken.
    """
    texts = read_sentences(file, voice)
    speaker = speaker or voice.speakers[0]
    voice.reference(speaker)  # raises for a speaker that there is not
    folder = make_folder(folder.expanduser())
    rows = {name: row for name, row in read_index(folder / INDEX).items() if name in texts}
    for audio, row in rows.items():
        if (row["text"], row["speaker"]) != (texts[audio], speaker):
            raise KitError(
                f"{folder / audio} is {row['text']!r} by {row['speaker']!r}, not {texts[audio]!r} "
                f"by {speaker!r}: delete it, or name another folder with --out."
            )
    missing = [name for name in texts if name not in rows]
    rate_hz = voice.codec.sample_rate
    tick = Ticker("sentences spoken")
    for first in range(0, len(missing), BATCH):
        names = missing[first : first + BATCH]
        spoken = voice.speak([texts[name] for name in names], speaker, config)
        for audio, speech in zip(names, spoken):
            write_atomic(folder / audio, encode_wav(speech.wave.numpy(), rate_hz))
            seconds = f"{len(speech.wave) / rate_hz:.3f}"
            ended = "yes" if speech.stopped else "no"
            rows[audio] = dict(zip(COLUMNS, (audio, texts[audio], speaker, seconds, ended)))
        write_index(folder / INDEX, [rows[name] for name in texts if name in rows])
        tick(first + len(names), len(missing))
    seconds = sum(float(row["seconds"]) for row in rows.values())
    not_ended = sum(row["ended"] == "no" for row in rows.values())
    figures = {"sentences": len(rows), "spoken_now": len(missing), "not_ended": not_ended}
    line = f"{len(rows)} sentences, {clock(seconds)} of speech: {folder / INDEX}"
    if not_ended:
        line += f"\n{not_ended} were cut at the length limit (`ended` is no): listen"
    return Result(line=line, figures=figures, shown=False)


def read_sentences(file: Path, voice: Voice) -> dict[str, str]:
    """Return the lines of `file` by the names of their WAV files; each can be spoken by `voice`."""
    try:
        lines = file.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(f"--file {file} cannot be read as UTF-8 text: {error}") from error
    texts = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text:
            try:
                voice.parts(text)
            except SpeechError as error:
                raise SpeechError(f"{file}, line {number}: {error}") from error
            texts[f"{number:05}.wav"] = text
    if not texts:
        raise KitError(f"{file} has no text: write a sentence a line.")
    return texts


def read_index(path: Path) -> dict[str, dict]:
    """Return the rows of an index whose files are there, by file. Raises KitError for others."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(COLUMNS):
            raise KitError(f"{path} is not from this command: name another folder with --out.")
        return {row["audio"]: row for row in reader if (path.parent / row["audio"]).is_file()}


def write_index(path: Path, rows: list[dict]) -> None:
    with atomic_path(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
