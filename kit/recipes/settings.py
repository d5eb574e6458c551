"""What a person sets for one run from the command line: `--set section.key=value`, checked.

The same settings as a preset's YAML, checked the same way; `Run.save_settings` keeps them.
"""

import re

import yaml

from kit.audio.codec import codec_config
from kit.audio.ctc_recognizer import RecognizerConfig
from kit.audio.spectrogram import front_end_config
from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.formatting import nearest, shorten
from kit.batches.batching import DataConfig
from kit.dataset.alignment import AlignConfig
from kit.dataset.archive import ArchiveConfig
from kit.dataset.data_report import ManifestConfig
from kit.dataset.huggingface import HubConfig
from kit.dataset.synthetic import CorpusConfig
from kit.inference.code_reader import CodeReaderConfig
from kit.inference.sampling import GenerateConfig
from kit.inference.settings import EvaluateConfig, InferConfig, SoundConfig
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.text.train_tokenizer import TokenizerConfig
from kit.training.config import TrainConfig
from kit.training.switches import SpeedConfig
from kit.training.trainable import FinetuneConfig
from kit.tuning.session_plan import TimeBudget
from kit.tuning.trials import TrialConfig

# A preset's sections and the class that checks each; of the others the preset has every key.
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
    "promise": TimeBudget,
    "speed": SpeedConfig,
    "recognizer": RecognizerConfig,
    "align": AlignConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "infer": InferConfig,
    "sound": SoundConfig,
    "reader": CodeReaderConfig,
    "trials": TrialConfig,
}


def parse_settings(words: list[str]) -> dict:
    """["train.lr=1e-4"] -> {"train": {"lr": 0.0001}}; values are read as YAML.

    Raises KitError for what is not `section.key=value`.
    """
    sections = {}
    for word in words:
        name, equals, text = word.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise KitError(
                f"--set {shorten(word)}: write section.key=value, for instance --set train.lr=1e-4."
            )
        sections.setdefault(section, {})[key] = parse_value(text, word)
    return sections


def parse_value(text: str, word: str):
    """`text` as YAML reads it, and 1e-4 as the number it is: YAML asks for 1.0e-4."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise KitError(f"--set {shorten(word)} has no plain value: {shorten(error)}") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def check_settings(sections: dict, preset: dict) -> None:
    """Raise KitError for a setting that `preset`, or the code that reads it, does not know.

    The message names the nearest known one; a value must be of its type and in its range.
    """
    for section, values in sections.items():
        if section not in preset:
            raise KitError(f"There is no section `{section}`.{nearest(section, preset)}")
        laid = merge(preset[section], values)
        try:
            if section == "codec":  # the `kind` of these two says which class checks it
                codec_config(laid)
            elif section == "front_end":
                front_end_config(laid)
            elif section in SECTIONS:
                build(SECTIONS[section], laid)
            else:
                for key, value in values.items():
                    _check_plain(section, key, value, preset[section])
        except KitError as error:
            # A person has written the section's name, not that of the class which checks it.
            told = re.sub(r"^\w+(?=\.\w| has no setting)", section, str(error))
            raise KitError(told) from error


def _check_plain(section: str, key: str, value, known: dict) -> None:
    if key not in known:
        raise KitError(f"{section} has no setting `{key}`.{nearest(key, known)}")
    number = isinstance(known[key], int | float) and not isinstance(known[key], bool)
    kind = int | float if number else type(known[key])
    if not isinstance(value, kind) or (number and isinstance(value, bool)):
        raise KitError(
            f"{section}.{key} must be like {known[key]!r}, got {value!r} ({type(value).__name__})."
        )
