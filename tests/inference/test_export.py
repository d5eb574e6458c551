"""An exported voice speaks as it did, and the damaged file of an incomplete folder is named."""

import copy
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import soundfile
import torch
from helpers import LINES, opinionated_voice
from torch import nn

import kit
from kit.base.errors import SpeechError
from kit.inference import export
from kit.inference.decoder import Decoder
from kit.inference.export import CARD, FILES, SCALE, export_voice, load_export, read_card, unpacked
from kit.inference.generate import generate
from kit.inference.linear_formats import int8
from kit.inference.voice import Voice
from kit.settings import GenerateConfig

ROOT = Path(__file__).resolve().parents[2]
GREEDY = GenerateConfig(temperature=0, max_codes_per_text_id=100)
OWN = GenerateConfig(temperature=0.4, top_k=7, seed=5)


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> Voice:
    return opinionated_voice(tmp_path_factory.mktemp("voice"))


@pytest.fixture
def folder(voice, tmp_path):
    return export_voice(voice, tmp_path / "voice", "fp32", OWN)


def codes(voice: Voice, decoder: Decoder) -> list[list[int]]:
    ids = [voice.ids(line) for line in LINES]
    cond = torch.stack([voice.reference("brook")] * len(ids))
    spoken = generate(decoder, ids, cond, GREEDY)
    assert len({tuple(row.codes.tolist()) for row in spoken}) > 1
    return [row.codes.tolist() for row in spoken]


def refused(folder, message: str) -> None:
    with pytest.raises(SpeechError, match=message):
        load_export(folder)


def test_fp32_is_the_same_voice_to_the_bit(voice, folder):
    again = load_export(folder)
    weights = again.model.state_dict()
    assert all(torch.equal(weights[n], w) for n, w in voice.model.state_dict().items())
    assert not again.model.training
    assert (again.speakers, again.language, again.habits) == (voice.speakers, "am", voice.habits)
    for one, two in zip(*(v.speak(LINES, "alma", OWN) for v in (voice, again))):
        assert torch.equal(one.codes, two.codes) and torch.equal(one.wave, two.wave)


def test_a_voice_whose_texts_were_not_respelt_reads_letters_as_they_are(voice, tmp_path):
    assert voice.ids("ሰላም") == voice.ids("ሠላም")
    as_written = dataclasses.replace(voice, habits=dataclasses.replace(voice.habits, respell=False))
    again = load_export(export_voice(as_written, tmp_path / "voice", "fp32"))
    assert again.habits == as_written.habits
    with pytest.raises(SpeechError, match="had no ሠ"):
        again.ids("ሠላም")


def test_an_exported_voice_of_phonemes_gets_phonemes(tmp_path):
    made = opinionated_voice(tmp_path, phonemes="am")
    again = load_export(export_voice(made, tmp_path / "export", "fp32"))
    ids = again.ids("ሰላም ለሁሉም")
    assert again.tokenizer.phonemes == "am" and ids == made.ids("ሰላም ለሁሉም")
    assert again.tokenizer.decode(ids) == "sˈəlam lˈəhulum"


def test_the_card_describes_the_folder(voice, folder):
    card = read_card(folder)
    assert card.settings == OWN
    assert card.model == voice.model.config
    assert (card.sample_rate, card.speakers, card.weights) == (22050, ("alma", "brook"), "fp32")
    assert card.versions == {"torch": torch.__version__, "kit": kit.__version__}
    assert {p.name for p in folder.iterdir()} == {*FILES, CARD, "README.md"}
    sizes = {name: recorded["bytes"] for name, recorded in card.files.items()}
    assert sizes == {name: (folder / name).stat().st_size for name in FILES}


@pytest.mark.long
def test_the_code_of_the_readme_speaks_with_few_dependencies(voice, folder):
    lines = re.findall(r"^    (.*)$", (folder / "README.md").read_text(), re.M)
    needless = "torchaudio", "soundfile", "yaml", "orjson", "psutil", "matplotlib", "ipywidgets"
    code = [f"import sys; sys.modules |= dict.fromkeys({needless})", *lines]
    code = "\n".join(code).replace('"..."', repr(LINES[0])).replace("path/to/this/folder", ".")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-c", code]
    subprocess.run(call, cwd=folder, env=environment, timeout=600, check=True)
    wave, rate = soundfile.read(folder / "speech.wav", dtype="float32")
    assert rate == voice.codec.sample_rate
    spoken = voice.speak(LINES[:1], "alma", OWN)[0].wave.numpy()
    assert len(wave) == len(spoken) and abs(wave - spoken).max() < 1e-4


def test_the_code_of_the_docs_speaks(voice, folder, monkeypatch, capsys):
    guide = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    code = guide.split("## The voice in a program")[1].split("```python\n")[1].split("```")[0]
    code = code.replace("The text to say.", LINES[0]).replace("runs/mine/export", ".")
    monkeypatch.chdir(folder)
    exec(code, {})
    wave, _ = soundfile.read("speech.wav", dtype="float32")
    pieces = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert sum(pieces) == len(wave) > 0


@pytest.mark.parametrize(("weights", "dtype"), [("fp16", torch.half), ("bf16", torch.bfloat16)])
def test_half_precision_is_the_rounded_model(voice, tmp_path, weights, dtype):
    folders = [export_voice(voice, tmp_path / name, name) for name in (weights, "fp32")]
    half, full = (read_card(each).files["model.safetensors"]["bytes"] for each in folders)
    assert half < 0.6 * full
    loaded = load_export(folders[0]).model.state_dict()
    for name, weight in voice.model.state_dict().items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], weight.to(dtype).float())


def test_int8_speaks_as_the_model_it_was_made_from(voice, tmp_path):
    again = load_export(export_voice(voice, tmp_path / "int8", "int8"))
    original = copy.deepcopy(voice.model)  # the rest of it is stored as fp16
    linears = {n for n, m in original.named_modules() if isinstance(m, nn.Linear)}
    for name, weight in original.named_parameters():
        owner, _, kind = name.rpartition(".")
        if kind == "bias" or owner not in linears or name.startswith("conditioner."):
            weight.data = weight.data.half().float()
        else:
            actual = int8(again.model.get_parameter(name))
            assert all(torch.equal(a, b) for a, b in zip(actual, int8(weight)))
    expected = codes(voice, Decoder(original, weights="int8"))
    assert codes(again, Decoder(again.model, weights="int8")) == expected
    assert codes(again, again.decoder) == expected  # the decoder it speaks through by default


def test_an_interrupted_export_keeps_the_older_one(voice, tmp_path, monkeypatch):
    before = {p.name: p.read_bytes() for p in export_voice(voice, tmp_path, "fp16").iterdir()}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(export, "describe", Mock(side_effect=KeyboardInterrupt))
        export_voice(voice, tmp_path, "fp32")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def export_killed(folder: str, moved: int) -> None:
    """The body of a process: the export in `folder` made again, killed with `moved` files moved."""
    left, real = [moved], os.replace

    def replace(source, target):
        if ".new" in str(source) and ".new" not in str(target):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        real(source, target)

    os.replace = replace
    export_voice(load_export(folder), folder, "fp32")


@pytest.mark.parametrize("moved", [0, 3])
@pytest.mark.long
def test_an_export_killed_while_files_are_exchanged_is_no_export(voice, processes, tmp_path, moved):
    export_voice(voice, tmp_path, "fp16")
    child = processes.Process(target=export_killed, args=(str(tmp_path), moved))
    child.start()
    child.join(600)
    assert child.exitcode == -9
    refused(tmp_path, "no exported voice, or its export was interrupted")
    assert load_export(export_voice(voice, tmp_path, "fp32")).speakers == voice.speakers
    assert {p.name for p in tmp_path.iterdir()} == {*FILES, CARD, "README.md"}


@pytest.mark.filterwarnings("ignore:There is no kit/text/languages/za")
def test_code_that_came_with_a_voice_is_not_run(voice, tmp_path, monkeypatch):
    folder = export_voice(dataclasses.replace(voice, language="za"), tmp_path / "voice")
    evil = "import pathlib\npathlib.Path(__file__).with_name('run').touch()\nnormalize = str.upper"
    for place in (folder, tmp_path):
        for code in (place / "za.py", place / "kit" / "text" / "languages" / "za.py"):
            code.parent.mkdir(parents=True, exist_ok=True)
            code.write_text(evil)
        monkeypatch.chdir(place)
        monkeypatch.syspath_prepend(str(place))
        again = load_export(folder)
        assert again.speak(LINES[:1], "alma", OWN)[0].parts == (LINES[0],)
        assert again.ids(LINES[0]) == voice.ids(LINES[0])
    assert not list(tmp_path.rglob("run")) and "za" not in sys.modules


def test_a_card_may_name_its_language_and_the_owners_readme_is_kept(voice, folder):
    (folder / "README.md").write_text("Free for all.")
    export_voice(dataclasses.replace(voice, language="Amharic"), folder, "int8")
    assert load_export(folder).language == "am"
    assert (folder / "README.md").read_text() == "Free for all."


@pytest.mark.parametrize(("value", "weights"), [(float("nan"), "int8"), (1e6, "fp16")])
def test_weights_that_overflow_are_refused_and_the_older_export_is_kept(
    voice, folder, value, weights
):
    damaged = dataclasses.replace(voice, model=copy.deepcopy(voice.model))
    damaged.model.gpt.h[1].mlp.c_fc.weight.data[3, 3] = value
    with pytest.raises(SpeechError, match=rf"c_fc.* is not finite in {weights}: export as fp32"):
        export_voice(damaged, folder, weights)
    assert load_export(folder).speakers == voice.speakers


def test_what_is_no_export_and_an_unknown_format_are_named(voice, tmp_path):
    (tmp_path / "voice").write_text("")
    with pytest.raises(SpeechError, match=r"'in8'.*int8"):
        export_voice(voice, tmp_path, "in8")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "voice"):
        refused(path, "is no exported voice")


@pytest.mark.parametrize("name", [*FILES, CARD])
def test_a_file_that_is_missing_or_cut_or_has_a_flipped_bit_is_named(folder, name):
    whole = (folder / name).read_bytes()
    flipped = whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]
    for data in (b"", whole[: len(whole) // 2], flipped):
        (folder / name).write_bytes(data)
        refused(folder, f"{re.escape(name)} is (truncated|damaged)")
    (folder / name).unlink()
    refused(folder, f"{re.escape(name)}.*export the voice again")


FOREIGN = ["", "[]", '{"model_type": "gpt2"}', "[" * 100_000, '{"format_version": 2}', "\udcff"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_card_of_another_kind_is_named(folder, text):
    (folder / CARD).write_bytes(text.encode(errors="surrogateescape"))
    refused(folder, f"{CARD} is damaged or of another kind")


@pytest.mark.parametrize("size", [1e-12, 1e-7, 1.0, 1e4])
def test_quantising_again_gives_the_same_int8_weights(size):
    rounded, scale = int8(torch.randn(20_000, 5) * size * torch.rand(20_000, 1))
    again = int8(unpacked({"w": rounded, "w" + SCALE: scale})["w"])
    assert torch.equal(again[0], rounded) and torch.equal(again[1], scale)
