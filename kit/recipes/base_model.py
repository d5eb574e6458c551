"""The model that a run starts from, and exported voices: their files, the hub, their licences.

What codes mean depends on the codec and what text ids mean on the tokenizer, so both come with the
weights. They are copied into the run's folder: the original may be deleted.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.audio.codec import Codec, save_codec
from kit.base import extras
from kit.base.config import CONFIGS, build, merge
from kit.base.errors import KitError
from kit.base.files import file_digest, make_folder, write_atomic
from kit.base.hub import fetch_model, fetched, list_files
from kit.base.lock import held
from kit.base.run import RELEASES_FOLDER, Run, load_use, read_run_file, runs_folder
from kit.inference.candidates import READER
from kit.inference.export import CARD, FILES, FIX, load_export, read_card
from kit.inference.voice_files import load_voice
from kit.model.gpt import SpeechGPT
from kit.model.weights import WEIGHTS, model_settings, save_model
from kit.recipes.open_run import ActiveRun
from kit.recipes.run_parts import MODEL, START_FROM, TOKENIZER, base_voice
from kit.settings import DataConfig, GPTConfig, MelConfig, TrainConfig
from kit.tuning.memory_plan import count_parameters

HUB = "hf://"
SAMPLE = "sample"  # the voice in configs/: that of `make demo`, in int8
EXPORT_FILES = (*FILES, CARD)
BESIDE_THEM = (READER, "README.md")  # where the voice has them
RELEASE = "hf://coqui/XTTS-v2"
ACCEPTED = ", accepted"  # as a run records it, after the licence's name
OTHER_CONDITIONS = "its conditions go with the model"
CODEC = "codec.safetensors"

# Settings of the released model, which had better stay as they are.
TRAINED_WITH = ("text_stop_input", "stop_targets", "text_weight", "dropout", "text_dropout")
# How coqui fine-tunes XTTS; a preset's learning rates are for training from scratch.
COQUI_DEFAULTS = {
    "train": {"optimizer": "adamw", "lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.96]}
}
LORA_LR_FACTOR = 10  # times the learning rate of full training (Schulman et al. 2025)
FINETUNE_LR_FACTOR = 1 / 3  # of a preset's learning rates: docs/measurements-archive.md
# Of a person's recordings, to train from scratch: a third of them gives a CER of 42 %
# (docs/measurements.md, "A person's voice").
MIN_HOURS = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseModel:
    """What a run copies of the model it starts from."""

    model: SpeechGPT
    codec: Codec
    tokenizer: bytes  # its file
    front_end: MelConfig
    phonemes: str = ""  # of the tokenizer
    kept: tuple[str, ...] = ()  # settings of the model, beside its sizes
    record: dict  # for the run's report: where it came from, its licence
    defaults: dict = dataclasses.field(default_factory=dict)  # settings that a user may change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """A published model that runs can start from; an extra offers it in BASE_MODELS."""

    name: str
    repository: str  # on the hub
    revision: str  # that was tested, as the files of a repository may change; "": none was
    weights: str  # the file that holds them
    files: tuple[str, ...]  # that are needed
    optional: tuple[str, ...]  # that are passed on with them, where they are there
    licence: str  # as `accept_license` names it; all that is made from the model has it
    terms: str  # what it binds to, as the end of a sentence about a folder
    condition: str = OTHER_CONDITIONS
    on_the_hub: tuple[str, str] = ("", "")  # the licence's name and address there
    defaults: dict  # settings to fine-tune it with, which a user may change
    sizes: Callable[[], dict]  # of its GPT, as section `model`
    frame_rate: float  # codes per second
    is_in: Callable[[Path], bool]  # whether a folder holds one
    load: Callable[[Path, Callable], BaseModel]  # from a folder; takes a `fetch(repository, file)`
    export: Callable  # (run, voice, its folder, "fp16" or "fp32") -> the folder with the tuned one
    export_folder: str  # its name, in the run's
    missing_files: Callable[[Path], list[str]] = lambda folder: []  # of an export, to speak
    speaker: Callable | None = None  # (folder, reference): speaks where the kit cannot


def releases() -> list[Release]:
    """Return the published models that the extras here can read."""
    return [extras.load("BASE_MODELS", name) for name in extras.offered("BASE_MODELS")]


def release_in(folder: Path) -> Release | None:
    """Return which published model, also a fine-tuned one, `folder` holds; None for any other."""
    return next((release for release in releases() if release.is_in(folder)), None)


def package_speaker(run: Run):
    """Return what speaks with the exported voice of `run` where the kit cannot make its sound.

    Raises KitError where the export, or the package that speaks, is missing.
    """
    for release in releases():
        if release.speaker:
            return release.speaker(run.folder / release.export_folder)
    raise KitError("The extra that speaks such voices is not in kit/extras: bring it back.")


def start_from_base(run: ActiveRun, folder: str, licence: str = "") -> ActiveRun:
    """Return `run` starting from the model in `folder`, with that model's sizes as settings.

    `folder` is an export, another run's folder or a release, also as `hf://OWNER/NAME@REVISION`; ""
    leaves the run as it was started. `licence` accepts that of the model. Raises KitError for what
    cannot be had, for a run that was started otherwise and, as SpeechError, for a damaged model.
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
    release = release_in(path)
    if release and weights == release.weights:
        base = load_release(run, release, path, licence)
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
    if not recorded or hours >= MIN_HOURS or base_voice(run):
        return ""
    return (
        f"{hours:.2f} hours of recordings are few for a voice trained from scratch: of 0.56 hours "
        "of one person Whisper got 42 % of the letters wrong, of 1.66 hours 15 %. Record more, or "
        f"begin a new run and set BASE_MODEL (--base-model): {RELEASE} by 07_finetune_xtts (its "
        "licence is non-commercial), or another voice's export (runs/NAME/export)."
    )


def repository_of(name: str) -> tuple[str, str]:
    """Repository and revision of `hf://OWNER/NAME@REVISION`, which a release has by default."""
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    pinned = {release.repository: release.revision for release in releases()}
    revision = revision or pinned.get(repository, "")
    if repository.count("/") != 1 or not re.fullmatch(r"[\w./-]+", repository):
        raise KitError(
            f"BASE_MODEL = {name} is not a repository of the hub: write {HUB}OWNER/NAME@REVISION, "
            f"or {RELEASE}."
        )
    if not re.fullmatch(r"[\w.-]+", revision):
        raise KitError(
            f"BASE_MODEL = {name} lacks a revision, and the files of a repository may change: "
            f"write {HUB}{repository}@REVISION, a commit that its page lists under Files, Commits."
        )
    return repository, revision


def folder_of(run: ActiveRun, name: str, licence: str) -> tuple[Path, dict]:
    """The folder of the model `name`, downloaded if it is on the hub; and the download's record.

    All runs share the download. A repository other than a release's may hold a voice of this kit,
    or a fine-tuned release. No weights are downloaded before their licence is accepted.
    """
    if not name.startswith(HUB):
        return Path(name).expanduser(), {}
    repository, revision = repository_of(name)
    folder = copy_of(repository, revision, run.folder.parent)
    known = releases()
    release = next((each for each in known if each.repository == repository), None)
    release = release or next((each for each in known if fetched(folder, each.files)), None)
    listing = None
    if release is None and not fetched(folder, EXPORT_FILES):
        listing = list_files(repository, revision)
        if CARD not in listing[1]:
            release = next((each for each in known if set(each.files) <= set(listing[1])), None)
            if release is None:
                names = ", ".join(sorted(listing[1])[:8])
                raise KitError(
                    f"{name} holds no voice of this kit ({CARD}) and no model that an extra reads "
                    f"({', '.join(each.name for each in known) or 'there are none'}): {names}."
                )
    if release:
        require_licence(name, licence, release.licence)
        names = (release.files, release.optional)
    else:
        fetch_once(repository, revision, folder, (CARD,), (), listing)
        if read_card(folder).licence:
            require_licence(name, licence, read_card(folder).licence)
        names = (EXPORT_FILES, BESIDE_THEM)
    return folder, fetch_once(repository, revision, folder, *names, listing)


def voice_folder(name: str) -> Path:
    """Return the folder of the exported voice `name`: a folder, or `hf://OWNER/NAME[@REVISION]`.

    SAMPLE is the demo's voice, which comes with the kit. Downloads once for all runs; a commit that
    is there needs no network. Raises KitError if there is none, DiskError if the download fails.
    """
    if not name.startswith(HUB):
        folder = CONFIGS / SAMPLE if name == SAMPLE else Path(name).expanduser()
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


def copy_of(repository: str, revision: str, runs: Path) -> Path:
    """The folder of a repository's files, which all runs share."""
    return runs / RELEASES_FOLDER / f"{repository.replace('/', '--')}@{revision}"


def fetch_once(
    repository: str, revision: str, folder: Path, names: tuple, optional: tuple, listing=None
) -> dict:
    """Call `fetch_model` while no other process downloads the same repository."""
    lock = make_folder(folder.parent) / f".{folder.name}.lock"
    with held(lock, f"fetching {HUB}{repository}@{revision}", math.inf, print):
        return fetch_model(repository, revision, names, folder, optional, listing)


def require_licence(name: Path | str, licence: str, needed: str) -> None:
    """Raise KitError unless `licence`, or KIT_ACCEPT_LICENSE, is the one that is `needed`."""
    licence = licence or os.environ.get("KIT_ACCEPT_LICENSE", "")
    if licence == needed:
        return
    given = f", not {licence!r}" if licence else ""
    terms = {release.licence: release.terms for release in releases()}
    other = f"is under the licence {needed!r}, and so is what is made from it"
    raise KitError(
        f"{name} {terms.get(needed, other)}. Read the licence where the model was published; to "
        f'accept it, give `accept_license="{needed}"` (--accept-license {needed}){given}.'
    )


def accepted(licence: str) -> str:
    """What a run records of a licence that was accepted."""
    conditions = {release.licence: release.condition for release in releases()}
    return f"{licence}{ACCEPTED}: {conditions.get(licence, OTHER_CONDITIONS)}"


def inherited_licence(run: Run) -> str:
    """The licence that the base model of `run` passes on; "" if none is known."""
    return (run.figure("start_from", "licence") or "").partition(ACCEPTED)[0]


def weights_in(folder: Path) -> tuple[Path, str]:
    """The folder and the name of the weights of the export, run or release in `folder`."""
    if folder.name in [release.weights for release in releases()]:  # the file, not its folder
        folder = folder.parent
    release = release_in(folder)
    names = [release.weights] if release else [WEIGHTS["ema"], WEIGHTS["raw"]]
    if (folder / CARD).is_file():
        names = ["model.safetensors"]
    for name in names:
        if (folder / name).is_file():
            return folder.resolve(), name
    others = "".join(f", or that of a {each.name} ({', '.join(each.files)})" for each in releases())
    raise KitError(
        f"BASE_MODEL = {folder}: there is no voice. Name the folder `export` of a run, the folder "
        f"of a run that 02_train has finished{others}."
    )


def load_release(run: ActiveRun, release: Release, folder: Path, licence: str) -> BaseModel:
    """Load the release in `folder`; `licence` accepts its licence. Raises KitError."""
    require_licence(folder, licence, release.licence)

    def fetch(repository: str, name: str) -> Path:
        beside = copy_of(repository, "main", run.folder.parent)
        fetch_once(repository, "main", beside, (name,), ("LICENSE", "README.md"))
        return beside / name

    return release.load(folder, fetch)


def from_release(
    release: Release, loaded: Any, codec: Codec, tokenizer: bytes, front_end: MelConfig
) -> BaseModel:
    """The base model of a release, whose settings stay as they are.

    `loaded` has the attributes `model` and `source`, for the run's report.
    """
    return BaseModel(
        model=loaded.model,
        codec=codec,
        tokenizer=tokenizer,
        front_end=front_end,
        kept=TRAINED_WITH,
        record={"licence": accepted(release.licence)} | loaded.source,
        defaults=release.defaults,
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
    rates = {}
    if lr and finetune.get("method") == "lora":
        rates["lr"] = LORA_LR_FACTOR * lr
    elif not lr and finetune.get("method") != "lora":
        train = run.section("train")
        for name in ("lr", "muon_lr", "conditioner_lr"):
            if name in train:
                rates[name] = float(f"{FINETUNE_LR_FACTOR * train[name]:.3g}")
    defaults = merge(defaults, {"train": rates})
    settings = merge(merge(defaults, run.settings), {"finetune": finetune})
    for name, cls in (("data", DataConfig), ("train", TrainConfig)):  # do they agree?
        build(cls, merge(run.section(name), settings.get(name, {})))
    return settings
