"""A tiny voice that has learnt one language learns another, and rehearses the first, or does not.

In both languages a letter is two codes; what a letter of one language is, is none of the other.
"""

import dataclasses
import random
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from helpers import GPT, Session, made_cache, start_and_kill, tiny_session

from kit.base.tensor_file import checksum
from kit.batches.code_cache import CodeCache
from kit.batches.code_stream import CodeStream, validation_batches
from kit.inference.decoder import Decoder
from kit.inference.generate import GeneratedCodes, candidate_seed, decode
from kit.model.gpt import SpeechGPT
from kit.model.sequence import collate
from kit.recipes.rehearsal import BaseSample, measure_divergence
from kit.settings import DataConfig, GenerateConfig, GPTConfig, TrainConfig
from kit.training.config import Base, Finetuning
from kit.training.run import validation_loss

LETTERS = 6  # of each language
FIRST = range(LETTERS)
SECOND = range(LETTERS, 2 * LETTERS)
IDS = 2 * LETTERS + 2
SIZES = {"text_vocab": IDS, "code_vocab": IDS, "max_text": 10, "max_code": 24, "n_mels": 4}
MODEL = dataclasses.replace(GPT, latents=2, **SIZES)
DATA = DataConfig(effective_batch=16, micro_batch=16, reference_frames=6)
TRAIN = TrainConfig(warmup_steps=10, lr=4e-3, save_steps=500, schedule="linear")
WARM = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0)
SHARE = 0.25


def spoken(text: list[int]) -> list[int]:
    """Two codes a letter; the other language says the same codes for other letters."""
    found = []
    for letter in text:
        own = letter % LETTERS
        step = 1 if letter in FIRST else 5
        found += [own, LETTERS + step * (own + 2 * (letter in SECOND)) % LETTERS]
    return found


def texts_of(letters: range, count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(letters, k=draw.randint(2, 6)) for _ in range(count)]


def cache_of(letters: range) -> CodeCache:
    """Texts in one language, an eighth of them held out, all by one speaker."""
    texts = texts_of(letters, 160, seed=letters.start)
    splits = ["train" if i % 8 else "held_out" for i in range(len(texts))]
    rows = [{"id": f"u{i}", "speaker": "v", "split": split} for i, split in enumerate(splits)]
    columns = [[np.array(row, np.int32) for row in rows] for rows in (texts, map(spoken, texts))]
    return made_cache(rows, *columns, [np.ones((4, 6), np.float16)] * len(texts))


def session_in(folder: Path, cache: CodeCache, steps: int, share: float = 0.0) -> Session:
    make = partial(CodeStream, cache, config=DATA, collate=partial(collate, MODEL))
    session = tiny_session(folder, dataclasses.replace(TRAIN, max_steps=steps, eval_steps=steps))
    session.model = MODEL
    session.make_batches = lambda position, _: make("train", position=position, rehearsal=share)
    session.validation = validation_batches(make("held_out"))
    return session


def learnt(session: Session, values: dict | None = None) -> SpeechGPT:
    list(session.run(values or {}, Event()))
    return session.state.model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> SpeechGPT:
    return learnt(session_in(tmp_path_factory.mktemp("base"), cache_of(FIRST), 400))


def read(base: SpeechGPT, texts: list[list[int]]) -> list[GeneratedCodes]:
    seeds = [[candidate_seed(WARM, text, number)] for number, text in enumerate(texts)]
    return decode(Decoder(base), texts, torch.ones(len(texts), 4, 6), WARM, seeds)


def rehearsed(base: SpeechGPT) -> CodeCache:
    """The second language, and what `base` says of texts in the first."""
    cache = cache_of(SECOND)
    texts = texts_of(FIRST, 80, seed=77)
    pairs = [(t, row.codes.numpy()) for t, row in zip(texts, read(base, texts)) if row.stopped]
    assert len(pairs) > 60
    texts = [np.array(text, np.int32) for text, _ in pairs]
    cache.add_rehearsal(["v"] * len(pairs), texts, [codes for _, codes in pairs])
    return cache


def started(base: SpeechGPT, folder: Path, share: float, steps: int) -> Session:
    """A run that teaches `base` the second language, at a tenth of its rate."""
    session = session_in(folder, rehearsed(base), steps, share)
    session.config = dataclasses.replace(session.config, lr=1e-3)

    def first_model(config: GPTConfig) -> SpeechGPT:
        model = SpeechGPT(config)
        model.load_state_dict(base.state_dict())
        return model

    session.first_model = first_model
    session.finetuning = Finetuning(base=Base(config=MODEL, sha256=checksum(base.state_dict())))
    return session


def loss_of(model: SpeechGPT, letters: range) -> float:
    stream = CodeStream(cache_of(letters), "held_out", DATA, partial(collate, MODEL))
    return validation_loss(model, validation_batches(stream), "cpu", "fp32", 16)


def forgotten(base: SpeechGPT, tuned: SpeechGPT) -> float:
    """In nats a code, on texts that were neither learnt nor rehearsed."""
    texts = texts_of(FIRST, 40, seed=99)
    mel = torch.ones(4, 6)
    pairs = zip(texts, read(base, texts))
    readings = [BaseSample(base_ids=t, tuned_ids=t, spoken=row, mel=mel) for t, row in pairs]
    return measure_divergence(base, tuned, readings).forgotten


def test_who_rehearses_forgets_less_and_learns_nearly_as_well(base, tmp_path):
    """Both see the second language as often: the one who rehearses takes so many steps more."""
    known = loss_of(base, FIRST)
    unknown = loss_of(base, SECOND)
    assert known < 0.5 < unknown, "the base has learnt the one language, and not the other"
    without = learnt(started(base, tmp_path / "without", 0.0, 120))
    with_it = learnt(started(base, tmp_path / "with", SHARE, 160))
    lost = {name: forgotten(base, model) for name, model in (("no", without), ("yes", with_it))}
    assert lost["yes"] < lost["no"] / 5, lost
    assert loss_of(with_it, FIRST) - known < (loss_of(without, FIRST) - known) / 5
    gained = [unknown - loss_of(model, SECOND) for model in (without, with_it)]
    assert gained[1] > 0.95 * gained[0] > 0, gained


FIGURES = ("step", "loss", "lr", "grad_norm", "val_loss")


def figures(events) -> list[tuple]:
    return [tuple(getattr(event, name) for name in FIGURES) for event in events]


def test_without_rehearsal_its_rows_change_no_loss(base, tmp_path):
    with_rows = started(base, tmp_path / "rows", 0.0, 12)
    plain = started(base, tmp_path / "none", 0.0, 12)
    make = partial(CodeStream, cache_of(SECOND), "train", DATA, partial(collate, MODEL))
    plain.make_batches = lambda position, parts: make(position)
    assert figures(with_rows.run({}, Event())) == figures(plain.run({}, Event()))


STEPS = 45  # more than four epochs


def rehearse_in(folder: str, weights: dict) -> list:
    torch.set_num_threads(1)
    model = SpeechGPT(MODEL).eval()
    model.load_state_dict(weights)
    session = started(model, Path(folder), SHARE, STEPS)
    session.config = dataclasses.replace(session.config, save_steps=9)
    return figures(session.run({"ema": True}, Event()))


def test_killed_while_it_rehearses_a_run_resumes_bit_for_bit(base, processes, tmp_path):
    weights = base.state_dict()
    whole = rehearse_in(str(tmp_path / "whole"), weights)
    folder = tmp_path / "killed"
    child = processes.Process(target=rehearse_in, args=(str(folder), weights))
    start_and_kill(child, folder / "train.jsonl", 30)
    rest = rehearse_in(str(folder), weights)
    assert 0 < len(rest) < STEPS
    assert rest == whole[-len(rest) :]
    left = [(tmp_path / name / "model-ema.safetensors") for name in ("whole", "killed")]
    assert left[0].read_bytes() == left[1].read_bytes()
