"""`python -m kit push`: a voice with samples and a model card on the Hugging Face hub.

It needs HF_TOKEN or `hf auth login`.
"""

import math
import shutil
import tempfile
from pathlib import Path

import yaml

from kit.base.errors import KitError
from kit.base.formatting import shorten
from kit.base.hub import endpoint
from kit.base.run import Run
from kit.inference.candidates import READER
from kit.inference.export import load_export, read_card
from kit.notebook.result import Result
from kit.recipes.base_model import EXPORT_FILES, HUB, inherited_licence, releases
from kit.recipes.exports import current_export, require_evaluated

SAMPLES = 4  # recordings of the voice that are uploaded
FIGURES = (  # of the record: name, section, key, and how it is written
    ("recordings", "data", "hours", "{:.2f} hours"),
    ("training steps", "train", "steps", "{:,}"),
    ("character error rate", "eval", "cer", "{:.1%}"),
    ("... of recordings", "eval", "cer_floor", "{:.1%}"),
)
SPACE_APP = '''"""A page that speaks with {name}."""

from kit.extras.serve.recipe import serve

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
    to: str = "",  # OWNER/NAME of the repository, yours; new ones are private
    *,
    public: bool = False,  # yes: make a new repository public (no)
    license: str = "",  # of the voice, such as cc-by-4.0 (not stated)
    consent: str = "",  # who spoke, and what they agreed to (not stated)
    space: bool = False,  # yes: also upload a Space: a page that speaks (no)
    install: str = "",  # for the Space: what pip installs, such as git+https://...
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
    require_evaluated(run)
    folder = current_export(run)
    if space and not install:
        raise KitError("A Space installs the kit: `install` names it, such as git+https://...")
    load_export(folder)  # raises for a damaged one
    api = HfApi(endpoint=endpoint())
    repository = f"{owner}/{name}"
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary, "voice")
        write_voice(run, folder, files, repository, license, consent)
        upload(api, repository, files, public, "model")
        if space:
            page = Path(temporary, "space")
            page.mkdir()
            header = {"title": name, "sdk": "gradio", "app_file": "app.py"}
            readme = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n"
            (page / "README.md").write_text(readme, encoding="utf-8")
            (page / "app.py").write_text(SPACE_APP.format(name=HUB + repository), encoding="utf-8")
            (page / "requirements.txt").write_text(f"{install}\ngradio\n", encoding="utf-8")
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
    samples = [row for row in report.get("samples", []) if (run.folder / row["wav"]).is_file()]
    for sample in samples[:SAMPLES]:
        (folder / "samples").mkdir(exist_ok=True)
        name = Path(sample["wav"]).name
        shutil.copyfile(run.folder / sample["wav"], folder / "samples" / name)
        source = f"https://huggingface.co/{repository}/resolve/main/samples/{name}"
        played += f'{sample.get("text", "")}<br><audio controls src="{source}"></audio>\n\n'
    card = read_card(export)
    header = {"language": card.language}
    header |= {"pipeline_tag": "text-to-speech", "library_name": "voicekit"}
    base = report.get("start_from") or {}
    inherited = card.licence or inherited_licence(run)
    if inherited:
        source = next((each for each in releases() if each.licence == inherited), None)
        name, link = source.on_the_hub if source else ("", "")
        header |= {"license": "other", "license_name": name or inherited}
        header |= {"license_link": link} if link else {}
        condition = f": {source.condition}" if source else ""
        license = f"{inherited}, the licence of the base model{condition}."
    elif license:
        header["license"] = license
    if "repository" in base.get("download", {}):
        header["base_model"] = base["download"]["repository"]
    figures = ""
    for what, section, key, form in FIGURES:
        value = report.get(section, {}).get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            figures += f"| {what} | {form.format(value)} |\n"
    text = MODEL_CARD.format(
        header=yaml.safe_dump(header, allow_unicode=True, sort_keys=False).strip(),
        name=repository.partition("/")[2],
        speakers=", ".join(card.speakers),
        figures=figures,
        samples=played,
        repository=repository,
        consent=consent or NOT_STATED,
        licence=license or NOT_STATED,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
