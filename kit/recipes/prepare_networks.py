"""Codec and recogniser of a run: trained on its recordings, or taken as they lie there.

Shapes: L samples.
"""

import dataclasses
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.clip import load_wave
from kit.audio.codec import Codec, CodecConfig, load_codec, make_codec, save_codec
from kit.audio.ctc_recognizer import (
    Recognizer,
    RecognizerConfig,
    recognizer_schedule,
    save_recognizer,
    train_recognizer,
)
from kit.audio.fitting import FitSchedule
from kit.audio.recognizer import SpeechRecognizer, alphabet_of, cer, load_recognizer
from kit.audio.spectrogram import Mel, load_mel
from kit.dataset.data_report import Utterance, rows_in_split
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun
from kit.releases.whisper import (
    WhisperRecognizer,
    new_whisper,
    save_whisper,
    whisper_folder,
    whisper_unavailable,
)

CODEC_CLIPS = 2000  # recordings the codec learns from, at most
HELD_OUT_CLIPS = 32  # recordings that say how good it is
WHISPERS = "whisper"  # beside the runs: one serves them all
THERE = "the one of before, with these settings, is used again"


def fitted_codec(
    run: ActiveRun, config: CodecConfig, rows: list[Utterance], path: Path
) -> tuple[Codec, str]:
    """The codec at `path` with these settings, trained on `rows` where there is none; and how.

    One that was trained elsewhere is taken as it was released; KitError and DownloadError say why
    it cannot be had. Interrupted, it goes on after the last part that was trained to its end.
    """
    there = same_codec(path, config)
    if there:
        return there, THERE
    torch.manual_seed(0)
    codec = make_codec(config)
    release = codec.load_release(Ticker("bytes"))
    if release:
        save_codec(codec.eval(), path)
        return codec, release
    unseen = [load_wave(row.audio, codec.input_sample_rate) for row in held_out_rows(rows)]
    fit_schedule = codec.fit_schedule(unseen)
    if fit_schedule is None:
        save_codec(codec.eval(), path)
        return codec, "it needs no training"
    train = rows_in_split(rows, "train")
    chosen = random.Random(0).sample(train, min(CODEC_CLIPS, len(train)))
    waves = [load_wave(row.audio, codec.input_sample_rate) for row in chosen]
    codec = trained_codec(run, codec, fit_schedule, waves, path)
    return codec, codec_in_words(run.report()["codec"])


def trained_codec(
    run: ActiveRun, codec: Codec, fit_schedule: FitSchedule, waves: list[Tensor], path: Path
) -> Codec:
    """`codec`, trained on `waves` (L,), recorded and left at `path`.

    What it is after each part of the training lies beside `path` until all have ended.
    """
    device = run.hw.device

    def fit(codec: Codec) -> dict:
        steps = codec.fit(waves, device, run.precision.value, fit_schedule=fit_schedule)
        figures = fit_schedule.follow(steps, Ticker("codec step"))
        figures["ending"] = fit_schedule.ending
        return figures

    def train_adversarial(codec: Codec) -> dict:
        return {"sharpened": followed(codec.train_adversarial(waves, device), "sharpening step")}

    def train_vocoder(codec: Codec) -> dict:
        return {"vocoder": followed(codec.train_vocoder(waves, device), "vocoder step")}

    fitted = path.with_name("codec-fitted.safetensors")
    sharpened = path.with_name("codec-sharpened.safetensors")
    for train, left in ((fit, fitted), (train_adversarial, sharpened), (train_vocoder, path)):
        there = same_codec(left, codec.config)
        if there:
            codec = there
        else:
            run.record(codec=train(codec))
            save_codec(codec, left)
    fitted.unlink()
    sharpened.unlink()
    return codec


def same_codec(path: Path, config: CodecConfig) -> Codec | None:
    """The codec at `path`, where it has these settings; None where there is none, or another."""
    codec = load_codec(path) if path.exists() else None
    return codec if codec and codec.config == config else None


def codec_in_words(figures: dict) -> str:
    """How it was trained, of what `fitted_codec` recorded."""
    told = figures["ending"]
    if figures["held_out"] is not None:  # there were held-out recordings
        told = f"held-out loss {figures['held_out']:.3f} {told}"
    if figures.get("cut_short"):  # earlier versions did not note it
        minutes = max(30, 3 * figures.get("minutes", 0))
        told += f" (`--set codec.minutes={minutes:g}` and no other work beside it make it clearer)"
    if figures["sharpened"]["steps"]:
        told += f"; its sound sharpened in {figures['sharpened']['steps']:,} steps"
    if figures["vocoder"]["steps"]:
        told += f"; its vocoder trained in {figures['vocoder']['steps']:,} steps"
    return told


def followed(training: Iterable[tuple[int, int]], what: str) -> dict:
    """Go through a training that yields (step, steps), with progress; its steps and seconds."""
    began_s = time.perf_counter()
    step = 0
    ticker = Ticker(what)
    for step, steps in training:
        ticker(step, steps)
    return {"steps": step, "seconds": time.perf_counter() - began_s}


def fitted_recognizer(
    run: ActiveRun,
    config: RecognizerConfig,
    rows: list[Utterance],
    front_end: Mel,
    path: Path,
    language: str,
) -> tuple[SpeechRecognizer, str]:
    """The recogniser at `path` with these settings, else one trained on `rows`; and how.

    With `config.whisper` that one listens in its place, where it is installed.
    """
    if config.whisper and not whisper_unavailable():
        return whisper_recognizer(run, config.whisper, rows, path, language)
    own = dataclasses.replace(config, whisper="")
    model, how = trained_recognizer(run, own, rows, front_end, path)
    return (
        model,
        f"{how}. Whisper does not listen: {whisper_unavailable()}" if config.whisper else how,
    )


def trained_recognizer(
    run: ActiveRun, config: RecognizerConfig, rows: list[Utterance], front_end: Mel, path: Path
) -> tuple[Recognizer, str]:
    """The kit's own recogniser at `path` with these settings, else trained on `rows`; and how."""
    there = load_recognizer(path) if path.exists() else None
    same_kind = isinstance(there, Recognizer)
    if same_kind and (there.config, there.front_end.config) == (config, front_end.config):
        return there, THERE
    train = rows_in_split(rows, "train")
    chosen = random.Random(1).sample(train, min(config.utterances, len(train)))
    texts = [row.text for row in chosen]
    torch.manual_seed(0)
    model = Recognizer(config, alphabet_of(texts), front_end.config)
    mels = [load_mel(row.audio, front_end) for row in chosen]
    unseen = [(load_mel(row.audio, front_end), row.text) for row in held_out_rows(rows)]
    fit_schedule = recognizer_schedule(model, unseen)
    steps = train_recognizer(
        model, mels, texts, run.hw.device, run.precision.value, fit_schedule=fit_schedule
    )
    run.record(recognizer=fit_schedule.follow(steps, Ticker("recogniser step")))
    save_recognizer(model, path)
    return model, f"held-out errors {fit_schedule.figure:.1%} {fit_schedule.ending}"


def whisper_recognizer(
    run: ActiveRun, name: str, rows: list[Utterance], path: Path, language: str
) -> tuple[WhisperRecognizer, str]:
    """The Whisper `name`, and what its own errors and its time on held-out recordings are.

    Raises KitError and DownloadError where its files cannot be had.
    """
    folder = whisper_folder(name, run.folder.parent / WHISPERS, Ticker("bytes"))
    train = rows_in_split(rows, "train")
    model = new_whisper(folder, language, alphabet_of([row.text for row in train]))
    there = load_recognizer(path) if path.exists() else None
    if there and there.fingerprint() == model.fingerprint():
        return there, THERE
    unseen = held_out_rows(rows) or train[:HELD_OUT_CLIPS]
    waves = [load_wave(row.audio, model.input_sample_rate) for row in unseen]
    began_s = time.perf_counter()
    error = cer(
        model.transcribe_waves(waves, model.input_sample_rate), [row.text for row in unseen]
    )
    took_s = time.perf_counter() - began_s
    factor = took_s / sum(len(wave) / model.input_sample_rate for wave in waves)
    figures = {"held_out": error, "whisper": name, "real_time_factor": factor}
    run.record(recognizer=figures)
    save_whisper(model, path)
    told = f"Whisper ({name}) listens in `{language}`: held-out errors {error:.1%}"
    return model, f"{told}, {factor:.2f} s a second of sound"


def held_out_rows(rows: list[Utterance]) -> list[Utterance]:
    """The recordings that judge codec and recogniser, and that neither learns from."""
    return rows_in_split(rows, "held_out")[:HELD_OUT_CLIPS]
