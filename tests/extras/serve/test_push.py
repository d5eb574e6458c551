"""A voice is pushed to a hub on this machine and comes back from there."""

from pathlib import Path

import pytest
import soundfile
import torch
import yaml
from helpers import LINES, opinionated_voice
from hub import COMMIT, serving

from kit.__main__ import main
from kit.base.errors import KitError
from kit.base.run import Run
from kit.extras.serve.hub import push
from kit.inference.export import CARD, export_voice, load_export
from kit.recipes.base_model import voice_folder
from kit.recipes.exports import made_from
from kit.settings import GenerateConfig

NAME = "someone/a-voice"
TOKEN = "hf_secret"
SETTINGS = GenerateConfig(temperature=0.7, exact_codes=6)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "hub").mkdir()
    with serving(tmp_path / "hub", NAME, "main") as server:
        server.token = TOKEN
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        yield server


@pytest.fixture
def run(tmp_path) -> Run:
    folder = tmp_path / "runs" / "mine"
    for each in (tmp_path / "parts", folder / "samples"):
        each.mkdir(parents=True, exist_ok=True)
    export_voice(opinionated_voice(tmp_path / "parts"), folder / "export")
    (folder / "samples" / "held_out-0-ema.wav").write_bytes(b"RIFF")
    run = Run(name="mine", folder=folder, preset_name="tiny", preset={})
    run.record(
        data={"hours": 1.5},
        train={"steps": 3000},
        eval={"cer": 0.035, "cer_floor": 0.004},
        samples=[{"text": LINES[0], "wav": "samples/held_out-0-ema.wav", "split": "held_out"}],
    )
    return run


def header_of(folder: Path) -> dict:
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])


def test_a_pushed_voice_comes_back_with_a_card_and_says_the_same(hub, run):
    assert NAME in str(push(run, NAME, license="cc-by-4.0", consent="Alma spoke, and agreed."))
    (created,) = hub.created
    assert created.get("visibility") == "private" or created["private"]  # huggingface_hub 1 and 2
    folder = voice_folder(f"hf://{NAME}@main")
    assert folder.name == f"someone--a-voice@{COMMIT}"
    voices = (load_export(run.folder / "export"), load_export(folder))
    assert torch.equal(*(voice.speak(LINES[:1], "alma", SETTINGS)[0].wave for voice in voices))
    asked = len(hub.asked)
    assert voice_folder(f"hf://{NAME}@{COMMIT}") == folder
    assert len(hub.asked) == asked, "what was downloaded needs no network"
    text = (hub.folder / "README.md").read_text(encoding="utf-8")
    assert header_of(hub.folder).items() >= {"license": "cc-by-4.0", "language": "am"}.items()
    for fact in ("1.50 hours", "3,000", "3.5%", "0.4%", "Alma spoke", "samples/held_out-0-ema.wav"):
        assert fact in text
    assert (hub.folder / "samples" / "held_out-0-ema.wav").read_bytes() == b"RIFF"


LICENCES = {"CPML": "coqui-public-model-license", "bilibili": "bilibili"}


@pytest.mark.parametrize("licence", LICENCES)
def test_a_voice_keeps_the_licence_of_its_base_model(hub, run, licence):
    download = {"repository": "somebody/model"}
    run.record(start_from={"licence": f"{licence}, accepted: see there", "download": download})
    push(run, NAME, license="mit")
    header = header_of(hub.folder)
    assert header["license_name"] == LICENCES[licence]
    assert header["base_model"] == "somebody/model"
    text = (hub.folder / "README.md").read_text(encoding="utf-8")
    assert "mit" not in text.split() and ("coqui" in text) == (licence == "CPML")


def test_a_space_speaks_with_the_voice(hub, run):
    push(run, NAME, space=True, install="git+https://example.org/kit")
    space = hub.folder.with_name("hub-space")
    assert header_of(space)["sdk"] == "gradio"
    app = (space / "app.py").read_text(encoding="utf-8")
    assert f'"hf://{NAME}"' in app and compile(app, "app.py", "exec")
    assert "git+https://example.org/kit" in (space / "requirements.txt").read_text()
    with pytest.raises(KitError, match="install"):
        push(run, NAME, space=True)


def test_the_token_goes_to_the_hub_alone_and_is_needed(hub, run, monkeypatch):
    push(run, NAME)
    with serving(hub.folder, NAME, "main") as other:
        hub.elsewhere = other.address
        voice_folder(f"hf://{NAME}@main")
    assert set(hub.authorised) == {f"Bearer {TOKEN}"}
    assert other.authorised and set(other.authorised) == {None}
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    for ask in (lambda: voice_folder(f"hf://{NAME}@main"), lambda: push(run, NAME)):
        with pytest.raises(KitError, match="HF_TOKEN"):
            ask()


def test_what_is_no_voice_is_said(hub, run, tmp_path):
    (hub.folder / "config.json").write_text("{}")
    with pytest.raises(KitError, match=r"config\.json"):
        voice_folder(f"hf://{NAME}@main")
    with pytest.raises(KitError, match="no exported voice"):
        voice_folder(str(tmp_path))
    with pytest.raises(KitError, match="OWNER/NAME"):
        push(run, "a/b/c")
    (run.folder / "export" / CARD).unlink()
    with pytest.raises(KitError, match="04_inference"):
        push(run, NAME)


def test_a_voice_of_the_hub_speaks_from_the_command_line(hub, run, tmp_path, capsys):
    push(run, NAME)
    out = tmp_path / "said.wav"
    words = ["speak", "--voice", f"hf://{NAME}", "--text", LINES[0], "--out", str(out)]
    assert main(words) == 0
    assert soundfile.info(out).frames > 100 and str(out) in capsys.readouterr().out
    assert main([*words, "--dtype", "int8"]) == 2
    assert main(["speak", "--voice", f"hf://{NAME}"]) == 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine", "releases"]


def test_figures_of_other_weights_are_not_pushed(hub, run):
    (run.folder / "model-ema.safetensors").write_bytes(b"trained further")
    run.record(export={"made_from": made_from(run)})
    run.record(eval={"weights": "ema", "weights_sha256": "0" * 64})
    with pytest.raises(KitError, match="kit evaluate --run mine"):
        push(run, NAME)
    assert not hub.created
