"""Train or load the codec (with its vocoder) and the recogniser of a run.

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

CODEC_CLIPS = 2000  # most recordings the codec is trained on
HELD_OUT_CLIPS = 32  # held-out recordings that codec and recogniser are judged on
WHISPERS = "whisper"  # a folder beside the runs, which share it
REUSED = "the one of before, with these settings, is used again"


def train_or_load_codec(
    run: ActiveRun, config: CodecConfig, rows: list[Utterance], path: Path
) -> tuple[Codec, str]:
    """Load the codec at `path` or, if its settings differ, train one on `rows`.

    Returns it with a description of its origin. A released codec is downloaded, not trained; raises
    KitError and DownloadError where that fails. Interrupted training resumes after its last
    finished stage.
    """
    codec = load_matching_codec(path, config)
    if codec:
        return codec, REUSED
    torch.manual_seed(0)
    codec = make_codec(config)
    release = codec.load_release(Ticker("bytes"))
    if release:
        save_codec(codec.eval(), path)
        return codec, release
    held_out = [load_wave(row.audio, codec.input_sample_rate) for row in held_out_rows(rows)]
    fit_schedule = codec.fit_schedule(held_out)
    if fit_schedule is None:
        save_codec(codec.eval(), path)
        return codec, "it needs no training"
    train = rows_in_split(rows, "train")
    sample = random.Random(0).sample(train, min(CODEC_CLIPS, len(train)))
    waves = [load_wave(row.audio, codec.input_sample_rate) for row in sample]
    codec = trained_codec(run, codec, fit_schedule, waves, path)
    return codec, describe_codec_training(run.report()["codec"])


def trained_codec(
    run: ActiveRun, codec: Codec, fit_schedule: FitSchedule, waves: list[Tensor], path: Path
) -> Codec:
    """Train `codec` on `waves` (L,) in up to three stages; record them and save it at `path`.

    The first two stages are saved beside `path` until all are done.
    """
    device = run.hw.device

    def fit(codec: Codec) -> dict:
        steps = codec.fit(waves, device, run.precision.value, fit_schedule=fit_schedule)
        figures = fit_schedule.follow(steps, Ticker("codec step"))
        figures["ending"] = fit_schedule.ending
        return figures

    def train_adversarial(codec: Codec) -> dict:
        return {"sharpened": run_steps(codec.train_adversarial(waves, device), "sharpening step")}

    def train_vocoder(codec: Codec) -> dict:
        return {"vocoder": run_steps(codec.train_vocoder(waves, device), "vocoder step")}

    fitted = path.with_name("codec-fitted.safetensors")
    sharpened = path.with_name("codec-sharpened.safetensors")
    stages = ((fit, fitted), (train_adversarial, sharpened), (train_vocoder, path))
    for train, stage_path in stages:
        finished = load_matching_codec(stage_path, codec.config)
        if finished:
            codec = finished
        else:
            run.record(codec=train(codec))
            save_codec(codec, stage_path)
    fitted.unlink()
    sharpened.unlink()
    return codec


def load_matching_codec(path: Path, config: CodecConfig) -> Codec | None:
    """The codec at `path`; None where there is none or its settings differ."""
    codec = load_codec(path) if path.exists() else None
    return codec if codec and codec.config == config else None


def describe_codec_training(figures: dict) -> str:
    """How the codec was trained, from the figures in the run's record."""
    text = figures["ending"]
    if figures["held_out"] is not None:
        text = f"held-out loss {figures['held_out']:.3f} {text}"
    if figures.get("cut_short"):  # missing from records of older versions
        minutes = max(30, 3 * figures.get("minutes", 0))
        text += (
            f" (for clearer sound set `--set codec.minutes={minutes:g}`, and run nothing else "
            "meanwhile)"
        )
    if figures["sharpened"]["steps"]:
        text += f"; its sound sharpened in {figures['sharpened']['steps']:,} steps"
    if figures["vocoder"]["steps"]:
        text += f"; its vocoder trained in {figures['vocoder']['steps']:,} steps"
    return text


def run_steps(training: Iterable[tuple[int, int]], what: str) -> dict:
    """Run a training that yields (step, steps), with progress; return its steps and seconds."""
    began_s = time.perf_counter()
    step = 0
    ticker = Ticker(what)
    for step, steps in training:
        ticker(step, steps)
    return {"steps": step, "seconds": time.perf_counter() - began_s}


def train_or_load_recognizer(
    run: ActiveRun,
    config: RecognizerConfig,
    rows: list[Utterance],
    front_end: Mel,
    path: Path,
    language: str,
) -> tuple[SpeechRecognizer, str]:
    """Load the recogniser at `path` or, if its settings differ, train one on `rows`.

    Returns it with a description of its origin. With `config.whisper` it is that Whisper, if
    installed.
    """
    missing = whisper_unavailable() if config.whisper else ""
    if config.whisper and not missing:
        return whisper_recognizer(run, config.whisper, rows, path, language)
    config = dataclasses.replace(config, whisper="")
    model, origin = trained_recognizer(run, config, rows, front_end, path)
    if missing:
        origin += f". Whisper is not used: {missing}"
    return model, origin


def trained_recognizer(
    run: ActiveRun, config: RecognizerConfig, rows: list[Utterance], front_end: Mel, path: Path
) -> tuple[Recognizer, str]:
    """The kit's own recogniser: loaded from `path` or, if its settings differ, trained."""
    model = load_recognizer(path) if path.exists() else None
    same_kind = isinstance(model, Recognizer)
    if same_kind and (model.config, model.front_end.config) == (config, front_end.config):
        return model, REUSED
    train = rows_in_split(rows, "train")
    sample = random.Random(1).sample(train, min(config.utterances, len(train)))
    texts = [row.text for row in sample]
    torch.manual_seed(0)
    model = Recognizer(config, alphabet_of(texts), front_end.config)
    mels = [load_mel(row.audio, front_end) for row in sample]
    held_out = [(load_mel(row.audio, front_end), row.text) for row in held_out_rows(rows)]
    fit_schedule = recognizer_schedule(model, held_out)
    steps = train_recognizer(
        model, mels, texts, run.hw.device, run.precision.value, fit_schedule=fit_schedule
    )
    run.record(recognizer=fit_schedule.follow(steps, Ticker("recogniser step")))
    save_recognizer(model, path)
    return model, f"held-out errors {fit_schedule.figure:.1%} {fit_schedule.ending}"


def whisper_recognizer(
    run: ActiveRun, name: str, rows: list[Utterance], path: Path, language: str
) -> tuple[WhisperRecognizer, str]:
    """The Whisper `name`; its error rate and speed on held-out recordings are recorded.

    Raises KitError and DownloadError where its files cannot be had.
    """
    folder = whisper_folder(name, run.folder.parent / WHISPERS, Ticker("bytes"))
    train = rows_in_split(rows, "train")
    model = new_whisper(folder, language, alphabet_of([row.text for row in train]))
    saved = load_recognizer(path) if path.exists() else None
    if saved and saved.fingerprint() == model.fingerprint():
        return saved, REUSED
    judged = held_out_rows(rows) or train[:HELD_OUT_CLIPS]
    texts = [row.text for row in judged]
    rate_hz = model.input_sample_rate
    waves = [load_wave(row.audio, rate_hz) for row in judged]
    began_s = time.perf_counter()
    error = cer(model.transcribe_waves(waves, rate_hz), texts)
    took_s = time.perf_counter() - began_s
    factor = took_s / sum(len(wave) / rate_hz for wave in waves)
    run.record(recognizer={"held_out": error, "whisper": name, "real_time_factor": factor})
    save_whisper(model, path)
    origin = (
        f"Whisper ({name}) transcribes `{language}`: held-out errors {error:.1%}, "
        f"{factor:.2f} s a second of sound"
    )
    return model, origin


def held_out_rows(rows: list[Utterance]) -> list[Utterance]:
    """Held-out recordings for judging codec and recogniser; neither is trained on them."""
    return rows_in_split(rows, "held_out")[:HELD_OUT_CLIPS]
