"""The voice in onnxruntime: what it says is what the kit says, in a process without torch."""

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CODEC, LINES, opinionated_voice

from kit.__main__ import main
from kit.audio.codec import make_codec
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.extras.onnx import speak_onnx
from kit.extras.onnx.export import export_onnx
from kit.inference.export import export_voice
from kit.inference.generate import Noise, candidate_seed
from kit.settings import GenerateConfig

GREEDY = GenerateConfig(temperature=0)
SAMPLED = GenerateConfig(temperature=0.9, top_k=12, top_p=0.8, repetition_penalty=1.3, retries=0)
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = sys.modules["kit"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def made_voice(folder, states=0, **codec):
    """A random voice whose two speakers differ, with a codec of random weights."""
    voice = opinionated_voice(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        voice.model.conditioner.gamma *= 100
        for layer in voice.model.conditioner.layers:
            layer.to_kv.weight *= 20
            layer.to_out.weight *= 20
    codec = make_codec(dataclasses.replace(CODEC, **codec))
    if states:
        codec = codec.with_state_inputs(states)
    for name in ("magnitude_head", "from_state"):
        if getattr(codec, name) is not None:
            torch.nn.init.normal_(getattr(codec, name).weight, std=0.3)
    return dataclasses.replace(voice, codec=codec.eval())


@pytest.fixture(scope="module", params=["griffin-lim", "vocoder with states"])
def voice(request, tmp_path_factory):
    vocoder = {"vocoder_steps": 1, "vocoder_width": 32, "states": 32}
    how = vocoder if request.param.startswith("vocoder") else {}
    return made_voice(tmp_path_factory.mktemp("voice"), **how)


@pytest.fixture(scope="module")
def exported(voice, tmp_path_factory):
    return export_onnx(voice, tmp_path_factory.mktemp("onnx"), sampling=GREEDY)


def spoken(folder, ids, speaker, config):
    """Codes and waveform by onnxruntime."""
    voice = speak_onnx.Voice(folder)
    codes, states = voice.codes(ids, speaker, dataclasses.asdict(config))
    inputs = {"codes": [codes]}
    if voice.card["uses_states"]:
        inputs["states"] = np.stack(states, 1)
    return codes, voice.sound.run(None, inputs)[0][0]


def test_both_say_the_same(voice, exported):
    said = set()
    for text in LINES[:2]:
        for speaker in voice.speakers:
            expected = voice.speak([text], speaker, GREEDY)[0]
            ids = speak_onnx.Voice(exported).ids(text)
            assert ids == voice.ids(text)
            codes, sound = spoken(exported, ids, speaker, GREEDY)
            assert codes == expected.codes.tolist()
            said.add(tuple(codes))
            assert expected.wave.abs().max() > 0.01
            np.testing.assert_allclose(sound, expected.wave, atol=1e-3)
    assert len(said) == 4, "texts and speakers make no difference"


def test_the_same_random_numbers_draw_the_same_codes(voice, exported, monkeypatch):
    expected = voice.speak([LINES[0]], "alma", SAMPLED)[0]
    ids = voice.ids(LINES[0])

    noise = Noise([candidate_seed(SAMPLED, ids, 0)], SAMPLED.top_k)
    steps = (step for _ in itertools.count() for step in noise.draw())

    class Drawn:
        def exponential(self, size):
            return next(steps)[0].numpy()

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Drawn())
    codes, _ = spoken(exported, ids, "alma", SAMPLED)
    assert codes == expected.codes.tolist()


def run_script(folder, *words):
    called = [sys.executable, "-c", WITHOUT_TORCH, str(folder / "speak_onnx.py"), *words]
    return subprocess.run(called, capture_output=True, text=True)


def refusal(folder, text, out) -> str:
    """The script's message, where it refuses to speak `text` into the file `out`."""
    done = run_script(folder, text, "--out", str(out))
    assert done.returncode == 1 and "Traceback" not in done.stderr and not out.exists()
    return done.stderr


def write_sums(folder) -> None:
    sums = [f"{file_digest(folder / name)}  {name}\n" for name in speak_onnx.FILES]
    (folder / speak_onnx.SUMS).write_text("".join(sums))


def test_the_script_speaks_without_torch(voice, exported, tmp_path):
    path, text = tmp_path / "speech.wav", f"{LINES[0]}. {LINES[1]}።"
    done = run_script(exported, text, "--speaker", "brook", "--out", str(path))
    assert done.returncode == 0, done.stderr
    expected = [voice.speak([text], "brook", GREEDY)[0].wave for text in (f"{LINES[0]}.", LINES[1])]
    with wave.open(str(path)) as file:
        assert file.getframerate() == voice.codec.sample_rate
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    first = expected[0].clip(-1, 1)
    np.testing.assert_allclose(samples[: len(first)], first, atol=1e-3)
    assert len(samples) > len(first) + voice.codec.sample_rate // 4


def test_a_long_sentence_is_spoken_in_parts(exported):
    voice = speak_onnx.Voice(exported)
    text = " ".join(LINES * 4)
    parts = list(voice.parts(text))
    assert len(parts) > 1 and max(map(len, parts)) <= voice.card["max_text_ids"]
    assert [i for part in parts for i in part] == voice.ids(text)


def test_a_turkish_capital_is_lowered_as_in_the_kit():
    tokens = SimpleNamespace(encode=list, is_byte=str.isdigit, is_unknown=str.isdigit)
    voice = SimpleNamespace(card={"language": "tr"}, tokens=tokens)
    assert "".join(speak_onnx.Voice.ids(voice, "IŞIK İyi")) == "ışık iyi"


LONG_WORD = "".join(LINES[0].split()) * 9


@pytest.mark.parametrize("text, reported", [("日本", "日"), ("...", "..."), (LONG_WORD, LONG_WORD)])
def test_the_script_says_what_it_cannot_say(exported, text, reported, tmp_path):
    assert reported in refusal(exported, text, tmp_path / "speech.wav")


def test_a_damaged_folder_is_named(exported, tmp_path):
    for name in (*speak_onnx.FILES, speak_onnx.SUMS):
        folder = shutil.copytree(exported, tmp_path / name)
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        assert speak_onnx.SUMS in refusal(folder, LINES[0], tmp_path / "speech.wav"), name
        (folder / name).unlink()
        assert name in refusal(folder, LINES[0], tmp_path / "speech.wav")


def test_what_onnxruntime_refuses_ends_in_a_sentence(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "onnx")
    (folder / "step.onnx").write_bytes(b"no graph")
    write_sums(folder)
    assert "step.onnx" in refusal(folder, LINES[0], tmp_path / "speech.wav")


def test_the_command_writes_beside_the_voice(tmp_path, capsys):
    voice = made_voice(tmp_path)
    export_voice(voice, tmp_path / "voice", "fp32", GREEDY)
    assert main(["onnx", "--voice", str(tmp_path / "voice")]) == 0
    folder = tmp_path / "voice" / "onnx"
    assert str(folder) in capsys.readouterr().out
    expected = voice.speak([LINES[0]], "alma", GREEDY)[0].codes.tolist()
    assert spoken(folder, voice.ids(LINES[0]), "alma", GREEDY)[0] == expected


def test_what_cannot_be_exported_is_named(voice, tmp_path, monkeypatch):
    voice.tokenizer.phonemes = "en-us"
    with pytest.raises(KitError, match="espeak-ng"):
        export_onnx(voice, tmp_path / "onnx")
    voice.tokenizer.phonemes = ""
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(KitError, match="pip install onnx onnxscript onnxruntime"):
        export_onnx(voice, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("sample_rate", [0, -1, 10**9])
def test_a_sample_rate_that_no_voice_has_is_refused(exported, tmp_path, sample_rate):
    folder = shutil.copytree(exported, tmp_path / "onnx")
    card = json.loads((folder / "voice-onnx.json").read_text()) | {"sample_rate": sample_rate}
    (folder / "voice-onnx.json").write_text(json.dumps(card))
    write_sums(folder)
    assert f"sample_rate {sample_rate}," in refusal(folder, LINES[0], tmp_path / "speech.wav")
