"""`python -m kit speak --file`: a file of sentences, spoken into a folder with an index."""

import csv
from pathlib import Path

from kit.base.errors import KitError, SpeechError
from kit.base.files import atomic_path, encode_wav, make_folder, write_atomic
from kit.inference.voice import Voice
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.settings import GenerateConfig

BATCH = 16  # sentences that are spoken before their files are written
COLUMNS = ("audio", "text", "speaker", "ended")


def speak_file(
    voice: Voice, file: Path, folder: Path, config: GenerateConfig, speaker: str
) -> Result:
    """Speak each line of `file` into `folder`: 00001.wav ... by its number, and index.csv.

    What is in the index is not spoken again. Raises KitError where it has other texts, SpeechError,
    before any work, for a line that cannot be spoken.
    """
    texts = read_sentences(file, voice)
    folder = make_folder(folder.expanduser())
    index = folder / "index.csv"
    rows = {}
    if index.is_file():
        with index.open(encoding="utf-8", newline="") as written:
            rows = {row.get("audio"): row for row in csv.DictReader(written)}
    for audio, row in rows.items():
        if (row.get("text"), row.get("speaker")) != (texts.get(audio), speaker):
            raise KitError(
                f"{index} has {audio} of another text or speaker: name another folder (--out)."
            )
    missing = [name for name in texts if name not in rows or not (folder / name).is_file()]
    tick = Ticker("sentences spoken")
    for first in range(0, len(missing), BATCH):
        names = missing[first : first + BATCH]
        spoken = voice.speak([texts[name] for name in names], speaker, config)
        for audio, speech in zip(names, spoken):
            write_atomic(folder / audio, encode_wav(speech.wave.numpy(), voice.codec.sample_rate))
            ended = "yes" if speech.stopped else "no: cut at the length limit"
            rows[audio] = dict(zip(COLUMNS, (audio, texts[audio], speaker, ended)))
        with atomic_path(index) as part, part.open("w", encoding="utf-8", newline="") as out:
            # An index of an older kit has one more column.
            table = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
            table.writeheader()
            table.writerows(rows[name] for name in texts if name in rows)
        tick(first + len(names), len(missing))
    figures = {"sentences": len(rows), "spoken_now": len(missing)}
    line = f"{len(rows)} sentences: {index}"
    truncated = sum(row["ended"] != "yes" for row in rows.values())
    if truncated:
        line += f"\n{truncated} were cut at the length limit (column `ended`): listen to them"
    return Result(line=line, figures=figures, shown=False)


def read_sentences(file: Path, voice: Voice) -> dict[str, str]:
    """Return the lines of `file` by the names of their WAV files; each can be spoken by `voice`."""
    try:
        lines = file.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(f"--file {file} cannot be read as UTF-8 text: {error}") from error
    texts = {f"{i:05}.wav": line.strip() for i, line in enumerate(lines, 1) if line.strip()}
    if not texts:
        raise KitError(f"{file} has no text: write a sentence a line.")
    for audio, text in texts.items():
        try:
            voice.parts(text)
        except SpeechError as error:
            raise SpeechError(f"{file}, line {int(audio[:5])}: {error}") from error
    return texts
