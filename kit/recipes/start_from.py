"""A run that begins with a voice there is already: its weights, its codes, its text ids and more.

What codes mean is its codec's to say and what text ids mean its tokenizer's, so both come with the
weights. They are copied into the run's folder: the voice they came from may go.
"""

import dataclasses
import os
from pathlib import Path

from kit.audio.codec import save_codec
from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.files import file_digest, write_atomic
from kit.base.run import read_run_file
from kit.inference.export import CARD, load_export
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.model.warm_start import model_settings, warm_start_model
from kit.model.weights import WEIGHTS, load_model, save_model
from kit.recipes.active_run import ActiveRun
from kit.recipes.release_files import fetched_release, hub_name, is_on_hub
from kit.recipes.start_from_xtts import (
    Beginning,
    beginning_of_release,
    release_weights,
    require_licence,
)
from kit.releases.indextts2 import indextts2_in, told_indextts2
from kit.text.grow_tokenizer import base_spellings
from kit.text.tokenizer import BaseTokenizer, load_tokenizer
from kit.tuning.memory_plan import count_parameters

BEGUN = "start_from"  # the mark: the SHA-256 of the voice's weights, and where they lay
CODEC = "codec.safetensors"
MODEL = "start.safetensors"
ADAPTERS_RATE = 10  # times the rate of a whole model (Schulman et al. 2025)
# Of a preset's rates, which are for a model trained from nothing: docs/measurements-archive.md.
GENTLER = 1 / 3
NEEDS_NO_GUIDE = {"train": {"guide": 0.0}}  # a voice has heads that follow the text
TOKENIZER = "start-tokenizer.model"


def begun_from(run: ActiveRun, folder: str, licence: str = "") -> ActiveRun:
    """`run`, which is to begin with the voice in `folder`.

    That is an export, another run's folder, or a released XTTS-v2, whose licence `licence` says to
    be accepted: its folder, or `hf://OWNER/NAME`, which is fetched. From here on the run's settings
    are that voice's sizes. Where `folder` is empty the run goes on as it was begun. Raises
    KitError for a folder without a voice, for a licence that is not accepted, and for a run that
    was begun otherwise; SpeechError, or what `load_xtts` and `xtts_codec` raise, for a voice that
    is damaged; DownloadError where it cannot be fetched.
    """
    if not folder:
        return run
    begun_sha256, _, begun_path = read_run_file(run.folder / BEGUN).partition(" ")
    origin = origin_of(folder)
    if origin == begun_path and not Path(origin).exists():
        return run  # all of it was copied: a notebook is run again where that folder is gone
    asked, downloaded = folder_of(run, folder, licence)
    path, weights = weights_in(asked)
    sha256 = file_digest(path / weights)
    if begun_sha256 == sha256:
        return run
    from_nothing = (run.folder / CODEC).exists() and not (run.folder / MODEL).exists()
    if begun_sha256 or from_nothing:
        how = f"from another voice, {begun_path}" if begun_sha256 else "from nothing"
        raise KitError(
            f"The run `{run.name}` was begun {how}, now {folder} is asked for: its codes and text "
            f"ids would mean something else. Set RUN to a new name, or delete {run.places()}."
        )
    if release_weights(path):
        beginning = beginning_of_release(path, weights, licence)
    else:
        beginning = beginning_of_voice(voice_in(path, weights))
    run = run.save_settings(settings_to_begin_with(run, beginning))
    save_model(beginning.model, run.path(MODEL))
    write_atomic(run.path(TOKENIZER), beginning.tokenizer)
    save_codec(beginning.codec, run.path(CODEC))
    if beginning.record:
        run.record(start_from=merge(beginning.record, {"download": downloaded}))
    write_atomic(run.path(BEGUN), f"{sha256} {origin}")  # the last: with it, all is here
    return run


def origin_of(name: str) -> str:
    """Where the voice `name` comes from, in full."""
    return hub_name(name) if is_on_hub(name) else str(Path(name).expanduser().resolve())


def folder_of(run: ActiveRun, name: str, licence: str) -> tuple[Path, dict]:
    """The folder of the voice `name`, fetched where it is the hub's; and what the hub said of it.

    Raises as `begun_from` does where it cannot be had.
    """
    if not is_on_hub(name):
        return Path(name).expanduser(), {}
    require_licence(name, licence)
    return fetched_release(run.folder.parent, name)


def settings_to_begin_with(run: ActiveRun, beginning: Beginning) -> dict:
    """The settings of a run that begins so: the voice's sizes, and what suits training it further.

    What a person has set comes before what suits it.
    """
    usual = merge(NEEDS_NO_GUIDE, beginning.defaults)
    finetune = dict(run.section("finetune"))
    if finetune.get("method") == "auto":
        finetune["method"] = method_for(run, beginning.model.config)
    rate = usual["train"].get("lr")
    adapters = finetune.get("method") == "lora"
    if rate and adapters:
        usual = merge(usual, {"train": {"lr": ADAPTERS_RATE * rate}})
    elif not rate and not adapters:
        usual = merge(usual, {"train": gentler(run.section("train"))})
    settings = merge(merge(usual, run.settings), {"finetune": finetune})
    return merge(settings, beginning.sections)


def gentler(train: dict) -> dict:
    """The learning rates with which to train on what a preset's `train` has trained."""
    names = ("lr", "muon_lr", "conditioner_lr")
    rates = {name: GENTLER * train[name] for name in names if name in train}
    return {name: float(f"{rate:.3g}") for name, rate in rates.items()}


def method_for(run: ActiveRun, voice: GPTConfig) -> str:
    """How to train `voice` further: adapters where it is larger than the preset's own model.

    That one is as large as suits the machine when all of it trains.
    """
    own = build(GPTConfig, run.section("model"))
    return "lora" if count_parameters(voice) > count_parameters(own) else "full"


def weights_in(folder: Path) -> tuple[Path, str]:
    """The folder and the name of its weights: an export's, or those that a run was left with."""
    exported = (folder / CARD).is_file()
    names = ("model.safetensors",) if exported else (WEIGHTS["ema"], WEIGHTS["raw"])
    released = release_weights(folder)
    if released and not exported:
        names = (released,)
    for name in names:
        if (folder / name).is_file():
            return folder.resolve(), name
    other = indextts2_in(folder)
    if other:
        raise KitError(f"START_FROM = {folder}: {told_indextts2(other)}")
    missing = "it is a file" if folder.is_file() else "no such folder"
    there = ", ".join(sorted(os.listdir(folder))[:8]) if folder.is_dir() else missing
    raise KitError(
        f"START_FROM = {folder}: there is no voice ({there or 'it is empty'}). Name the folder "
        "`export` of a run, the folder of a run that 02_train has finished, or that of a released "
        "XTTS-v2 with its vocab.json."
    )


def voice_in(folder: Path, weights: str) -> Voice:
    if (folder / CARD).is_file():
        return load_export(folder)
    return load_voice(folder, weights)


def beginning_of_voice(voice: Voice) -> Beginning:
    """What a run keeps of a voice of the kit's."""
    return Beginning(
        model=voice.model,
        codec=voice.codec,
        tokenizer=voice.tokenizer.file_bytes(),
        sections={
            "model": model_settings(voice.model.config),
            "codec": dataclasses.asdict(voice.codec.config),
            "front_end": dataclasses.asdict(voice.front_end.config),
            "text": {"phonemes": voice.tokenizer.phonemes},
        },
        record={},
    )


def tokenizer_of_start(run: ActiveRun, language: str) -> BaseTokenizer | None:
    """The tokenizer of the voice that `run` began with, for texts in `language`.

    None where it began with none.
    """
    if not read_run_file(run.folder / BEGUN):
        return None
    return load_tokenizer(run.folder / TOKENIZER, language)


def start_digest(run: ActiveRun) -> str:
    """Changes with the tokenizer that `run`'s own grows from."""
    return file_digest(run.folder / TOKENIZER)


def first_model(run: ActiveRun, config: GPTConfig, *, tokenizer: BaseTokenizer) -> SpeechGPT:
    """The model that `run` begins to train: with the voice's weights, or at random.

    Raises DamagedFileError where `config` is no longer that voice's.
    """
    base = tokenizer_of_start(run, tokenizer.language)
    if base is None:
        return SpeechGPT(config)
    model = load_model(run.folder / MODEL)
    return warm_start_model(config, model, base_spellings(base, tokenizer))


def told_start(run: ActiveRun, tokenizer: BaseTokenizer) -> str:
    """In words, what `run` begins with; "" where it begins with nothing."""
    base = tokenizer_of_start(run, tokenizer.language)
    if base is None:
        return ""
    new = tokenizer.vocab_size - base.vocab_size
    return (
        f"It begins with the voice in {read_run_file(run.folder / BEGUN).partition(' ')[2]}: "
        f"{base.vocab_size} text ids stay, {new} new ones begin as what spelt them before."
    )
