"""Rehearsal against forgetting: the base voice speaks sentences that fine-tuning mixes in.

Before the first step the base voice speaks sentences in its languages, in the voices of the run's
recordings. Its codes are saved, and training mixes a share of them in (`finetune.rehearsal`). No
other recordings are needed (pseudorehearsal, Robins 1995, doi:10.1080/09540099550039318).
"""

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from kit.base.config import CONFIGS, build, by_former_names
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
from kit.recipes.base_model import START_FROM, TOKENIZER
from kit.recipes.run_source import sampling_of
from kit.text.tokenizer import load_tokenizer
from kit.training.trainable import FinetuneConfig

REHEARSED = CONFIGS / "sentences" / "rehearsal.yaml"
FILE = "rehearsal.safetensors"
AT_ONCE = 32  # rows in a batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """A sentence for the base voice to speak, for the `number`-th time."""

    language: str
    text: str
    speaker: str
    number: int


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """The rows spoken so far, with their codes (N,); None where the voice did not stop."""

    codes: dict[RehearsalRow, np.ndarray | None]
    seconds: float  # spent on speaking

    @property
    def whole(self) -> dict[RehearsalRow, np.ndarray]:
        """The rows to train on: those where the voice stopped."""
        return {row: codes for row, codes in self.codes.items() if codes is not None}

    def save(self, path: Path, key: str) -> None:
        rows = []
        arrays = []
        for row, codes in self.codes.items():
            rows.append({**dataclasses.asdict(row), "whole": codes is not None})
            arrays.append(np.zeros(0, np.int32) if codes is None else codes)
        tensors = {
            "key": as_bytes(key),
            "rows": as_bytes(rows),
            "codes": np.concatenate(arrays),
            "code_counts": np.array([len(codes) for codes in arrays]),
            "seconds": np.array([self.seconds]),
        }
        write_atomic(path, pack_tensors(tensors))


def load_rehearsal(path: Path, key: str) -> Rehearsed:
    """Load the rows saved at `path`; none if they were saved under another key.

    Raises DamagedFileError for a file that is missing or damaged.
    """
    table = load_tensors(path)
    if from_bytes(table["key"]) != key:
        return Rehearsed(codes={}, seconds=0.0)
    codes_by_row = {}
    arrays = split_by(table["codes"], table["code_counts"])
    for fields, codes in zip(from_bytes(table["rows"]), arrays):
        stopped = fields.pop("whole")
        codes_by_row[RehearsalRow(**fields)] = codes if stopped else None
    return Rehearsed(codes=codes_by_row, seconds=float(table["seconds"][0]))


def rehearsal_sampling(run: ActiveRun) -> GenerateConfig:
    """Sample from the voice's unchanged distribution.

    A lower temperature or a cut tail would teach a narrower distribution than the one to keep
    (docs/measurements-archive.md).
    """
    return sampling_of(
        run,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        guidance_scale=1.0,
        best_of=1,
        retries=0,
    )


def rehearsal_key(run: ActiveRun, references: dict[str, Tensor]) -> str:
    """A digest of the base voice, its sampling and the reference clips."""
    arrays = {name: mel.numpy() for name, mel in references.items()}
    sampling = by_former_names("generate", rehearsal_sampling(run))
    return digest(read_run_file(run.folder / START_FROM), arrays_digest(arrays), sampling)


def readings(texts: dict[str, list[str]], speakers: list[str], count: int) -> list[RehearsalRow]:
    """`count` rows spread evenly over languages, `texts` (by language) and `speakers`.

    Fewer texts than `count` are repeated, in other voices.
    """
    longest = max(map(len, texts.values()), default=0)
    if not longest:
        return []
    rows = []
    for number in itertools.count():
        for index in range(longest):
            for language, sentences in texts.items():
                if len(rows) == count:
                    return rows
                if index < len(sentences):
                    rows.append(
                        RehearsalRow(
                            language=language,
                            text=sentences[index],
                            speaker=speakers[(len(rows) + number) % len(speakers)],
                            number=number,
                        )
                    )


def load_rehearsal_rows(run: ActiveRun, references: dict[str, Tensor]) -> Rehearsed:
    """Load what was spoken for `run`, in the voices of `references`.

    Raises KitError where nothing was, or with other settings; DamagedFileError for a damaged file.
    """
    fix = (
        "run 01_data_prep (python -m kit prepare; in 07 the cell with `to_codes`) again, or set "
        "finetune.rehearsal to 0."
    )
    if not run.figure("finetune", "rehearsal"):
        raise KitError(f"finetune.rehearsal is set, but nothing was spoken for it: {fix}")
    rehearsed = load_rehearsal(run.folder / FILE, rehearsal_key(run, references))
    if not rehearsed.codes and run.report()["finetune"]["rehearsal"]["spoken"]:
        raise KitError(
            "The rehearsal rows were spoken by another voice, other recordings or another "
            f"`generate`: {fix}"
        )
    return rehearsed


class Rehearsal:
    """The run's base voice and the rows it speaks; the speakers are those of `voice`."""

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
        """Speak the rows that are missing; interrupted, it resumes."""
        rows = readings(self.base.texts, self.voice.speakers, self.config.rehearsal_rows)
        rehearsed = self.spoken_before(rows)
        missing = [row for row in rows if row not in rehearsed.codes]
        decoder = Decoder(self.base.model)
        ticker = Ticker("spoken to rehearse")
        for batch in chunks(missing, AT_ONCE):
            began_s = time.monotonic()
            rehearsed.codes.update(zip(batch, self.read(decoder, batch)))
            rehearsed.seconds += time.monotonic() - began_s
            rehearsed.save(self.run.path(FILE), self.key)
            ticker(len(rehearsed.codes), len(rows))
        return self.result(rehearsed)

    def spoken_before(self, rows: list[RehearsalRow]) -> Rehearsed:
        """Those of `rows` that are saved already."""
        path = self.run.path(FILE)
        saved = Rehearsed(codes={}, seconds=0.0)
        if path.is_file():
            try:
                saved = load_rehearsal(path, self.key)
            except DamagedFileError as error:
                print(f"{error} It is spoken again.")
        codes = {row: saved.codes[row] for row in rows if row in saved.codes}
        return Rehearsed(codes=codes, seconds=saved.seconds)

    def read(self, decoder: Decoder, batch: list[RehearsalRow]) -> list[np.ndarray | None]:
        """The codes of each row of `batch`; None where the voice did not stop in time."""
        ids = []
        for row in batch:
            tokenizer = load_tokenizer(self.run.path(TOKENIZER), row.language)
            ids.append(tokenizer.encode_checked(row.text))
        seeds = [candidate_seed(self.sampling, i, row.number) for i, row in zip(ids, batch)]
        cond = self.voice.conditioning([row.speaker for row in batch], decoder.device)
        codes = []
        for output in decode(decoder, ids, cond, self.sampling, seeds):
            usable = output.stopped and 0 < len(output.codes) <= self.most_codes
            codes.append(output.codes.numpy().astype(np.int32) if usable else None)
        return codes

    def result(self, rehearsed: Rehearsed) -> Result:
        """Record and describe what training can mix in."""
        rows = rehearsed.whole
        spoken = len(rehearsed.codes)
        lost = spoken - len(rows)
        languages = list(dict.fromkeys(row.language for row in rows))
        figures = {
            "spoken": spoken,
            "rows": len(rows),
            "languages": languages,
            "seconds": rehearsed.seconds,
        }
        self.run.record(finetune={"rehearsal": figures})
        if not spoken:
            line = (
                "Nothing to rehearse: the base voice speaks no language that the kit has sentences "
                "in, but the run's own."
            )
        elif not rows:
            line = f"Nothing is rehearsed: of {spoken} sentences the base voice ended none in time."
        else:
            line = (
                f"To rehearse: {len(rows)} rows in {len(languages)} languages "
                f"({', '.join(languages)}), spoken in {clock(rehearsed.seconds)}"
            )
            if lost:
                line += f"; {lost} more did not end in time and are left out"
        return Result(line=line)
