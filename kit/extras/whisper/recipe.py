"""Whisper as a run's recogniser: fetched, judged on held-out recordings, kept with the run."""

import time

from kit.audio import recognizer
from kit.audio.clip import load_wave
from kit.dataset.data_report import rows_in_split
from kit.dataset.manifest import Utterance
from kit.extras.whisper.recognizer import (
    WhisperRecognizer,
    new_whisper,
    save_whisper,
    whisper_folder,
    whisper_unavailable,
)
from kit.recipes.open_run import ActiveRun
from kit.recipes.prepare_parts import HELD_OUT_CLIPS, REUSED, held_out_rows

WHISPERS = "whisper"  # a folder beside the runs, which share it


def whisper_recognizer(
    run: ActiveRun, name: str, rows: list[Utterance], language: str
) -> tuple[WhisperRecognizer | None, str]:
    """Return the Whisper `name` and what it is; or None and why it cannot be used.

    Its error rate and speed on held-out recordings are recorded.
    """
    missing = whisper_unavailable()
    if missing:
        return None, missing
    folder = whisper_folder(name, run.folder.parent / WHISPERS)
    train = rows_in_split(rows, "train")
    alphabet = recognizer.alphabet_of([row.text for row in train])
    model = new_whisper(folder, language, alphabet)
    path = run.path("recognizer.safetensors")
    saved = recognizer.load_recognizer(path) if path.exists() else None
    if saved and saved.fingerprint() == model.fingerprint():
        return saved, REUSED
    judged = held_out_rows(rows) or train[:HELD_OUT_CLIPS]
    texts = [row.text for row in judged]
    rate_hz = model.input_sample_rate
    waves = [load_wave(row.audio, rate_hz) for row in judged]
    began_s = time.perf_counter()
    error = recognizer.cer(model.transcribe_waves(waves, rate_hz), texts)
    factor = (time.perf_counter() - began_s) / sum(len(wave) / rate_hz for wave in waves)
    run.record(recognizer={"held_out": error, "whisper": name, "real_time_factor": factor})
    save_whisper(model, path)
    figures = f"held-out errors {error:.1%}, {factor:.2f} s a second of sound"
    return model, f"Whisper ({name}) transcribes `{language}`: {figures}"
