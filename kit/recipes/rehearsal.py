"""What a voice could say before, said again while it learns something else.

Before the first step the voice that a run begins with reads sentences in the languages that it
speaks, in the voices of the run's recordings. What it says stays on disk as codes, and training
reads a share of it along (`finetune.rehearsal`). Nobody needs recordings for that: the voice is its
own teacher (pseudorehearsal, Robins 1995, doi:10.1080/09540099550039318).
"""

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from kit.base.config import CONFIGS, build
from kit.base.errors import DamagedFileError, KitError
from kit.base.files import digest, write_atomic
from kit.base.formatting import clock
from kit.base.run import read_run_file
from kit.base.tensor_file import arrays_digest
from kit.batches.batching import chunks
from kit.batches.cache_files import as_bytes, from_bytes, load_tensors, pack_tensors, split_by
from kit.inference.decoder import Decoder
from kit.inference.generate import decode
from kit.inference.sampling import GenerateConfig, candidate_seed
from kit.inference.voice import Voice
from kit.model.sequence import MAX_CODE_POSITIONS, GPTConfig
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.active_run import ActiveRun
from kit.recipes.base_languages import BaseLanguages
from kit.recipes.prepare_source import sampling_of
from kit.recipes.start_from import BEGUN, TOKENIZER
from kit.text.tokenizer import load_tokenizer
from kit.training.trainable import FinetuneConfig

REHEARSED = CONFIGS / "sentences" / "rehearsal.yaml"
FILE = "rehearsal.safetensors"
AT_ONCE = 32  # rows that are spoken together


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """A sentence that the voice is to read, for the `number`-th time."""

    language: str
    text: str
    speaker: str
    number: int


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """What was read so far: codes (N,) by reading, None where no end was found."""

    codes: dict[RehearsalRow, np.ndarray | None]
    seconds: float  # that speaking has taken

    @property
    def whole(self) -> dict[RehearsalRow, np.ndarray]:
        """The readings that can be learnt from: without an end they would teach to find none."""
        return {reading: codes for reading, codes in self.codes.items() if codes is not None}

    def save(self, path: Path, key: str) -> None:
        rows = [dataclasses.asdict(reading) for reading in self.codes]
        for row, codes in zip(rows, self.codes.values()):
            row["whole"] = codes is not None
        codes = [np.zeros(0, np.int32) if codes is None else codes for codes in self.codes.values()]
        tensors = {
            "key": as_bytes(key),
            "rows": as_bytes(rows),
            "codes": np.concatenate(codes),
            "code_counts": np.array([len(row) for row in codes]),
            "seconds": np.array([self.seconds]),
        }
        write_atomic(path, pack_tensors(tensors))


def load_rehearsed(path: Path, key: str) -> Rehearsed:
    """What lies at `path`; nothing where that was not read as `key` says.

    Raises DamagedFileError for a file that is missing or damaged.
    """
    table = load_tensors(path)
    if from_bytes(table["key"]) != key:
        return Rehearsed(codes={}, seconds=0.0)
    found = {}
    for row, codes in zip(
        from_bytes(table["rows"]), split_by(table["codes"], table["code_counts"])
    ):
        whole = row.pop("whole")
        found[RehearsalRow(**row)] = codes if whole else None
    return Rehearsed(codes=found, seconds=float(table["seconds"][0]))


def rehearsal_sampling(run: ActiveRun) -> GenerateConfig:
    """How codes are drawn for it: just as likely as the voice finds them.

    Colder, or of fewer codes, they would teach to expect less than it does: what is to be kept is
    all that it expects (docs/measurements-archive.md).
    """
    warm = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "guidance": 1.0,
    }
    once = {"candidates": 1, "retries": 0}
    return sampling_of(run, **warm, **once)


def rehearsal_key(run: ActiveRun, references: dict[str, Tensor]) -> str:
    """Changes with the voice that reads, how it draws, and whose voice it reads in."""
    arrays = {name: mel.numpy() for name, mel in references.items()}
    return digest(read_run_file(run.folder / BEGUN), arrays_digest(arrays), rehearsal_sampling(run))


def readings(texts: dict[str, list[str]], speakers: list[str], count: int) -> list[RehearsalRow]:
    """`count` readings of `texts` (by language), as evenly as can be, with `speakers` in turns."""
    longest = max(map(len, texts.values()), default=0)
    found = []
    for number in itertools.count():
        for row in range(longest):
            for language, sentences in texts.items():
                if len(found) == count:
                    return found
                if row < len(sentences):
                    speaker = speakers[(len(found) + number) % len(speakers)]
                    reading = RehearsalRow(
                        language=language, text=sentences[row], speaker=speaker, number=number
                    )
                    found.append(reading)
        if not found:
            return found


def rehearsed_rows(run: ActiveRun, references: dict[str, Tensor]) -> Rehearsed:
    """What was read for `run` before training, in the voices of `references`.

    Raises KitError where that was not done, or was done otherwise; DamagedFileError for a damaged
    file.
    """
    cure = (
        "run 01_data_prep (python -m kit prepare; in 07 the cell with `to_codes`) again, or set "
        "finetune.rehearsal to 0."
    )
    if not run.figure("finetune", "rehearsal"):
        raise KitError(
            f"finetune.rehearsal is asked for, and nothing was spoken to rehearse: {cure}"
        )
    found = load_rehearsed(run.folder / FILE, rehearsal_key(run, references))
    if not found.codes and run.report()["finetune"]["rehearsal"]["spoken"]:
        raise KitError(
            "What was spoken to rehearse was of another voice, other recordings or another "
            f"`generate`: {cure}"
        )
    return found


class Rehearsal:
    """The voice that `run` began with, and what it is to read.

    `voice` is one of the run's, for its speakers.
    """

    def __init__(self, run: ActiveRun, voice: Voice):
        self.run = run
        self.voice = voice
        self.config = build(FinetuneConfig, run.section("finetune"))
        self.sampling = rehearsal_sampling(run)
        sentences = Path(self.config.rehearsal_sentences or REHEARSED)
        self.base = BaseLanguages(run, voice, self.sampling, sentences)
        self.key = rehearsal_key(run, voice.references)
        self.most_codes = MAX_CODE_POSITIONS - build(GPTConfig, run.section("model")).stop_targets

    def speak(self) -> Result:
        """Read what was not read before; interrupted, it goes on where it was."""
        wanted = readings(self.base.texts, self.voice.speakers, self.config.rehearsal_rows)
        spoken = self.spoken_before(wanted)
        left = [reading for reading in wanted if reading not in spoken.codes]
        decoder = Decoder(self.base.model)
        ticker = Ticker("spoken to rehearse")
        for part in chunks(left, AT_ONCE):
            began_s = time.monotonic()
            spoken.codes.update(zip(part, self.read(decoder, part)))
            spoken.seconds += time.monotonic() - began_s
            spoken.save(self.run.path(FILE), self.key)
            ticker(len(spoken.codes), len(wanted))
        return self.result(spoken)

    def spoken_before(self, wanted: list[RehearsalRow]) -> Rehearsed:
        """What of `wanted` was read already."""
        path = self.run.path(FILE)
        found = Rehearsed(codes={}, seconds=0.0)
        if path.is_file():
            try:
                found = load_rehearsed(path, self.key)
            except DamagedFileError as error:
                print(f"{error} It is spoken again.")
        codes = {reading: found.codes[reading] for reading in wanted if reading in found.codes}
        return Rehearsed(codes=codes, seconds=found.seconds)

    def read(self, decoder: Decoder, part: list[RehearsalRow]) -> list[np.ndarray | None]:
        """The codes of each of `part`; None where the voice found no end in time."""
        ids = []
        for reading in part:
            tokenizer = load_tokenizer(self.run.path(TOKENIZER), reading.language)
            ids.append(tokenizer.encode_checked(reading.text))
        seeds = [candidate_seed(self.sampling, i, r.number) for i, r in zip(ids, part)]
        cond = self.voice.conditioning([reading.speaker for reading in part], decoder.device)
        said = decode(decoder, ids, cond, self.sampling, seeds)
        found = []
        for row in said:
            whole = row.stopped and 0 < len(row.codes) <= self.most_codes
            found.append(row.codes.numpy().astype(np.int32) if whole else None)
        return found

    def result(self, spoken: Rehearsed) -> Result:
        """What there is to rehearse, recorded."""
        whole = spoken.whole
        languages = list(dict.fromkeys(reading.language for reading in whole))
        figures = {
            "spoken": len(spoken.codes),
            "rows": len(whole),
            "languages": languages,
            "seconds": spoken.seconds,
        }
        self.run.record(finetune={"rehearsal": figures})
        if not spoken.codes:
            line = (
                "Nothing to rehearse: of the languages that the kit has sentences in, the voice "
                "that this run began with spells none but the run's own."
            )
            return Result(line=line)
        line = (
            f"To rehearse: {len(whole)} rows in {len(languages)} languages "
            f"({', '.join(languages)}), spoken in {clock(spoken.seconds)}"
        )
        lost = len(spoken.codes) - len(whole)
        if lost:
            line += f"; {lost} more found no end and are left out"
        if not whole:
            line = (
                f"Nothing is rehearsed: of {lost} sentences the voice that this run began with "
                "found the end of none."
            )
        return Result(line=line)
