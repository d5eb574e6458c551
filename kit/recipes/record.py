"""Recordings made or uploaded in a notebook: a folder that `prepare` or `transcribe` reads.

Recorded sentences become an LJSpeech folder, wavs/ and metadata.csv. A clip's id is a digest of its
sentence, so the recorder resumes with any list of sentences; skipped.txt has those left out.
"""

import collections
import heapq
import itertools
import os
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kit.audio.clip import FRAME_S, ClipMeasure, measure_clip, read_clip
from kit.audio.container import SUFFIXES
from kit.base.config import CONFIGS
from kit.base.errors import DatasetError
from kit.base.files import append_lines, digest, disk_errors, make_folder, write_atomic
from kit.base.formatting import clock, join_names
from kit.dataset.alignment import quiet_frames
from kit.dataset.archive import archive_suffix, unpack
from kit.dataset.checks import own_faults
from kit.dataset.manifest import Utterance
from kit.dataset.synthetic import WORDS, Grammar, load_words
from kit.dataset.transcripts import read_texts, save_text
from kit.notebook.record_panels import RecorderPanel, Take, UploadPanel
from kit.recipes.open_run import ActiveRun
from kit.recipes.rehearsal import sentences_in
from kit.recipes.start import is_colab
from kit.settings import ArchiveConfig, ManifestConfig
from kit.streams.formats import TextLines
from kit.text import sentences as sentence_splitting
from kit.text.normalize import language_code, letters, normalize

OFFERED = 100  # sentences, unless a person asks for more
MADE = 400  # sentences of random words to choose from
MAX_CHARACTERS = 140  # of a sentence: ten seconds
TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".list")
QUIET_PEAK = 0.06  # of full scale, -24 dB
NOISY_DB = 20.0  # with less between speech and noise, the voice learns the noise
MAX_CHARACTERS_PER_S = 25.0  # between the silences; 15 are usual
MAX_LISTED = 5000  # files of a folder that are counted
EDGE_S = 0.06  # sound throughout the first or last of a recording: a word is cut off
# What to do about what `own_faults` finds.
FIXES = {
    "silent": "Is the right microphone chosen, and is it on?",
    "clipped": "Move away a little, or lower the microphone's level.",
    "too short": "Press Stop only after the last word.",
    "too long": "Press Stop soon after the last word.",
    "pace": "Read the whole sentence, and nothing else.",
}


def record(
    run: ActiveRun, language: str, into: str = "", sentences: str = "", count: int = OFFERED
) -> RecorderPanel:
    """Return the recorder of `count` sentences into the folder `into` ("": in the run).

    They are lines of the text file `sentences` ("": the kit's own). Raises DatasetError for a file
    or folder that cannot be read, SpeechError for an unknown language.
    """
    folder = Path(into).expanduser() if into else run.path("recordings")
    return RecorderPanel(RecordingFolder(folder, language, sentences, count), is_colab())


def upload(run: ActiveRun, into: str = "") -> UploadPanel:
    """Return the panel that uploads files into the folder `into` ("": in the run)."""
    folder = make_folder(Path(into).expanduser() if into else run.path("uploads"))
    drive = Path(os.environ.get("KIT_DRIVE") or "/content/drive") / "MyDrive"
    return UploadPanel(folder, partial(receive, folder), describe_folder, drive, is_colab())


def recordings(run: ActiveRun, how: str, language: str) -> str:
    """Show the recorder ("record") or the upload ("upload"); return their folder; "" for ""."""
    if not how:
        return ""
    panel = record(run, language) if how == "record" else upload(run)
    panel.run()
    return str(panel.folder)


class RecordingFolder:
    """The sentences to record, and the LJSpeech folder with those that were recorded."""

    def __init__(self, folder: Path, language: str, sentences: str = "", count: int = OFFERED):
        self.folder = make_folder(folder)
        code = language_code(language)
        self.language = code
        pool = own_sentences(sentences, code) if sentences else kit_sentences(code)
        self.texts = read_texts(folder)  # by id
        skipped = folder / "skipped.txt"
        self.skipped = set(TextLines(skipped)) if skipped.is_file() else set()
        self.sentences = choose_sentences(pool, code, count)
        self.seconds = {}
        for name in self.texts:
            path = self._wav(name)
            if path.is_file():
                self.seconds[name] = measure_clip(str(path)).seconds
        self.letters = _letters_of(self.sentences, self.language)

    def done(self, sentence: str) -> bool:
        """Whether `sentence` was recorded or skipped, now or before a restart."""
        return sentence in self.skipped or digest(sentence) in self.seconds

    def progress(self) -> str:
        spoken = _letters_of(self.texts.values(), self.language)
        return (
            f"{len(self.seconds)} recorded ({clock(sum(self.seconds.values()))}), with "
            f"{len(spoken & self.letters)} of {len(self.letters)} letters."
        )

    def check(self, sentence: str, wav: bytes) -> Take:
        """Measure a recording. Raises DatasetError for one that cannot be read."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recording.wav"
            path.write_bytes(wav)
            measure = measure_clip(str(path))
            wave, rate_hz = read_clip(str(path))
        text = normalize(sentence, self.language)
        row = Utterance(id="", audio="", text=text, speaker="", split="train", line=0)
        faults = dict(own_faults(row, measure, ManifestConfig()))
        if "silent" in faults:
            faults = {"silent": faults["silent"]}  # nothing else matters then
        problems = [
            f"{fault[0].upper()}{fault[1:]}. {FIXES.get(kind, '')}"
            for kind, fault in faults.items()
        ]
        if not problems:
            problems = doubts(measure, wave, rate_hz, len(letters(text)))
        return Take(seconds=measure.seconds, problems=tuple(problems), usable=not faults)

    def save(self, sentence: str, wav: bytes) -> None:
        name = digest(sentence)
        path = self._wav(name)
        write_atomic(path, wav)
        save_text(self.folder, name, sentence)
        self.texts[name] = sentence
        self.seconds[name] = measure_clip(str(path)).seconds

    def skip(self, sentence: str) -> None:
        with append_lines(self.folder / "skipped.txt") as file:
            file.write(f"{sentence}\n".encode())
        self.skipped.add(sentence)

    def _wav(self, name: str) -> Path:
        return self.folder / "wavs" / f"{name}.wav"


def doubts(measure: ClipMeasure, wave: np.ndarray, rate_hz: int, characters: int) -> list[str]:
    """Return what is doubtful about a recording that can be trained on, each with what to do."""
    spoken_s = measure.seconds - measure.leading_s - measure.trailing_s
    snr_db = NOISY_DB if measure.snr_db is None else measure.snr_db
    size = round(rate_hz * FRAME_S)
    frames = wave[: len(wave) // size * size].reshape(-1, size)
    loud = ~quiet_frames(torch.from_numpy(frames.std(axis=1)).clamp(min=1e-4).log())
    edge = round(EDGE_S / FRAME_S)
    short = f"It is short for this sentence ({spoken_s:.1f} s). {FIXES['pace']}"
    clipped = f"It is partly clipped ({measure.clipped:.2%}). {FIXES['clipped']}"
    quiet = f"It is quiet (peak {measure.peak:.2f} of 1). Move nearer, or speak up."
    noisy = f"Speech is only {snr_db:.0f} dB above the noise. Find a quieter room, or move nearer."
    problems = {
        short: characters > MAX_CHARACTERS_PER_S * spoken_s,
        clipped: measure.clipped > ManifestConfig().clipped_share / 10,
        quiet: measure.peak < QUIET_PEAK,
        noisy: snr_db < NOISY_DB,
        "It starts within a sound: wait a moment before you read.": loud[:edge].all(),
        "It ends within a sound: press Stop a moment after the last word.": loud[-edge:].all(),
    }
    return [text for text, doubtful in problems.items() if doubtful]


def kit_sentences(code: str) -> list[str]:
    """Return the sentences of configs/ in the language `code`, perhaps none."""
    files = [CONFIGS / "sentences" / f"{name}.yaml" for name in ("rehearsal", "everyday")]
    sentences = [text for file in files for text in sentences_in(file).get(code, [])]
    if (WORDS / f"{code}.yaml").is_file():
        grammar = Grammar(load_words(code), random.Random(0))
        sentences += [" ".join(grammar.sentence(9)) for _ in range(MADE)]
    return sentences


def own_sentences(path: str, language: str) -> list[str]:
    """Return the sentences of a text file, none longer than MAX_CHARACTERS."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DatasetError(f"There is no {path}: name a text file with a sentence a line.")
    text = "\n".join(line for line in TextLines(file) if letters(line))
    if not text:
        raise DatasetError(f"{path} has no text: write a sentence a line.")
    parts = sentence_splitting.split(text, language, lambda part: len(part) <= MAX_CHARACTERS)
    return [part.text for part in parts]


def choose_sentences(pool: list[str], language: str, count: int) -> list[str]:
    """Return `count` sentences of `pool`, those first that add most letters and pairs of letters.

    What earlier sentences have counts less, and a letter as much as five pairs. Gains only fall, so
    a sentence is counted again only when it comes first (lazy greedy, Minoux 1978).
    """
    pool = list(dict.fromkeys(" ".join(text.replace("|", " ").split()) for text in pool))
    units = []
    for text in pool:
        words = letters(normalize(text, language)).split()
        pairs = {a + b for word in words for a, b in itertools.pairwise(word)}
        units.append(pairs.union(*words))
    seen = collections.Counter()

    def gain(index: int) -> float:
        weights = ((5 if len(unit) == 1 else 1) / (1 + seen[unit]) for unit in units[index])
        return sum(weights) / (20 + len(pool[index]))

    best = [(-gain(index), index) for index in range(len(pool))]
    heapq.heapify(best)
    chosen = []
    while best and len(chosen) < count:
        index = best[0][1]
        heapq.heapreplace(best, (-gain(index), index))
        if best[0][1] == index:
            heapq.heappop(best)
            chosen.append(pool[index])
            seen.update(units[index])
    return chosen


def _letters_of(texts, language: str) -> set[str]:
    return {c for text in texts for c in letters(normalize(text, language)) if c.isalpha()}


def receive(folder: Path, file: Path) -> None:
    """Move an uploaded file into `folder`, or unpack it there."""
    if archive_suffix(file):
        unpack(file, folder, ArchiveConfig())
        file.unlink()
    elif file.suffix.lower() in SUFFIXES + TABLES:
        with disk_errors(folder / file.name):
            shutil.move(file, folder / file.name)
    else:
        kinds = ", ".join((*SUFFIXES, *TABLES, ".zip"))
        raise DatasetError(f"{file.name} is no recording, table or archive: expected {kinds}.")


def describe_folder(folder: Path) -> str:
    """Return how many recordings and which tables are in `folder`, and what can be done with it."""
    folder = folder.resolve()
    files = list(itertools.islice(folder.rglob("*"), MAX_LISTED))
    audio = sum(file.suffix.lower() in SUFFIXES for file in files)
    tables = [file.name for file in files if file.suffix.lower() in TABLES]
    more = " or more" if len(files) == MAX_LISTED else ""
    if not audio:
        return f"No recordings in {folder} yet."
    texts = join_names(tables) if tables else "no texts"
    setting = "DATA in 01_data_prep" if tables else "UNTRANSCRIBED in 06_more_data"
    many = f"{audio:,}{more} recording{'s' * (audio > 1)}"
    return f"{many} and {texts} in {folder}: for {setting}."
