"""Share a voice on the Hugging Face hub, and get one from there.

Pushing, and private repositories, need HF_TOKEN or `hf auth login`.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from kit.base.errors import KitError
from kit.base.files import make_folder
from kit.base.formatting import shorten
from kit.base.hub import endpoint, fetch_model, fetched, list_files
from kit.base.lock import held
from kit.base.run import RELEASES_FOLDER, Run, run_folder, runs_folder
from kit.inference.candidates import READER
from kit.inference.export import CARD, FILES, FIX, load_export, read_card
from kit.notebook.progress import Ticker
from kit.notebook.result import Result

HUB = "hf://"
SAMPLES = 4  # recordings of the voice that are uploaded
EXPORT_FILES = (*FILES, CARD)
BESIDE_THEM = (READER, "README.md")  # where the voice has them
FIGURES = (  # of the record: name, section, key, and how it is written
    ("recordings", "data", "hours", "{:.2f} hours".format),
    ("training steps", "train", "steps", "{:,}".format),
    ("character error rate", "eval", "cer", "{:.1%}".format),
    ("... of recordings", "eval", "cer_floor", "{:.1%}".format),
)
LICENCE = "CPML"  # of XTTS-v2 and of all that is made from it
CPML = {
    "license": "other",
    "license_name": "coqui-public-model-license",
    "license_link": "https://coqui.ai/cpml",
}
SPACE_APP = '''"""A page that speaks with {name}."""

from kit.recipes.serve import serve

serve(voice="{name}", host="0.0.0.0")
'''
MODEL_CARD = """---
{header}
---

# {name}

Speakers: {speakers}.

| what | figure |
|---|---|
{figures}

{samples}## Use

    python -m kit speak --voice hf://{repository} --text "..." --out speech.wav
    python -m kit serve --voice hf://{repository}

## Consent and intended use

{consent}

## Licence

{licence}
"""
NOT_STATED = "To be filled in by the owner of the voice."


def push(
    run: Run,
    to: str = "",
    *,
    public: bool = False,
    license: str = "",
    consent: str = "",
    space: bool = False,
    install: str = "",
) -> Result:
    """Upload the exported voice of `run` to the repository `to` (OWNER/NAME).

    `license` is an id of the hub, such as cc-by-4.0; `consent` says who spoke and what they agreed
    to. `space` also uploads a page that speaks, as a Space of the same name, which installs the kit
    by `pip install INSTALL`. A new repository is private unless `public`. Raises KitError if the
    voice is missing or damaged, and if the hub refuses.
    """
    from huggingface_hub import HfApi

    owner, _, name = to.removeprefix(HUB).partition("/")
    if not owner or not name or "/" in name:
        raise KitError(f"`to` is {to!r}: write OWNER/NAME, OWNER being your name on the hub.")
    folder = run.folder / "export"
    if not (folder / CARD).is_file():
        raise KitError(
            f"There is no exported voice in {folder}: 04_inference and `python -m kit speak --run "
            f"{run.name}` write one."
        )
    if space and not install:
        raise KitError("A Space installs the kit: `install` names it, such as git+https://...")
    load_export(folder)  # raises for a damaged one
    api = HfApi(endpoint=endpoint())
    repository = f"{owner}/{name}"
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary) / "voice"
        write_voice(run, folder, files, repository, license, consent)
        upload(api, repository, files, public, "model")
        if space:
            page = Path(temporary) / "space"
            write_space(page, repository, install)
            upload(api, repository, page, public, "space")
    return Result(line=f"The voice is at {api.endpoint}/{repository}")


def upload(api, repository: str, folder: Path, public: bool, kind: str) -> None:
    """Upload `folder` in one commit. Raises KitError with the hub's reason."""
    how = {"space_sdk": "gradio"} if kind == "space" else {}
    message = "Upload a voice" if kind == "model" else "Upload its page"
    try:
        api.create_repo(repository, private=not public, exist_ok=True, repo_type=kind, **how)
        api.upload_folder(
            repo_id=repository, folder_path=folder, repo_type=kind, commit_message=message
        )
    except Exception as error:  # of the library and below; they differ from version to version
        raise KitError(
            f"{repository} could not be uploaded to {api.endpoint} ({shorten(error, 300)}). Is "
            "this machine online, and HF_TOKEN a token that may write?"
        ) from error


def write_voice(
    run: Run, export: Path, folder: Path, repository: str, license: str, consent: str
) -> None:
    """Write the export with samples and a model card to the new `folder`."""
    folder.mkdir()
    for name in (*EXPORT_FILES, READER):
        if (export / name).is_file():
            shutil.copyfile(export / name, folder / name)
    report = run.report()
    played = ""
    samples = report.get("samples", [])
    samples = [sample for sample in samples if (run.folder / sample["wav"]).is_file()]
    for sample in samples[:SAMPLES]:
        (folder / "samples").mkdir(exist_ok=True)
        name = Path(sample["wav"]).name
        shutil.copyfile(run.folder / sample["wav"], folder / "samples" / name)
        source = f"https://huggingface.co/{repository}/resolve/main/samples/{name}"
        played += f'{sample.get("text", "")}<br><audio controls src="{source}"></audio>\n\n'
    card = read_card(export)
    base = report.get("start_from") or {}
    header = {
        "language": card.language,
        "pipeline_tag": "text-to-speech",
        "library_name": "voicekit",
    }
    if "licence" in base or card.licence:
        header |= CPML
        license = "Coqui Public Model License: no commercial use of the model or its speech."
    elif license:
        header["license"] = license
    if "repository" in base.get("download", {}):
        header["base_model"] = base["download"]["repository"]
    text = MODEL_CARD.format(
        header=yaml.safe_dump(header, allow_unicode=True, sort_keys=False).strip(),
        name=repository.partition("/")[2],
        speakers=", ".join(card.speakers),
        figures="\n".join(f"| {what} | {figure} |" for what, figure in card_figures(report)),
        samples=played,
        repository=repository,
        consent=consent or NOT_STATED,
        licence=license or NOT_STATED,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def card_figures(report: dict) -> Iterator[tuple[str, str]]:
    for what, section, key, write in FIGURES:
        value = report.get(section, {}).get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield what, write(value)


def write_space(folder: Path, repository: str, install: str) -> None:
    folder.mkdir()
    header = {"title": repository.partition("/")[2], "sdk": "gradio", "app_file": "app.py"}
    readme = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n"
    (folder / "README.md").write_text(readme, encoding="utf-8")
    (folder / "app.py").write_text(SPACE_APP.format(name=HUB + repository), encoding="utf-8")
    (folder / "requirements.txt").write_text(f"{install}\ngradio\n", encoding="utf-8")


def voice_folder(name: str, run: str = "") -> Path:
    """Return the folder of the exported voice `name`: a folder, or `hf://OWNER/NAME[@REVISION]`.

    "" is the voice of `run`. Downloads it once for all runs. Raises KitError if there is none, and
    DiskError if the download fails.
    """
    if not name.startswith(HUB):
        folder = Path(name).expanduser() if name else run_folder(run) / "export"
        if not (folder / CARD).is_file():
            raise KitError(f"There is no exported voice in {folder}: {FIX}")
        return folder
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
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
    `list_files` has answered, if it was asked. Raises KitError and DiskError if the download
    fails.
    """
    record = fetched(folder, names)
    if not record:
        lock = make_folder(folder.parent) / f".{folder.name}.lock"
        with held(lock, f"fetching {HUB}{repository}@{revision}", math.inf, print):
            progress = Ticker("bytes downloaded")
            record = fetch_model(repository, revision, names, folder, progress, optional, listing)
    return record


def copy_of(repository: str, revision: str, runs: Path) -> Path:
    """The folder of a repository's files, which all runs share."""
    return runs / RELEASES_FOLDER / f"{repository.replace('/', '--')}@{revision}"
