"""What reads a voice's codes back, trained on the run's own: it chooses among readings."""

import random
from collections import Counter

import torch
from torch import Tensor

from kit.audio.ctc_recognizer import recognizer_schedule, train_recognizer
from kit.audio.recognizer import alphabet_of
from kit.base.config import build
from kit.base.errors import KitError
from kit.inference.code_reader import (
    READER,
    CodeReader,
    CodeReaderConfig,
    load_matching_reader,
    save_reader,
)
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result
from kit.recipes.prepare_source import section_as_begun
from kit.recipes.training_data import TrainingData

HELD_OUT_ROWS = 64  # that say how well it reads
SHOWN = 5  # of them
FEWEST_ROWS = 20  # to learn from


def learn_reader(data: TrainingData) -> Result:
    """Train the reader of this run's codes on its recordings, unless there is one already.

    Held-out rows say how well it reads; it never learns from them. With too few recordings, or
    where the preset has none, the result says so, and readings are chosen without it.
    """
    run = data.run
    config = build(CodeReaderConfig, section_as_begun(run, "reader"))
    if not config.rows:
        return Result(line="Readings are not read back: `reader.rows` is 0.")
    held = texts_and_codes(data, data.cache.sample_of_split("held_out", HELD_OUT_ROWS).tolist())
    there = reader_there(data, config)
    if there is not None:
        return shown(there, held, "The reader of these codes is there already")
    members = data.cache.sample_of_split("train", config.rows).tolist()
    if len(members) < FEWEST_ROWS:
        return Result(
            line=f"Readings are not read back: {len(members)} recordings are fewer than the "
            f"{FEWEST_ROWS} that a reader takes to learn from."
        )
    repeated = evened_out(members, data.cache.speakers(members).tolist(), config.most_repeats)
    texts, codes = texts_and_codes(data, repeated)
    torch.manual_seed(0)
    reader = CodeReader(config, alphabet_of(texts), data.codec.levels)
    fit_schedule = recognizer_schedule(reader, list(zip(held[1], held[0])))
    device, precision = run.hw.device, run.precision.value
    steps = train_recognizer(reader, codes, texts, device, precision, fit_schedule=fit_schedule)
    figures = fit_schedule.follow(steps, Ticker("reader step"))
    figures["rows"] = len(members)
    save_reader(reader, run.path(READER), data.parts)
    run.record(reader=figures)
    line = f"A reader of codes learnt from {len(members):,} recordings {fit_schedule.ending}"
    return shown(reader, held, line)


def reader_there(data: TrainingData, config: CodeReaderConfig) -> CodeReader | None:
    """The run's reader, where it has these settings and knows these codes and pieces."""
    try:
        there = load_matching_reader(data.run.folder, data.parts)
    except KitError:
        return None  # a damaged one is made again
    return there if there and there.config == config else None


def texts_and_codes(data: TrainingData, rows: list[int]) -> tuple[list[str], list[Tensor]]:
    """The text of each of `rows`, as its pieces have it, and its codes (N,)."""
    cache = data.cache
    tokenizer = data.tokenizer
    texts = [tokenizer.decode(cache.texts[i].tolist()) for i in rows]
    return texts, [torch.from_numpy(cache.codes[i].astype("int64")) for i in rows]


def evened_out(rows: list[int], speakers: list[int], most: int) -> list[int]:
    """`rows`, those of speakers with few of them up to `most` times: as far as the most have."""
    counts = Counter(speakers)
    largest = max(counts.values())
    times = {speaker: min(most, largest // count) for speaker, count in counts.items()}
    found = [row for row, speaker in zip(rows, speakers) for _ in range(times[speaker])]
    random.Random(0).shuffle(found)
    return found


def shown(reader: CodeReader, held: tuple[list[str], list[Tensor]], line: str) -> Result:
    """`line`, and some held-out recordings as the reader reads their codes."""
    texts, codes = (column[:SHOWN] for column in held)
    if not texts:
        return Result(line=f"{line}.")
    grid = [
        ("held-out text", "read from the recording's codes"),
        *zip(texts, reader.transcribe(codes)),
    ]
    return Result(line=f"{line}.", grid=grid)
