"""The settings of a run: each section of a preset is checked by the class that reads it."""

import dataclasses
import os
import re
from contextlib import suppress

import yaml

from kit.audio.codec import codec_config
from kit.audio.recognizer import RecognizerConfig
from kit.audio.spectrogram import front_end_config
from kit.base.config import build, load_preset, merge, rename_settings, shorten_preset
from kit.base.errors import KitError, show_plain_notes
from kit.base.formatting import nearest, shorten
from kit.base.hardware import choose_preset, detect
from kit.base.run import Run, find_run, load_use, runs_folder
from kit.batches.batching import DataConfig
from kit.dataset.alignment import AlignConfig
from kit.dataset.archive import ArchiveConfig
from kit.dataset.data_report import ManifestConfig
from kit.dataset.fetch import HubConfig
from kit.dataset.synthetic import CorpusConfig
from kit.inference.candidates import CodeReaderConfig
from kit.inference.compare_formats import InferConfig
from kit.inference.evaluate import EvaluateConfig
from kit.inference.generate import GenerateConfig
from kit.inference.voice_files import DecoderFinetuneConfig
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.recipes.active_run import ActiveRun, active_run
from kit.text.train_tokenizer import TokenizerConfig
from kit.training.config import FinetuneConfig, TrainConfig
from kit.training.switches import SpeedConfig
from kit.tuning.session_plan import TimeBudget
from kit.tuning.trials import TrialConfig

# The class that checks each section of a preset; the others are checked against the preset itself.
SECTIONS = {
    "corpus": CorpusConfig,
    "archive": ArchiveConfig,
    "hub": HubConfig,
    "manifest": ManifestConfig,
    "text": TokenizerConfig,
    "data": DataConfig,
    "model": GPTConfig,
    "train": TrainConfig,
    "finetune": FinetuneConfig,
    "lora": LoRAConfig,
    "time_budget": TimeBudget,
    "speed": SpeedConfig,
    "recognizer": RecognizerConfig,
    "align": AlignConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "infer": InferConfig,
    "decoder_finetune": DecoderFinetuneConfig,
    "reader": CodeReaderConfig,
    "trials": TrialConfig,
}


def parse_settings(words: list[str]) -> dict:
    """["train.lr=1e-4"] -> {"train": {"lr": 0.0001}}; values are read as YAML."""
    sections = {}
    for word in words:
        name, equals, text = word.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise KitError(
                f"--set {shorten(word)}: write section.key=value, for instance --set train.lr=1e-4."
            )
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            message = f"--set {shorten(word)} has no plain value: {shorten(error)}"
            raise KitError(message) from error
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)  # 1e-4, which YAML takes for a word
        sections.setdefault(section, {})[key] = value
    return sections


def open_settings(name: str, preset: str, use: str, settings: dict) -> ActiveRun:
    """Return the run `name`, or without a name a preset alone, on this machine; writes nothing.

    The `settings` apply over both. The folder of a preset alone is bench/ beside the runs.
    """
    show_plain_notes()
    if name:
        run = find_run(preset, use, name)
    else:
        preset = preset or os.environ.get("KIT_PRESET") or choose_preset(detect()).value
        sections = merge(load_preset(preset), load_use(use))
        folder = runs_folder() / "bench"
        preset = shorten_preset(preset)
        run = Run(name="", preset_name=preset, preset=sections, folder=folder, use=use)
    settings = rename_settings(settings)
    check_settings(settings, run.preset)
    over = {"preset": merge(run.preset, settings), "settings": merge(run.settings, settings)}
    return active_run(dataclasses.replace(run, **over))


def check_settings(sections: dict, preset: dict) -> None:
    """Raise KitError for an unknown setting (with the nearest known one) or a wrong value."""
    for section, values in sections.items():
        if section not in preset:
            raise KitError(f"There is no section `{section}`.{nearest(section, preset)}")
        merged = merge(preset[section], values)
        try:
            if section == "codec":  # the `kind` of these two decides which class checks it
                codec_config(merged)
            elif section == "front_end":
                front_end_config(merged)
            elif section in SECTIONS:
                build(SECTIONS[section], merged)
            else:
                for key, value in values.items():
                    _check_plain(section, key, value, preset[section])
        except KitError as error:
            # Name the section, as the user wrote it, instead of the class.
            message = re.sub(r"^\w+(?=\.\w| has no setting)", section, str(error))
            raise KitError(message) from error


def _check_plain(section: str, key: str, value, known: dict) -> None:
    if key not in known:
        raise KitError(f"{section} has no setting `{key}`.{nearest(key, known)}")
    is_number = isinstance(known[key], int | float) and not isinstance(known[key], bool)
    kind = int | float if is_number else type(known[key])
    if not isinstance(value, kind) or (is_number and isinstance(value, bool)):
        raise KitError(
            f"{section}.{key} must be like {known[key]!r}, got {value!r} ({type(value).__name__})."
        )
