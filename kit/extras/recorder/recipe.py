"""Record or upload speech on a page in the browser, into a folder that `prepare` reads.

The page is Gradio's (`pip install gradio`). Recorded sentences become an LJSpeech folder, wavs/ and
metadata.csv. Nothing is overwritten: a second recording of a sentence is another file and another
row, and uploaded files whose names are taken go to a folder of their own.
"""

import itertools
import random
import shutil
from pathlib import Path

import numpy as np
import yaml

from kit.audio.clip import read_clip
from kit.audio.container import SUFFIXES
from kit.base.config import CONFIGS
from kit.base.errors import DatasetError, KitError
from kit.base.files import append_lines, digest, disk_errors, make_folder
from kit.dataset.archive import archive_suffix, unpack
from kit.dataset.synthetic import WORDS, Grammar, load_words
from kit.dataset.tables import read_texts
from kit.notebook.question import ask_question
from kit.notebook.result import is_watched
from kit.recipes.open_run import ActiveRun
from kit.settings import ArchiveConfig, ManifestConfig
from kit.streams.formats import TextLines
from kit.text.normalize import language_code, letters, normalize
from kit.text.sentences import split

OFFERED = 100  # sentences to read, at most
MAX_CHARACTERS = 140  # of a sentence: ten seconds
MAX_CHARACTERS_PER_S = 25.0  # 15 are usual
TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".list")


def recordings(
    run: ActiveRun, how: str, language: str, sentences: str = "", wait: bool = False
) -> str:
    """Show the page that records ("record") or uploads ("upload"); return its folder; "" for "".

    The sentences to read are lines of the text file `sentences` ("": the kit's own). With `wait` it
    returns after a click that says that all is recorded, or a countdown where something was before.
    Raises DatasetError for a file or folder that cannot be read, KitError without Gradio.
    """
    if not how:
        return ""
    path = run.path("recordings" if how == "record" else "uploads")
    if how == "record":
        chosen = sentences_to_read(language, sentences)
        page = record_page(RecordingFolder(path, chosen, language_code(language)))
    else:
        page = upload_page(path)
    has_some = any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))
    page.launch(share=False, prevent_thread_lock=True, quiet=True)
    if wait and is_watched():
        answers = {"continue": "Continue with these recordings"}
        ask_question("Add recordings above.", answers, "continue" if has_some else "")
    return str(path)


class RecordingFolder:
    """An LJSpeech folder, and the sentences to record into it."""

    def __init__(self, path: Path, sentences: list[str], language: str):
        self.path = make_folder(path)
        make_folder(path / "wavs")
        self.sentences = sentences
        self.language = language

    def next(self, after: str = "") -> str:
        """Return the first sentence behind `after` that was not recorded yet, "" at the end."""
        recorded = set(read_texts(self.path).values())
        first = self.sentences.index(after) + 1 if after in self.sentences else 0
        return next((s for s in self.sentences[first:] if s not in recorded), "")

    def save(self, sentence: str, wav: Path) -> str:
        """Copy a recording of `sentence` and add its row to the table; return a line on it.

        Raises DatasetError, with what to do, for a recording that could not be trained on.
        """
        if sentence not in self.sentences:
            raise DatasetError("There is no sentence to record: reload the page.")
        problem = problem_of(wav, sentence, self.language)
        if problem:
            raise DatasetError(f"Not saved. {problem}")
        path = copy_as_new(wav, self.path / "wavs" / f"{digest(sentence)}.wav")
        with disk_errors(path), append_lines(self.path / "metadata.csv") as table:
            table.write(f"{path.stem}|{sentence}\n".encode())
        return f"Saved. {len(read_texts(self.path))} recordings are in {self.path}."


def add_files(folder: Path, files: list[Path]) -> str:
    """Copy recordings and tables, unpack archives under `folder`; return a line on where they are.

    batch-1/, batch-2/ ... hold what belongs together: files join the last one, so that a table may
    follow its recordings, or begin the next if that has one of their names. Raises DatasetError for
    files of other kinds.
    """
    for file in files:
        if not archive_suffix(file) and file.suffix.lower() not in SUFFIXES + TABLES:
            kinds = ", ".join((*SUFFIXES, *TABLES, ".zip"))
            raise DatasetError(f"{file.name} is not a recording, table or archive: {kinds}.")
    number = max(len(list(folder.glob("batch-*"))), 1)
    names = [file.name[: len(file.name) - len(archive_suffix(file))] for file in files]
    if any((folder / f"batch-{number}" / name).exists() for name in names):
        number += 1
    batch = make_folder(folder / f"batch-{number}")
    for file in files:
        if archive_suffix(file):
            unpack(file, batch, ArchiveConfig())
        else:
            copy_as_new(file, batch / file.name)
    return (
        f"{len(files)} uploaded into {batch}. With a table, set DATA in 01_data_prep to {folder}; "
        "without texts, set UNTRANSCRIBED in 06_more_data to it."
    )


def copy_as_new(file: Path, target: Path) -> Path:
    """Copy `file` to `target` or, if that exists, to NAME-2, NAME-3 ...; return where it is."""
    path = target
    for number in itertools.count(2):
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            path = target.with_stem(f"{target.stem}-{number}")
    with disk_errors(path):
        shutil.copyfile(file, path)
    return path


def problem_of(wav: Path, sentence: str, language: str) -> str:
    """Return what is wrong with a recording and what to do, "" if nothing is."""
    wave, rate_hz = read_clip(str(wav))
    seconds = len(wave) / rate_hz
    limits = ManifestConfig()
    characters = len(letters(normalize(sentence, language)))
    if np.abs(wave).max(initial=0.0) < limits.silence_peak:
        return "It is silent. Is the right microphone chosen, and is it on?"
    if (np.abs(wave) > 0.999).mean() > limits.clipped_share:
        return "It is clipped. Move away a little, or lower the microphone's level."
    if seconds > limits.max_clip_s:
        return f"It is {seconds:.1f} s long. Press Stop soon after the last word."
    if seconds < limits.min_clip_s or characters > MAX_CHARACTERS_PER_S * seconds:
        return f"It is short for this sentence ({seconds:.1f} s). Read all of it, then press Stop."
    return ""


def sentences_to_read(language: str, file: str = "") -> list[str]:
    """Return sentences of the text file `file` ("": the kit's own), at most OFFERED.

    Raises DatasetError if there are none, SpeechError for an unknown language.
    """
    code = language_code(language)
    sentences = own_sentences(Path(file).expanduser(), code) if file else kit_sentences(code)
    if not sentences:
        raise DatasetError(
            f"The kit has no sentences in {code!r} to read aloud: write some into a text file, a "
            "sentence a line, and name it in SENTENCES of 06_more_data."
        )
    cleaned = (" ".join(text.replace("|", " ").split()) for text in sentences)
    return list(dict.fromkeys(cleaned))[:OFFERED]  # each once


def own_sentences(file: Path, language: str) -> list[str]:
    """Return the sentences of a text file, none longer than MAX_CHARACTERS."""
    lines = []
    if file.is_file():
        spoken = (line for line in TextLines(file) if letters(line))
        lines = list(itertools.islice(spoken, OFFERED))
    if not lines:
        raise DatasetError(f"{file} must be a text file with a sentence a line.")
    parts = split("\n".join(lines), language, lambda part: len(part) <= MAX_CHARACTERS)
    return [part.text for part in parts]


def kit_sentences(language: str) -> list[str]:
    """Return the sentences of configs/sentences in `language` and some of random words."""
    sentences = []
    for file in sorted((CONFIGS / "sentences").glob("*.yaml")):
        sentences += yaml.safe_load(file.read_text(encoding="utf-8")).get(language, [])
    if (WORDS / f"{language}.yaml").is_file():
        grammar = Grammar(load_words(language), random.Random(0))
        sentences += [" ".join(grammar.sentence(9)) for _ in range(2 * OFFERED)]
    return sentences


def record_page(folder: RecordingFolder):
    gradio = import_gradio()

    def save(sentence: str, wav: str):
        if not wav:
            raise gradio.Error("There is no recording yet: press Record.")
        line = run_or_show(gradio, folder.save, sentence, Path(wav))
        return folder.next(sentence), None, line

    with gradio.Blocks(title="Record", analytics_enabled=False) as page:
        sentence = gradio.Textbox(label="Read this aloud", interactive=False, lines=2)
        sound = gradio.Audio(sources=["microphone"], type="filepath", format="wav", label="You")
        with gradio.Row():
            save_button = gradio.Button("Save", variant="primary")
            skip_button = gradio.Button("Skip")
        line = gradio.Textbox(label="Saved", interactive=False)
        save_button.click(save, [sentence, sound], [sentence, sound, line], api_name="save")
        skip_button.click(folder.next, [sentence], [sentence], api_name="next")
        page.load(folder.next, None, [sentence])
    return page


def upload_page(folder: Path):
    gradio = import_gradio()

    def add(files: list[str] | None) -> tuple:
        if not files:
            raise gradio.Error("Choose files first.")
        return None, run_or_show(gradio, add_files, folder, [Path(file) for file in files])

    with gradio.Blocks(title="Upload", analytics_enabled=False) as page:
        label = "Recordings, their table, or a zip of them"
        files = gradio.File(file_count="multiple", type="filepath", label=label)
        button = gradio.Button("Upload", variant="primary")
        line = gradio.Textbox(label="Uploaded", interactive=False)
        button.click(add, [files], [files, line], api_name="add")
    return page


def import_gradio():
    try:
        import gradio
    except ImportError as error:
        raise KitError("Recording and uploading need Gradio: pip install gradio") from error
    return gradio


def run_or_show(gradio, act, *arguments) -> str:
    """Return `act(*arguments)`; the page shows the sentence of an error."""
    try:
        return act(*arguments)
    except (KitError, OSError) as error:
        raise gradio.Error(str(error), print_exception=False) from error
