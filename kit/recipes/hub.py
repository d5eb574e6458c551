"""Share a voice on the Hugging Face hub, and get one from there.

`push` uploads the exported voice of a run with a model card. `voice_folder` finds a voice by the
path of its folder or by `hf://OWNER/NAME@REVISION`. Pushing, and private repositories, need
HF_TOKEN or `hf auth login`.
"""

import math
import shutil
import tempfile
from pathlib import Path

import yaml

from kit.base.errors import KitError
from kit.base.files import make_folder
from kit.base.formatting import shorten
from kit.base.hub import endpoint, fetch_model, fetched, list_files
from kit.base.lock import held
from kit.base.run import RELEASES_FOLDER, Run, run_folder
from kit.inference.code_reader import READER
from kit.inference.export import CARD, FILES, FIX, load_export, read_card
from kit.notebook.progress_line import Ticker
from kit.notebook.result import Result

HUB = "hf://"
SAMPLES = 4  # recordings of the voice that are uploaded
EXPORT_FILES = (*FILES, CARD)
CPML = {
    "license": "other",
    "license_name": "coqui-public-model-license",
    "license_link": "https://coqui.ai/cpml",
}
SPACE_APP = '''"""A page that speaks with {name}."""

from kit.recipes.hub import voice_folder
from kit.recipes.serve import serve

serve(voice_folder("{name}"), host="0.0.0.0")
'''
NOT_STATED = "To be filled in by the owner of the voice."


def push(
    run: Run,
    to: str,
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
        files = voice_files(run, folder, Path(temporary) / "voice", repository, license, consent)
        upload(api, repository, files, public, "model")
        if space:
            page = space_files(Path(temporary) / "space", repository, install)
            upload(api, repository, page, public, "space")
    return Result(line=f"The voice is at {api.endpoint}/{repository}")


def upload(api, repository: str, folder: Path, public: bool, kind: str) -> None:
    """Upload `folder` in one commit. Raises KitError with the hub's reason."""
    how = {"space_sdk": "gradio"} if kind == "space" else {}
    try:
        api.create_repo(repository, private=not public, exist_ok=True, repo_type=kind, **how)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            repo_type=kind,
            commit_message="Upload a voice" if kind == "model" else "Upload its page",
        )
    except Exception as error:  # of the library and below; they differ from version to version
        raise KitError(
            f"{repository} could not be uploaded to {api.endpoint} ({shorten(error, 300)}). Is "
            "this machine online, and HF_TOKEN a token that may write?"
        ) from error


def voice_files(
    run: Run, export: Path, folder: Path, repository: str, license: str, consent: str
) -> Path:
    """Copy the export with samples and a model card to `folder`; return it."""
    folder.mkdir()
    for name in (*EXPORT_FILES, READER):
        if (export / name).is_file():
            shutil.copyfile(export / name, folder / name)
    samples = []
    for sample in run.report().get("samples", []):
        path = run.folder / sample["wav"]
        if path.is_file() and len(samples) < SAMPLES:
            (folder / "samples").mkdir(exist_ok=True)
            samples.append((f"samples/{path.name}", sample.get("text", "")))
            shutil.copyfile(path, folder / samples[-1][0])
    text = model_card(run, export, repository, license, consent, samples)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def model_card(
    run: Run, export: Path, repository: str, license: str, consent: str, samples: list
) -> str:
    """Return the model card: the hub's YAML header, what the voice is, and how to use it."""
    card = read_card(export)
    report = run.report()
    base = report.get("start_from") or {}
    header = {
        "language": card.language,
        "pipeline_tag": "text-to-speech",
        "library_name": "voicekit",
    }
    if "licence" in base:
        header |= CPML
    elif license:
        header["license"] = license
    download = base.get("download") or {}
    if "repository" in download:
        header["base_model"] = download["repository"]
    lines = ["---", yaml.safe_dump(header, allow_unicode=True, sort_keys=False).strip(), "---", ""]
    lines += [f"# {repository.partition('/')[2]}", "", f"Speakers: {', '.join(card.speakers)}."]
    lines += ["", "| what | figure |", "|---|---|"]
    lines += [f"| {what} | {figure} |" for what, figure in card_figures(report).items()]
    for path, text in samples:
        source = f"https://huggingface.co/{repository}/resolve/main/{path}"
        lines += ["", f'{text}<br><audio controls src="{source}"></audio>']
    lines += [
        "",
        "## Use",
        "",
        f'    python -m kit speak --voice hf://{repository} --text "..." --out speech.wav',
        f"    python -m kit serve --voice hf://{repository}",
        "",
        "## Consent and intended use",
        "",
        consent or NOT_STATED,
        "",
        "## Licence",
        "",
        "Coqui Public Model License: no commercial use of the model or its speech."
        if "licence" in base
        else license or NOT_STATED,
        "",
    ]
    return "\n".join(lines)


def card_figures(report: dict) -> dict[str, str]:
    """Return the figures of a run that a listener asks for."""
    data, train, judged = (report.get(key) or {} for key in ("data", "train", "eval"))
    figures = {}
    if "hours" in data:
        figures["recordings"] = f"{data['hours']:.2f} hours"
    if "steps" in train:
        figures["training steps"] = f"{train['steps']:,}"
    for key, what in (("cer", "character error rate"), ("cer_floor", "... of recordings")):
        if isinstance(judged.get(key), float) and math.isfinite(judged[key]):
            figures[what] = f"{judged[key]:.1%}"
    return figures


def space_files(folder: Path, repository: str, install: str) -> Path:
    """Write a Space that serves the voice to `folder`; return it."""
    folder.mkdir()
    header = {"title": repository.partition("/")[2], "sdk": "gradio", "app_file": "app.py"}
    readme = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n"
    (folder / "README.md").write_text(readme, encoding="utf-8")
    (folder / "app.py").write_text(SPACE_APP.format(name=HUB + repository), encoding="utf-8")
    (folder / "requirements.txt").write_text(f"{install}\ngradio\n", encoding="utf-8")
    return folder


def is_on_hub(name: str) -> bool:
    return name.startswith(HUB)


def voice_folder(name: str, runs: Path | None = None) -> Path:
    """Return the folder of the exported voice `name`: a folder, or `hf://OWNER/NAME[@REVISION]`.

    Downloads it once for all runs in `runs`. Raises KitError if there is none, DownloadError and
    DiskError if the download fails.
    """
    if not is_on_hub(name):
        folder = Path(name).expanduser()
        if not (folder / CARD).is_file():
            raise KitError(f"There is no exported voice in {folder}: {FIX}")
        return folder
    repository, _, revision = name.removeprefix(HUB).rstrip("/").partition("@")
    commit, _ = list_files(repository, revision or "main")
    return fetch_export(repository, commit, runs or run_folder().parent)[0]


def is_voice(repository: str, revision: str, runs: Path) -> bool:
    """Return whether the repository holds a voice of this kit, of which one in `runs` is enough."""
    if fetched(copy_of(repository, revision, runs), EXPORT_FILES):
        return True
    return CARD in list_files(repository, revision)[1]


def fetch_export(repository: str, revision: str, runs: Path) -> tuple[Path, dict]:
    """Download the exported voice unless it is there; return its folder and download's record."""
    return fetch_once(repository, revision, runs, EXPORT_FILES, (READER, "README.md"))


def fetch_once(
    repository: str, revision: str, runs: Path, names: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[Path, dict]:
    """Download `names`, once for all runs in `runs`; return their folder and download's record.

    Those in `optional` come too where they exist. Waits while another process downloads them.
    Raises DownloadError and DiskError if the download fails.
    """
    folder = copy_of(repository, revision, runs)
    record = fetched(folder, names)
    if not record:
        lock = make_folder(folder.parent) / f".{folder.name}.lock"
        with held(lock, f"fetching {HUB}{repository}@{revision}", math.inf, print):
            progress = Ticker("bytes downloaded")
            record = fetch_model(repository, revision, names, folder, progress, optional)
    return folder, record


def copy_of(repository: str, revision: str, runs: Path) -> Path:
    return runs / RELEASES_FOLDER / f"{repository.replace('/', '--')}@{revision}"
