"""The model that a run starts from: its files, its licence, and what of it trains.

What codes mean depends on the codec and what text ids mean on the tokenizer, so both come with the
weights. They are copied into the run's folder: the original may be deleted.
"""

import dataclasses
import os
import re
import warnings
from pathlib import Path

from kit.audio.codec import Codec, save_codec
from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.files import file_digest, write_atomic
from kit.base.notes import Note
from kit.base.run import Run, read_run_file
from kit.base.tensor_file import tensors_sha256
from kit.inference.export import CARD, load_export
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.model.warm_start import model_settings, warm_start_model
from kit.model.weights import WEIGHTS, load_model, save_model, saved_config
from kit.recipes.active_run import ActiveRun
from kit.recipes.hub import HUB, fetch_export, fetch_once, is_on_hub, is_voice
from kit.releases.indextts2 import INDEXTTS2_REPOSITORIES, describe_indextts2, indextts2_in
from kit.releases.xtts_v2.codec import xtts_codec
from kit.releases.xtts_v2.model import (
    CONFIG_FILE,
    DVAE_FILE,
    MEL_STATS_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILES,
    load_xtts,
)
from kit.text.grow_tokenizer import base_spellings
from kit.text.tokenizer import BaseTokenizer, load_tokenizer
from kit.training.trainable import Base, FinetuneConfig, Finetuning
from kit.tuning.memory_plan import count_parameters, count_trained

RELEASE = "hf://coqui/XTTS-v2"
# Revisions that have been tested: the files of a repository may change at any time.
PINNED = {"coqui/XTTS-v2": "6c2b0d75eae4b7047358e3b6bd9325f857d43f77"}
NEEDED = (WEIGHTS_FILES[0], CONFIG_FILE, VOCABULARY_FILE, DVAE_FILE, MEL_STATS_FILE)
WITH_THEM = ("LICENSE.txt",)  # must be passed on with the model and with its speech
LICENCE = "CPML"

START_FROM = "start_from"  # file with the SHA-256 of the base model's weights and its path
CODEC = "codec.safetensors"
MODEL = "start.safetensors"
TOKENIZER = "start-tokenizer.model"

# Settings of the released model, which had better stay as they are.
TRAINED_WITH = ("text_stop_input", "stop_targets", "text_weight", "dropout", "text_dropout")
# How coqui fine-tunes XTTS; a preset's learning rates are for training from scratch.
XTTS_DEFAULTS = {
    "train": {"optimizer": "adamw", "lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.96]}
}
# A trained model has heads that follow the text.
NO_GUIDED_ATTENTION = {"train": {"guided_attention_weight": 0.0}}
LORA_LR_FACTOR = 10  # times the learning rate of full training (Schulman et al. 2025)
FINETUNE_LR_FACTOR = 1 / 3  # of a preset's learning rates: docs/measurements.md
# Of a person's recordings, to train from scratch. An estimate: 1.5 hours were measured, and were
# too few (docs/measurements.md, "A person's voice"); the built-in corpus has more and needs no base
# model, but its speech is synthetic and its sentences simple.
MIN_HOURS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What a run copies of the model it starts from."""

    model: SpeechGPT
    codec: Codec
    tokenizer: bytes  # its file
    sections: dict  # settings that must be those of the base model
    record: dict  # for the run's report: where it came from
    defaults: dict = dataclasses.field(default_factory=dict)  # settings that a user may change


def start_from_base(run: ActiveRun, folder: str, licence: str = "") -> ActiveRun:
    """Return `run` starting from the model in `folder`, with that model's sizes as settings.

    `folder` is an export, another run's folder or a released XTTS-v2, whose licence `licence`
    accepts; `hf://OWNER/NAME@REVISION` downloads an export or a release. "" leaves the run as
    it was started. Raises KitError for a folder without a model, a licence that is not accepted and
    a run that was started otherwise; SpeechError, or the errors of `load_xtts` and `xtts_codec`,
    for a damaged model; DownloadError if it cannot be downloaded.
    """
    if not folder:
        return run
    old_sha256, _, old_path = read_run_file(run.folder / START_FROM).partition(" ")
    origin = hub_name(folder) if is_on_hub(folder) else str(Path(folder).expanduser().resolve())
    if origin == old_path and not Path(origin).exists():
        return run  # everything was copied: the notebook is run again after the folder was deleted
    source, downloaded = folder_of(run, folder, licence)
    path, weights = weights_in(source)
    sha256 = file_digest(path / weights)
    if old_sha256 == sha256:
        return run
    from_scratch = (run.folder / CODEC).exists() and not (run.folder / MODEL).exists()
    if old_sha256 or from_scratch:
        how = f"from another voice, {old_path}" if old_sha256 else "from scratch"
        raise KitError(
            f"The run `{run.name}` was started {how}, not from {folder}: its codes and text ids "
            f"would mean something else. Set RUN to a new name, or delete {run.places()}."
        )
    if release_weights(path):
        base = load_release(path, weights, licence)
    else:
        base = load_own(path, weights)
    run = run.save_settings(settings_for(run, base))
    save_model(base.model, run.path(MODEL))
    write_atomic(run.path(TOKENIZER), base.tokenizer)
    save_codec(base.codec, run.path(CODEC))
    if base.record:
        run.record(start_from=merge(base.record, {"download": downloaded}))
    # Written last: it marks a complete copy.
    write_atomic(run.path(START_FROM), f"{sha256} {origin}")
    return run


def too_few_hours(run: Run, hours: float) -> str:
    """What to expect of `hours` of recordings, and what to do; "" if they are enough.

    The built-in corpus is always enough, and so is anything beside a base model.
    """
    recorded = (run.figure("data", "source") or {}).get("data")
    if not recorded or hours >= MIN_HOURS or read_run_file(run.folder / START_FROM):
        return ""
    return (
        f"{hours:.2f} hours of recordings are few for a voice trained from scratch: do not expect "
        "it to be intelligible. With 1.5 hours of one person, Whisper found 89 % of the letters "
        "wrong from scratch, and 18 % from a base voice (docs/measurements.md). More hours were "
        f"not measured; that {MIN_HOURS:g} are needed is an estimate. Record more, or begin a new "
        f"run and set BASE_MODEL (--base-model): {RELEASE} by 07_finetune_xtts (its licence is "
        "non-commercial), or another voice's export (runs/NAME/export)."
    )


def repository_of(name: str) -> tuple[str, str]:
    """Split `hf://OWNER/NAME@REVISION` into repository and revision, by default that in PINNED.

    Raises KitError if there is none, and for a repository of another kind of model.
    """
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    if repository.startswith(INDEXTTS2_REPOSITORIES):
        raise KitError(f"BASE_MODEL = {name}: {describe_indextts2(repository)}")
    revision = revision or PINNED.get(repository, "")
    if repository.count("/") != 1 or not re.fullmatch(r"[\w./-]+", repository):
        raise KitError(
            f"BASE_MODEL = {name} names no repository of the hub: write {HUB}OWNER/NAME@REVISION, "
            f"or {RELEASE}."
        )
    if not re.fullmatch(r"[\w.-]+", revision):
        raise KitError(
            f"BASE_MODEL = {name} says no revision, and the files of a repository may change: "
            f"write {HUB}{repository}@REVISION, a commit that its page lists under Files, Commits."
        )
    return repository, revision


def hub_name(name: str) -> str:
    """`name` with its revision."""
    repository, revision = repository_of(name)
    return f"{HUB}{repository}@{revision}"


def folder_of(run: ActiveRun, name: str, licence: str) -> tuple[Path, dict]:
    """The folder of the model `name`, downloaded if it is on the hub; and the download's record.

    A repository other than the tested release's may hold a voice of this kit.
    """
    if not is_on_hub(name):
        return Path(name).expanduser(), {}
    runs = run.folder.parent
    repository, revision = repository_of(name)
    if repository not in PINNED and is_voice(repository, revision, runs):
        return fetch_export(repository, revision, runs)
    require_licence(name, licence)
    return fetch_release(runs, name)


def fetch_release(runs: Path, name: str) -> tuple[Path, dict]:
    """The folder under `runs` with the files of `name`, downloaded once for all runs; its record.

    Waits while another process downloads them. The licence must have been accepted before. Raises
    KitError for a wrong name, DownloadError and DiskError if the download fails.
    """
    repository, revision = repository_of(name)
    return fetch_once(repository, revision, runs, NEEDED, WITH_THEM)


def require_licence(folder: Path | str, licence: str) -> None:
    """Raise KitError unless `licence`, or KIT_ACCEPT_LICENSE, is that of XTTS-v2."""
    licence = licence or os.environ.get("KIT_ACCEPT_LICENSE", "")
    if not licence and "KIT_LICENCE" in os.environ:
        warnings.warn("KIT_LICENCE is now called KIT_ACCEPT_LICENSE.", Note, stacklevel=2)
        licence = os.environ["KIT_LICENCE"]
    if licence == LICENCE:
        return
    given = f", not {licence!r}" if licence else ""
    raise KitError(
        f"{folder} holds an XTTS-v2 ({CONFIG_FILE}, {VOCABULARY_FILE}). It is under the Coqui "
        "Public Model License: neither the model, nor what is made from it, nor its speech may be "
        "used commercially. Read the licence where the model was published; to accept it, give "
        f'`accept_license="{LICENCE}"` (--accept-license {LICENCE}){given}.'
    )


def release_weights(folder: Path) -> str:
    """The name of the weights of an XTTS in `folder`; "" if there is none."""
    if not (folder / VOCABULARY_FILE).is_file():
        return ""
    return next((name for name in WEIGHTS_FILES if (folder / name).is_file()), "")


def weights_in(folder: Path) -> tuple[Path, str]:
    """The folder and the name of the weights of the export, run or release in `folder`."""
    released = release_weights(folder)
    if (folder / CARD).is_file():
        names = ("model.safetensors",)
    elif released:
        names = (released,)
    else:
        names = (WEIGHTS["ema"], WEIGHTS["raw"])
    for name in names:
        if (folder / name).is_file():
            return folder.resolve(), name
    other = indextts2_in(folder)
    if other:
        raise KitError(f"BASE_MODEL = {folder}: {describe_indextts2(other)}")
    missing = "it is a file" if folder.is_file() else "no such folder"
    content = ", ".join(sorted(os.listdir(folder))[:8]) if folder.is_dir() else missing
    raise KitError(
        f"BASE_MODEL = {folder}: there is no voice ({content or 'it is empty'}). Name the folder "
        "`export` of a run, the folder of a run that 02_train has finished, or that of a released "
        "XTTS-v2 with its vocab.json."
    )


def load_release(folder: Path, weights: str, licence: str) -> BaseModel:
    """Load the XTTS-v2 in `folder`; `licence` says that its licence is accepted.

    Raises KitError if it is not, and if there is no DVAE, which makes codes of recordings;
    KitError and DamagedFileError for damaged files.
    """
    require_licence(folder, licence)
    xtts = load_xtts(folder / weights)
    if not xtts.dvae:
        raise KitError(
            f"{folder} has no {DVAE_FILE}, which makes codes of recordings: copy it there from "
            "where the model was published."
        )
    codec = xtts_codec(xtts.sound, xtts.dvae, xtts.config)
    model = model_settings(xtts.model.config)
    for name in TRAINED_WITH:
        model[name] = getattr(xtts.model.config, name)
    return BaseModel(
        model=xtts.model,
        codec=codec,
        tokenizer=xtts.vocabulary.data,
        sections={
            "model": model,
            "codec": dataclasses.asdict(codec.config),
            "front_end": dataclasses.asdict(codec.reference_mel.config),
            "text": {"phonemes": ""},
        },
        record={
            "licence": f"{LICENCE}, accepted: neither the model nor its speech may be sold",
            **dataclasses.asdict(xtts.source),
            "notes": list(xtts.notes),
        },
        defaults=XTTS_DEFAULTS,
    )


def load_own(folder: Path, weights: str) -> BaseModel:
    """Load an export or a run of the kit."""
    voice = load_export(folder) if (folder / CARD).is_file() else load_voice(folder, weights)
    return BaseModel(
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


def settings_for(run: ActiveRun, base: BaseModel) -> dict:
    """The settings of a run that starts from `base`: its sizes, and what suits fine-tuning.

    Settings that the user has given win over what suits fine-tuning.
    """
    defaults = merge(NO_GUIDED_ATTENTION, base.defaults)
    finetune = dict(run.section("finetune"))
    if finetune.get("method") == "auto":
        # The preset's own model is as large as fits the machine when all of it trains.
        own = count_parameters(build(GPTConfig, run.section("model")))
        too_large = count_parameters(base.model.config) > own
        finetune["method"] = "lora" if too_large else "full"
    lr = defaults["train"].get("lr")
    lora = finetune.get("method") == "lora"
    if lr and lora:
        defaults = merge(defaults, {"train": {"lr": LORA_LR_FACTOR * lr}})
    elif not lr and not lora:
        train = run.section("train")
        names = [name for name in ("lr", "muon_lr", "conditioner_lr") if name in train]
        rates = {name: float(f"{FINETUNE_LR_FACTOR * train[name]:.3g}") for name in names}
        defaults = merge(defaults, {"train": rates})
    settings = merge(merge(defaults, run.settings), {"finetune": finetune})
    return merge(settings, base.sections)


def load_base_tokenizer(run: ActiveRun, language: str) -> BaseTokenizer | None:
    """The base model's tokenizer, for texts in `language`; None if there is no base model."""
    if not read_run_file(run.folder / START_FROM):
        return None
    return load_tokenizer(run.folder / TOKENIZER, language)


def base_tokenizer_digest(run: ActiveRun) -> str:
    """A digest of the base model's tokenizer."""
    return file_digest(run.folder / TOKENIZER)


def first_model(run: ActiveRun, config: GPTConfig, *, tokenizer: BaseTokenizer) -> SpeechGPT:
    """The model before its first training step: the base model's weights, or random ones.

    Raises DamagedFileError if `config` is no longer that of the base model.
    """
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return SpeechGPT(config)
    model = load_model(run.folder / MODEL)
    return warm_start_model(config, model, base_spellings(base, tokenizer))


def describe_base_voice(run: ActiveRun, tokenizer: BaseTokenizer) -> str:
    """Describe the base model; "" if there is none."""
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return ""
    new = tokenizer.vocab_size - base.vocab_size
    return (
        f"It starts from the voice in {read_run_file(run.folder / START_FROM).partition(' ')[2]}: "
        f"{base.vocab_size} text ids stay, {new} new ones are initialised from the ids that "
        "spelt them before."
    )


def finetuning_of(run: ActiveRun) -> Finetuning:
    """What of the model `run` trains. Raises KitError if that needs a base model."""
    base = None
    if read_run_file(run.folder / START_FROM):
        path = run.folder / MODEL
        base = Base(config=saved_config(path), sha256=tensors_sha256(path), weights=path)
    finetuning = Finetuning(
        config=build(FinetuneConfig, run.section("finetune")),
        lora=build(LoRAConfig, run.section("lora")),
        base=base,
    )
    finetuning.require_voice()
    return finetuning


def describe_finetuning(model: GPTConfig, finetuning: Finetuning) -> str:
    """Describe what of `model` trains; "" if all of it does from the first step on."""
    lines = []
    if finetuning.adapters:
        trained = count_trained(model, finetuning)
        lora = finetuning.lora
        tables = ""
        if finetuning.config.tables == "all":
            tables = ", and all embeddings and heads"
        elif trained.tables:
            tables = ", and the new rows of embeddings and heads"
        lines.append(
            f"LoRA: {trained.learning:,} parameters train, "
            f"{trained.learning / count_parameters(model):.1%} as many as the model has: adapters "
            f"of rank {lora.rank} beside {', '.join(lora.targets)}{tables}. With mixed precision "
            "the frozen matrices beside them take half the memory."
        )
    if finetuning.config.tables_first:
        steps = finetuning.config.tables_first
        lines.append(f"In the first {steps:,} steps only embeddings and heads train.")
    return " ".join(lines)


def describe_rehearsal(figures: dict) -> str:
    """Describe how much of an epoch is rehearsal; "" if nothing is."""
    if not figures["rows_an_epoch"]:
        return ""
    return (
        f"{figures['share']:.0%} of an epoch is rehearsal: {figures['rows_an_epoch']:,} rows in "
        f"each, of {figures['rows']:,} that the base voice has spoken."
    )


def finetuning_figures(model: GPTConfig, finetuning: Finetuning) -> dict:
    """What of `model` trains, for the report."""
    figures = finetuning.identity()
    figures["tables_first"] = finetuning.config.tables_first
    figures["trained_parameters"] = count_trained(model, finetuning).learning
    figures["parameters"] = count_parameters(model)
    return figures
