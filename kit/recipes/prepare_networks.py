"""Codec and recogniser of a run: trained on its recordings, or taken as they lie there."""

import random
from pathlib import Path

import torch

from kit.audio.mel_codec import (
    CodecConfig,
    MelCodec,
    codec_course,
    load_codec,
    load_mel,
    load_wave,
    save_codec,
    train_codec,
)
from kit.audio.recognizer import (
    Recognizer,
    RecognizerConfig,
    alphabet_of,
    load_recognizer,
    recognizer_course,
    save_recognizer,
    train_recognizer,
)
from kit.dataset.ledger import Utterance
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun

CODEC_CLIPS = 2000  # recordings the codec learns from, at most
HELD_OUT_CLIPS = 32  # recordings that say how good it is
THERE = "the one of before, with these settings, is used again"


def fitted_codec(
    run: ActiveRun, config: CodecConfig, rows: list[Utterance], path: Path
) -> tuple[MelCodec, str]:
    """The codec at `path` with these settings, trained on `rows` where there is none; and how."""
    there = load_codec(path) if path.exists() else None
    if there and there.config == config:
        return there, THERE
    torch.manual_seed(0)
    codec = MelCodec(config)
    train = [row for row in rows if row.split == "train"]
    chosen = random.Random(0).sample(train, min(CODEC_CLIPS, len(train)))
    waves = [load_wave(row.audio, codec.sample_rate) for row in chosen]
    unseen = [load_wave(row.audio, codec.sample_rate) for row in held_out_rows(rows)]
    course = codec_course(codec, unseen)
    steps = train_codec(codec, waves, run.hw.device, run.precision.value, course=course)
    run.record(codec=course.follow(steps, Ticker("codec step")))
    save_codec(codec, path)
    return codec, f"held-out loss {course.figure:.3f} {course.ending}"


def fitted_recognizer(
    run: ActiveRun, config: RecognizerConfig, rows: list[Utterance], codec: MelCodec, path: Path
) -> tuple[Recognizer, str]:
    """The recogniser at `path` with these settings, else one trained on `rows`; and how."""
    there = load_recognizer(path) if path.exists() else None
    if there and there.config == config:
        return there, THERE
    train = [row for row in rows if row.split == "train"]
    chosen = random.Random(1).sample(train, min(config.utterances, len(train)))
    texts = [row.text for row in chosen]
    torch.manual_seed(0)
    model = Recognizer(config, alphabet_of(texts))
    mels = [load_mel(row.audio, codec) for row in chosen]
    unseen = [(load_mel(row.audio, codec), row.text) for row in held_out_rows(rows)]
    course = recognizer_course(model, unseen)
    steps = train_recognizer(model, mels, texts, run.hw.device, run.precision.value, course=course)
    run.record(recognizer=course.follow(steps, Ticker("recogniser step")))
    save_recognizer(model, path)
    return model, f"held-out errors {course.figure:.1%} {course.ending}"


def held_out_rows(rows: list[Utterance]) -> list[Utterance]:
    """The recordings that judge codec and recogniser, and that neither learns from."""
    return [row for row in rows if row.split == "held_out"][:HELD_OUT_CLIPS]
