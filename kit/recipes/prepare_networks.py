"""Codec and recogniser of a run: trained on its recordings, or taken as they lie there."""

import random
from pathlib import Path

import torch

from kit.audio.codec import Codec, CodecConfig
from kit.audio.codec_kinds import load_codec, make_codec, save_codec
from kit.audio.recognizer import (
    Recognizer,
    RecognizerConfig,
    alphabet_of,
    load_recognizer,
    recognizer_course,
    save_recognizer,
    train_recognizer,
)
from kit.audio.spectrogram import Mel, load_mel
from kit.audio.waveform import load_wave
from kit.dataset.ledger import Utterance, of_split
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun

CODEC_CLIPS = 2000  # recordings the codec learns from, at most
HELD_OUT_CLIPS = 32  # recordings that say how good it is
THERE = "the one of before, with these settings, is used again"


def fitted_codec(
    run: ActiveRun, config: CodecConfig, rows: list[Utterance], path: Path
) -> tuple[Codec, str]:
    """The codec at `path` with these settings, trained on `rows` where there is none; and how."""
    there = load_codec(path) if path.exists() else None
    if there and there.config == config:
        return there, THERE
    torch.manual_seed(0)
    codec = make_codec(config)
    unseen = [load_wave(row.audio, codec.heard_rate) for row in held_out_rows(rows)]
    course = codec.course(unseen)
    if course is None:
        save_codec(codec.eval(), path)
        return codec, "it needs no training"
    train = of_split(rows, "train")
    chosen = random.Random(0).sample(train, min(CODEC_CLIPS, len(train)))
    waves = [load_wave(row.audio, codec.heard_rate) for row in chosen]
    steps = codec.fit(waves, run.hw.device, run.precision.value, course=course)
    run.record(codec=course.follow(steps, Ticker("codec step")))
    save_codec(codec, path)
    return codec, f"held-out loss {course.figure:.3f} {course.ending}"


def fitted_recognizer(
    run: ActiveRun, config: RecognizerConfig, rows: list[Utterance], front_end: Mel, path: Path
) -> tuple[Recognizer, str]:
    """The recogniser at `path` with these settings, else one trained on `rows`; and how."""
    there = load_recognizer(path) if path.exists() else None
    if there and (there.config, there.front_end.config) == (config, front_end.config):
        return there, THERE
    train = of_split(rows, "train")
    chosen = random.Random(1).sample(train, min(config.utterances, len(train)))
    texts = [row.text for row in chosen]
    torch.manual_seed(0)
    model = Recognizer(config, alphabet_of(texts), front_end.config)
    mels = [load_mel(row.audio, front_end) for row in chosen]
    unseen = [(load_mel(row.audio, front_end), row.text) for row in held_out_rows(rows)]
    course = recognizer_course(model, unseen)
    steps = train_recognizer(model, mels, texts, run.hw.device, run.precision.value, course=course)
    run.record(recognizer=course.follow(steps, Ticker("recogniser step")))
    save_recognizer(model, path)
    return model, f"held-out errors {course.figure:.1%} {course.ending}"


def held_out_rows(rows: list[Utterance]) -> list[Utterance]:
    """The recordings that judge codec and recogniser, and that neither learns from."""
    return of_split(rows, "held_out")[:HELD_OUT_CLIPS]
