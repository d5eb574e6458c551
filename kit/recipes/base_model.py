"""The model that a run starts from, and exported voices: their files, the hub, their licences.

What codes mean depends on the codec and what text ids mean on the tokenizer, so both come with the
weights. They are copied into the run's folder: the original may be deleted.
"""

import dataclasses
import math
import os
import re
from pathlib import Path

from kit.audio.codec import Codec, save_codec
from kit.base.config import build, merge
from kit.base.errors import KitError
from kit.base.files import file_digest, make_folder, write_atomic
from kit.base.hub import fetch_model, fetched, list_files
from kit.base.lock import held
from kit.base.run import RELEASES_FOLDER, Run, load_use, read_run_file, run_folder, runs_folder
from kit.inference.candidates import READER
from kit.inference.export import CARD, FILES, FIX, load_export, read_card
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, model_settings, save_model
from kit.recipes.active_run import ActiveRun
from kit.recipes.run_parts import MODEL, START_FROM, TOKENIZER
from kit.releases.indextts2 import model as indextts2
from kit.releases.indextts2.codec import FeatureConfig, load_indextts2_codec
from kit.releases.indextts2.tokenizer import VOCABULARY_FILE as INDEXTTS2_VOCABULARY
from kit.releases.xtts_v2 import model as xtts_v2
from kit.releases.xtts_v2.codec import xtts_codec
from kit.settings import DataConfig, GPTConfig, MelConfig, TrainConfig
from kit.tuning.memory_plan import count_parameters

HUB = "hf://"
EXPORT_FILES = (*FILES, CARD)
BESIDE_THEM = (READER, "README.md")  # where the voice has them
RELEASE = "hf://coqui/XTTS-v2"
# Revisions that have been tested: the files of a repository may change at any time.
PINNED = {"coqui/XTTS-v2": "6c2b0d75eae4b7047358e3b6bd9325f857d43f77"}
NEEDED = (xtts_v2.WEIGHTS_FILE, xtts_v2.CONFIG_FILE, xtts_v2.VOCABULARY_FILE)
NEEDED += (xtts_v2.DVAE_FILE, xtts_v2.MEL_STATS_FILE)
WITH_THEM = ("LICENSE.txt",)  # must be passed on with the model and with its speech

INDEXTTS2_NEEDED = (indextts2.WEIGHTS_FILE, indextts2.CONFIG_FILE)
INDEXTTS2_NEEDED += (INDEXTTS2_VOCABULARY, indextts2.STATS_FILE)
INDEXTTS2_WITH_THEM = ("LICENSE.txt", "LICENSE_ZH.txt", "s2mel.pth", "feat1.pt", "feat2.pt")
LICENCE = "CPML"  # of XTTS-v2 and of all that is made from it
BILIBILI = "bilibili"  # the licence of IndexTTS2
# What each licence binds to; what a run records after its name.
TERMS = {
    LICENCE: (
        "is an XTTS-v2, or made from one. It is under the Coqui Public Model License: neither the "
        "model, nor what is made from it, nor its speech may be used commercially"
    ),
    BILIBILI: (
        "is an IndexTTS2, or made from one. It is under the bilibili Model Use License Agreement, "
        "whose conditions also bind everyone who is given what is made from it"
    ),
}
# Nothing is spoken in training: the kit does not make its sound.
NOT_SPOKEN = {
    "train": {"gate_every": 0, "gate_patience": 0},
    "decoder_finetune": {"steps": 0},
    "reader": {"rows": 0},
}
ACCEPTED = ", accepted"  # as a run records it, after the licence's name
CONDITIONS = {LICENCE: "neither the model nor its speech may be sold"}
OTHER_CONDITIONS = "its conditions go with the model"

CODEC = "codec.safetensors"

# Settings of the released model, which had better stay as they are.
TRAINED_WITH = ("text_stop_input", "stop_targets", "text_weight", "dropout", "text_dropout")
# How coqui fine-tunes XTTS; a preset's learning rates are for training from scratch.
XTTS_DEFAULTS = {
    "train": {"optimizer": "adamw", "lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.96]}
}
LORA_LR_FACTOR = 10  # times the learning rate of full training (Schulman et al. 2025)
FINETUNE_LR_FACTOR = 1 / 3  # of a preset's learning rates: docs/measurements-archive.md
# Of a person's recordings, to train from scratch: fewer were not measured (docs/measurements.md, "A
# person's voice").
MIN_HOURS = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What a run copies of the model it starts from."""

    model: SpeechGPT
    codec: Codec
    tokenizer: bytes  # its file
    front_end: MelConfig | FeatureConfig
    phonemes: str = ""  # of the tokenizer
    kept: tuple[str, ...] = ()  # settings of the model, beside its sizes
    record: dict  # for the run's report: where it came from, its licence
    defaults: dict = dataclasses.field(default_factory=dict)  # settings that a user may change


def start_from_base(run: ActiveRun, folder: str, licence: str = "") -> ActiveRun:
    """Return `run` starting from the model in `folder`, with that model's sizes as settings.

    `folder` is an export, another run's folder or a released XTTS-v2; `hf://OWNER/NAME@REVISION`
    downloads an export or a release. `licence` accepts the licence of XTTS-v2, which a voice made
    from it has, too. "" leaves the run as it was started. Raises KitError for a folder without a
    model, a licence that is not accepted, a run that was started otherwise and a failed download;
    SpeechError, or the errors of `load_xtts` and `xtts_codec`, for a damaged model.
    """
    if not folder:
        return run
    old_sha256, _, old_path = read_run_file(run.folder / START_FROM).partition(" ")
    if folder.startswith(HUB):
        repository, revision = repository_of(folder)
        origin = f"{HUB}{repository}@{revision}"
    else:
        origin = str(Path(folder).expanduser().resolve())
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
    if weights == indextts2.WEIGHTS_FILE:
        base = load_indextts2_base(run, path, licence)
    elif weights == xtts_v2.WEIGHTS_FILE:
        base = load_xtts_base(path, licence)
    else:
        base = load_own(path, weights, licence)
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

    The built-in corpus is, and so is anything beside a base model.
    """
    recorded = (run.figure("data", "source") or {}).get("data")
    if not recorded or hours >= MIN_HOURS or read_run_file(run.folder / START_FROM):
        return ""
    return (
        f"{hours:.2f} hours of recordings are few for a voice trained from scratch. With 1.66 "
        "hours of one person, Whisper got 24 % of the letters wrong (preset cpu, "
        "docs/measurements.md); fewer were not measured. Record more, or begin a new run and set "
        "BASE_MODEL (--base-model): "
        f"{RELEASE} by 07_finetune_xtts (its licence is non-commercial), or another voice's export "
        "(runs/NAME/export)."
    )


def repository_of(name: str) -> tuple[str, str]:
    """Split `hf://OWNER/NAME@REVISION` into repository and revision, by default that in PINNED.

    Raises KitError if there is none, and for a repository of another kind of model.
    """
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    if repository.startswith(f"{indextts2.INDEXTTS2_REPOSITORY}."):
        raise KitError(f"BASE_MODEL = {name}: {indextts2.describe_version_2_5(repository)}")
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


def folder_of(run: ActiveRun, name: str, licence: str) -> tuple[Path, dict]:
    """The folder of the model `name`, downloaded if it is on the hub; and the download's record.

    All runs share the download. A repository other than the tested release's may hold a voice of
    this kit. No weights are downloaded before their licence is accepted. Raises KitError for a
    wrong name; KitError and DiskError if the download fails.
    """
    if not name.startswith(HUB):
        return Path(name).expanduser(), {}
    repository, revision = repository_of(name)
    folder = copy_of(repository, revision, run.folder.parent)
    needed_licence, names, listing = LICENCE, (NEEDED, WITH_THEM), None
    if repository == indextts2.INDEXTTS2_REPOSITORY:
        needed_licence, names = BILIBILI, (INDEXTTS2_NEEDED, INDEXTTS2_WITH_THEM)
    elif repository not in PINNED and not fetched(folder, NEEDED):
        if not fetched(folder, EXPORT_FILES):
            listing = list_files(repository, revision)
        if not listing or CARD in listing[1]:
            fetch_once(repository, revision, folder, (CARD,), (), listing)
            needed_licence = read_card(folder).licence
            names = (EXPORT_FILES, BESIDE_THEM)
    if needed_licence:
        require_licence(name, licence, needed_licence)
    return folder, fetch_once(repository, revision, folder, *names, listing)


def voice_folder(name: str, run: str = "") -> Path:
    """Return the folder of the exported voice `name`: a folder, or `hf://OWNER/NAME[@REVISION]`.

    "" is the voice of `run`. Downloads it once for all runs; a commit that is there needs no
    network. Raises KitError if there is none, and DiskError if the download fails.
    """
    if not name.startswith(HUB):
        folder = Path(name).expanduser() if name else run_folder(run) / "export"
        if not (folder / CARD).is_file():
            raise KitError(f"There is no exported voice in {folder}: {FIX}")
        return folder
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    folder = copy_of(repository, revision, runs_folder())
    if not fetched(folder, EXPORT_FILES):
        listing = list_files(repository, revision or "main")
        folder = copy_of(repository, listing[0], runs_folder())
        fetch_once(repository, listing[0], folder, EXPORT_FILES, BESIDE_THEM, listing)
    return folder


def fetch_once(
    repository: str,
    revision: str,
    folder: Path,
    names: tuple[str, ...],
    optional: tuple[str, ...],
    listing: tuple | None = None,
) -> dict:
    """Download `names`, and those in `optional` that exist, unless they are there.

    Returns the download's record. Waits while another process downloads them. `listing` is what
    `list_files` has answered, if it was asked. Raises KitError and DiskError if the download fails.
    """
    record = fetched(folder, names)
    if record:
        return record
    lock = make_folder(folder.parent) / f".{folder.name}.lock"
    with held(lock, f"fetching {HUB}{repository}@{revision}", math.inf, print):
        return fetch_model(repository, revision, names, folder, optional, listing)


def copy_of(repository: str, revision: str, runs: Path) -> Path:
    """The folder of a repository's files, which all runs share."""
    return runs / RELEASES_FOLDER / f"{repository.replace('/', '--')}@{revision}"


def require_licence(name: Path | str, licence: str, needed: str) -> None:
    """Raise KitError unless `licence`, or KIT_ACCEPT_LICENSE, is the one that is `needed`."""
    licence = licence or os.environ.get("KIT_ACCEPT_LICENSE", "")
    if licence == needed:
        return
    given = f", not {licence!r}" if licence else ""
    terms = TERMS.get(needed, f"is under the licence {needed!r}, and so is what is made from it")
    raise KitError(
        f"{name} {terms}. Read the licence where the model was published; to accept it, "
        f'give `accept_license="{needed}"` (--accept-license {needed}){given}.'
    )


def accepted(licence: str) -> str:
    """What a run records of a licence that was accepted."""
    return f"{licence}{ACCEPTED}: {CONDITIONS.get(licence, OTHER_CONDITIONS)}"


def inherited_licence(run: Run) -> str:
    """The licence that the base model of `run` passes on; "" if none is known."""
    return (run.figure("start_from", "licence") or "").partition(ACCEPTED)[0]


def release_weights(folder: Path) -> str:
    """The name of the weights of an XTTS in `folder`; "" if there is none."""
    names = (xtts_v2.WEIGHTS_FILE, xtts_v2.VOCABULARY_FILE)
    return xtts_v2.WEIGHTS_FILE if all((folder / name).is_file() for name in names) else ""


def weights_in(folder: Path) -> tuple[Path, str]:
    """The folder and the name of the weights of the export, run or release in `folder`."""
    if folder.name == indextts2.WEIGHTS_FILE:  # the file in place of its folder
        folder = folder.parent
    names = [release_weights(folder) or WEIGHTS["ema"], WEIGHTS["raw"]]
    if indextts2.indextts2_in(folder):
        names = [indextts2.WEIGHTS_FILE]
    if (folder / CARD).is_file():
        names = ["model.safetensors"]
    for name in names:
        if (folder / name).is_file():
            return folder.resolve(), name
    missing = "it is a file" if folder.is_file() else "no such folder"
    content = ", ".join(sorted(os.listdir(folder))[:8]) if folder.is_dir() else missing
    raise KitError(
        f"BASE_MODEL = {folder}: there is no voice ({content or 'it is empty'}). Name the folder "
        "`export` of a run, the folder of a run that 02_train has finished, or that of a released "
        "XTTS-v2 with its vocab.json, or IndexTTS2 with its config.yaml."
    )


def load_xtts_base(folder: Path, licence: str) -> BaseModel:
    """Load the XTTS-v2 in `folder`; `licence` accepts its licence. Raises KitError."""
    require_licence(folder, licence, LICENCE)
    xtts = xtts_v2.load_xtts(folder / xtts_v2.WEIGHTS_FILE)
    if not xtts.dvae:
        raise KitError(
            f"{folder} has no {xtts_v2.DVAE_FILE}, which makes codes of recordings: copy it there "
            "from where the model was published."
        )
    codec = xtts_codec(xtts.sound, xtts.dvae, xtts.config)
    front_end = codec.reference_mel.config
    return released(xtts, codec, xtts.vocabulary.data, front_end, LICENCE, XTTS_DEFAULTS)


def load_indextts2_base(run: ActiveRun, folder: Path, licence: str) -> BaseModel:
    """Load the IndexTTS2 in `folder`; `licence` accepts its licence. Raises KitError."""
    require_licence(folder, licence, BILIBILI)

    def fetch(repository: str, name: str) -> Path:
        beside = copy_of(repository, "main", run.folder.parent)
        fetch_once(repository, "main", beside, (name,), ("LICENSE", "README.md"))
        return beside / name

    release = indextts2.load_indextts2(folder / indextts2.WEIGHTS_FILE)
    codec = load_indextts2_codec(folder, release.settings, fetch)
    config = release.model.config
    if codec.vocab_size + 2 != config.code_vocab:
        raise KitError(
            f"The semantic codec of {folder / indextts2.CONFIG_FILE} has {codec.vocab_size:,} "
            f"codes, its GPT {config.code_vocab - 2:,}: they are of different releases."
        )
    defaults = merge(XTTS_DEFAULTS, NOT_SPOKEN)
    return released(release, codec, release.tokenizer, FeatureConfig(), BILIBILI, defaults)


def released(
    release: xtts_v2.XTTS | indextts2.IndexTTS2,
    codec: Codec,
    tokenizer: bytes,
    front_end: MelConfig | FeatureConfig,
    licence: str,
    defaults: dict,
) -> BaseModel:
    """The base model of a release, whose settings stay as they are."""
    return BaseModel(
        model=release.model,
        codec=codec,
        tokenizer=tokenizer,
        front_end=front_end,
        kept=TRAINED_WITH,
        record={
            "licence": accepted(licence),
            **dataclasses.asdict(release.source),
            "notes": list(release.notes),
        },
        defaults=defaults,
    )


def load_own(folder: Path, weights: str, licence: str) -> BaseModel:
    """Load an export or a run of the kit; `licence` accepts that of its own base model."""
    is_export = (folder / CARD).is_file()
    if is_export:
        bound = read_card(folder).licence
    else:
        bound = inherited_licence(Run(name="", preset_name="", preset={}, folder=folder))
    if bound:
        require_licence(folder, licence, bound)
    voice = load_export(folder) if is_export else load_voice(folder, weights)
    return BaseModel(
        model=voice.model,
        codec=voice.codec,
        tokenizer=voice.tokenizer.file_bytes(),
        front_end=voice.front_end.config,
        phonemes=voice.tokenizer.phonemes,
        record={"licence": accepted(bound)} if bound else {},
    )


def settings_for(run: ActiveRun, base: BaseModel) -> dict:
    """The settings of a run that starts from `base`: its sizes, and what suits fine-tuning."""
    model = base.model.config
    sections = {
        "model": model_settings(model) | {name: getattr(model, name) for name in base.kept},
        "codec": dataclasses.asdict(base.codec.config),
        "front_end": dataclasses.asdict(base.front_end),
        "text": {"phonemes": base.phonemes},
    }
    return merge(finetuning_settings(run, model, base.defaults), sections)


def finetuning_settings(run: ActiveRun, model: GPTConfig, defaults: dict) -> dict:
    """The settings with which `run` fine-tunes `model`, whose own are `defaults`.

    They replace those of the preset's section `base_model`; what the user has set replaces both.
    """
    # A trained model has heads that follow the text.
    defaults = merge({"train": {"guided_attention_weight": 0.0}}, defaults)
    use = load_use(run.use)
    defaults = {
        section: {key: value for key, value in values.items() if key not in use.get(section, {})}
        for section, values in merge(run.section("base_model"), defaults).items()
    }
    finetune = dict(run.section("finetune"))
    if finetune.get("method") == "auto":
        # With adapters a step computes a third less, and little data teach them as much.
        own = count_parameters(build(GPTConfig, run.section("model")))
        finetune["method"] = "lora" if count_parameters(model) > own else "full"
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
    for name, cls in (("data", DataConfig), ("train", TrainConfig)):  # do they agree?
        build(cls, merge(run.section(name), settings.get(name, {})))
    return settings
