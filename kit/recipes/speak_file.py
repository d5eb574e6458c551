"""The command `speak`: one text, or a file of sentences, as WAV files.

A file has a sentence a line, or `id|text`. Its sentences are spoken in batches; index.csv beside
the WAV files names each with its text, and the same command resumes after an interruption.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

from kit.base.errors import KitError, SpeechError
from kit.base.files import digest, file_digest, make_folder, require_folder_name, write_atomic
from kit.base.formatting import clock, shorten
from kit.base.hardware import detect
from kit.dataset.tables import encoding_problem, iter_lines
from kit.inference.export import FILES, load_export, read_card
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Voice
from kit.notebook.progress import Ticker
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.hub import voice_folder
from kit.recipes.speak import (
    Speaking,
    say_with_package,
    sound_of,
    spoken_result,
    with_reference,
)
from kit.releases.indextts2.model import indextts2_in

BATCH = 64  # candidates that are spoken together
INDEX = "index.csv"
COLUMNS = ("audio", "text", "speaker", "seconds", "ended", "key")
MAX_LISTED = 3  # lines that cannot be spoken, in a message


def speak(
    run: ActiveRun | str,
    text: str | None = None,
    file: Path | None = None,
    out: Path | None = None,
    voice: str = "",
    dtype: str = "",
    speaker: str = "",
    reference: str = "",
) -> Iterator[Result]:
    """Say `text` or the sentences of `file`; without both, all steps of 04_inference.

    By the run's voice, or by the exported `voice`, a folder or hf://OWNER/NAME. Raises KitError for
    options that do not belong together.
    """
    given = [voice, reference, speaker, dtype, out]
    if text is None and file is None and any(given):
        raise KitError("Add a --text to say, or a --file of sentences.")
    if text is not None and file is not None:
        raise KitError("Give a --text to say or a --file of sentences, not both.")
    if file is not None and out is None:
        raise KitError("--file needs --out: a folder for the WAV files.")
    if voice and dtype:
        raise KitError("--dtype is for a run's voice: an exported one has its number format.")
    if speaker and reference:
        raise SpeechError("Give a --speaker of the voice or a --reference, not both.")
    if text is None and file is None:
        yield from Speaking(run).run()
        return
    sentences = read_sentences(file) if file else {}
    if text is not None and voice and indextts2_in(Path(voice).expanduser()):
        result = say_with_package(Path(voice).expanduser(), text, reference)
        yield written(result, out or Path("spoken.wav"))
        return
    if voice:
        folder = voice_folder(voice)
        spoken_by = load_export(folder, detect().device)
        settings = read_card(folder).settings
        weights = [folder / name for name in FILES]
    else:
        speaking = Speaking(run)
        spoken_by, settings = speaking.voice_in(dtype), speaking.sampling
        weights = [speaking.weights_file, run.path("codec.safetensors")]
    if reference:
        spoken_by, speaker = with_reference(spoken_by, reference)
        weights.append(Path(reference).expanduser())
    if file:
        made_by = digest([file_digest(path) for path in weights], dtype)
        yield speak_lines(spoken_by, sentences, out, settings, speaker, made_by)
        return
    speech = spoken_by.speak([text], speaker or spoken_by.speakers[0], settings)[0]
    result = spoken_result(spoken_by, speech, settings)
    yield written(result, out or (Path("spoken.wav") if voice else run.path("spoken.wav")))


def written(result: Result, path: Path) -> Result:
    """Write the sound of `result` to `path`; return it with a line that says so."""
    write_atomic(path, result.sounds[0].wav_bytes())
    line = f"{result.line}\nWritten: {path}"
    return dataclasses.replace(result, line=line, figures={"audio": str(path)}, shown=False)


def read_sentences(path: Path) -> dict[str, str]:
    """Return the texts of a file by id, or by number of line ("00001"), in order.

    Raises KitError for a file that is missing, empty or not UTF-8, and for an id that is missing,
    doubled or cannot name a file.
    """
    path = path.expanduser()
    try:
        lines = [line.strip("\ufeff \t\r\n") for line in iter_lines(path)]
    except OSError as error:
        raise KitError(
            f"--file {path} cannot be read ({error.strerror}): name a text file with a sentence a "
            "line."
        ) from error
    numbered = {number: line for number, line in enumerate(lines, 1) if line}
    if not numbered:
        raise KitError(f"{path} has no text: write a sentence a line, or id|text.")
    has_ids = "|" in next(iter(numbered.values()))
    sentences = {}
    for number, line in numbered.items():
        problem, fix = encoding_problem(line)
        if problem:
            raise KitError(f"{path}, line {number}: {problem}. {fix}")
        name, bar, text = line.partition("|")
        if bool(bar) != has_ids:
            raise KitError(
                f"{path}, line {number}: {shorten(line, 60)!r} has {'a' if bar else 'no'} `|`, "
                "unlike the first line. Write id|text in every line, or in none."
            )
        if has_ids:
            name = require_folder_name(name.strip(), f"{path}, line {number}: the id")
        else:
            name, text = f"{number:05}", line
        if name in sentences:
            raise KitError(f"{path}, line {number}: the id {name!r} was there before.")
        sentences[name] = text.strip()
    return sentences


def speak_lines(
    voice: Voice,
    sentences: dict[str, str],
    folder: Path,
    config: GenerateConfig,
    speaker: str = "",
    made_by: str = "",
) -> Result:
    """Speak `sentences` (texts by id) into `folder`: ID.wav, and index.csv with a row for each.

    A file is spoken again only if its text, the speaker, the settings or `made_by`, a digest of the
    voice, have changed. Raises SpeechError, before any work, for texts that cannot be spoken.
    """
    speaker = speaker or voice.speakers[0]
    voice.reference(speaker)
    require_speakable(voice, sentences)
    folder = make_folder(folder.expanduser())
    rows = {}
    for row in read_index(folder / INDEX):
        text = sentences.get(Path(row["audio"]).stem)
        same = text is not None and row["key"] == digest(text, speaker, config, made_by)
        if same and (folder / row["audio"]).is_file():
            rows[row["audio"]] = row
    missing = [name for name in sentences if f"{name}.wav" not in rows]
    missing.sort(key=lambda name: -len(sentences[name]))  # like lengths together
    characters = sum(len(sentences[name]) for name in missing)
    size = max(1, BATCH // voice.within(config).rows_per_text)
    tick = Ticker("characters spoken")
    done = 0
    for first in range(0, len(missing), size):
        names = missing[first : first + size]
        spoken = voice.speak([sentences[name] for name in names], speaker, config, BATCH)
        for name, speech in zip(names, spoken):
            sound = sound_of(voice, speech)
            write_atomic(folder / f"{name}.wav", sound.wav_bytes())
            seconds = f"{len(sound.wave) / sound.sample_rate_hz:.3f}"
            key = digest(speech.text, speaker, config, made_by)
            ended = "yes" if speech.stopped else "no"
            values = (f"{name}.wav", speech.text, speaker, seconds, ended, key)
            rows[f"{name}.wav"] = dict(zip(COLUMNS, values))
            done += len(speech.text)
        write_index(folder / INDEX, [rows[f"{n}.wav"] for n in sentences if f"{n}.wav" in rows])
        tick(done, characters, f"{first + len(names)} of {len(missing)} sentences")
    write_index(folder / INDEX, [rows[f"{name}.wav"] for name in sentences])
    figures = {
        "sentences": len(rows),
        "spoken_now": len(missing),
        "seconds": round(sum(float(row["seconds"]) for row in rows.values()), 3),
        "not_ended": sum(row["ended"] == "no" for row in rows.values()),
        "index": str(folder / INDEX),
    }
    line = f"{len(rows)} sentences, {clock(figures['seconds'])} of speech: {folder / INDEX}"
    if len(missing) < len(rows):
        line += f"; {len(rows) - len(missing)} were there before"
    if figures["not_ended"]:
        line += f"\n{figures['not_ended']} were cut at the length limit (`ended` is no): listen"
    return Result(line=line, figures=figures, shown=False)


def require_speakable(voice: Voice, sentences: dict[str, str]) -> None:
    """Raise SpeechError naming the first of `sentences` that `voice` cannot say."""
    problems = []
    for name, text in sentences.items():
        try:
            voice.parts(text)
        except SpeechError as error:
            problems.append(f"{name}: {error}")
    if problems:
        shown = "\n".join(problems[:MAX_LISTED])
        raise SpeechError(
            f"{len(problems)} of {len(sentences)} sentences cannot be spoken: correct them or "
            f"leave them out.\n{shown}"
        )


def read_index(path: Path) -> list[dict]:
    """Return the rows of an index; [] without one. Raises KitError for another kind of table."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(COLUMNS):
            raise KitError(f"{path} is not from this command: name another folder with --out.")
        return [row for row in reader if None not in row.values()]


def write_index(path: Path, rows: list[dict]) -> None:
    file = io.StringIO(newline="")
    table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomic(path, file.getvalue())
