"""Text in, waveform out: with the real tokenizer and codec, and a voice folder on disk."""

import dataclasses
import io
import shutil

import pytest
import soundfile
import torch
from helpers import (
    code_cache,
    manifest,
    real_config,
    tiny_model,
    tokenizer,
    trained_codec,
    world,
)

from kit.cache import speaker_references
from kit.codec import CodecError
from kit.generate import GenerateConfig
from kit.model import SpeechGPT
from kit.text import TextError
from kit.voice import (
    Speech,
    Voice,
    VoiceError,
    load_model,
    load_voice,
    save_model,
    save_references,
    wav_bytes,
)

SHORT = GenerateConfig(temperature=0, exact_codes=9)


def new_model() -> SpeechGPT:
    torch.manual_seed(0)
    return SpeechGPT(real_config())


@pytest.fixture(scope="module")
def voice() -> Voice:
    references = speaker_references(code_cache())
    return Voice(
        model=new_model(), codec=trained_codec()[0], tokenizer=tokenizer(), references=references
    )


@pytest.fixture
def folder(tmp_path, voice):
    for name in ("codec.safetensors", "tokenizer.model"):
        shutil.copy(world() / name, tmp_path / name)
    save_model(voice.model, tmp_path / "model-ema.safetensors")
    save_references(voice.references, tmp_path / "references.safetensors")
    return tmp_path


def texts(count: int) -> list[str]:
    return [row.text for row in manifest() if row.split == "train"][:count]


def test_every_text_is_spoken_in_order_whatever_the_batch(voice):
    wanted = voice.speak(texts(7), "voice1", SHORT)
    assert [s.text for s in wanted] == texts(7)
    assert all(len(s.codes) == 9 and torch.isfinite(s.wave).all() for s in wanted)
    again = voice.speak(texts(7), "voice1", SHORT, batch=2)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(wanted, again))


def test_the_wave_is_the_codecs_of_the_codes(voice):
    (speech,) = voice.speak(texts(1), "voice0", SHORT)
    assert torch.equal(speech.wave, voice.codec.decode(speech.codes[None])[0])


def test_each_text_may_have_its_own_speaker(voice):
    names = ["voice0", "voice1", "voice2"]
    together = voice.speak(texts(1) * 3, names, SHORT)
    for name, speech in zip(names, together):
        alone = voice.speak(texts(1), name, SHORT)[0]
        assert torch.equal(speech.codes, alone.codes)
    assert voice.speakers == names


def test_spelling_and_figures_are_normalised_on_the_way(voice):
    raw, spelt = voice.speak(["ሠላም።", "ሰላም."], "voice0", SHORT)
    assert raw.text == "ሠላም።" and torch.equal(raw.codes, spelt.codes)


def test_an_unknown_speaker_names_the_known_ones(voice):
    with pytest.raises(VoiceError, match=r"No voice \['alma'\].*voice0.*voice2"):
        voice.speak(["ሰላም"], "alma", SHORT)


@pytest.mark.parametrize("text", ["", "…", "hello"])
def test_text_that_cannot_be_spoken_is_told(voice, text):
    with pytest.raises(TextError):
        voice.speak([*texts(1), text], "voice0", SHORT)


def test_nothing_asked_nothing_said(voice):
    assert voice.speak([], "voice0", SHORT) == []


def test_speech_without_a_single_code_is_silence(voice):
    silent = dataclasses.replace(voice, model=new_model())
    silent.model.code_head.bias.data[silent.model.config.stop_code] = 1e4
    (speech,) = silent.speak(texts(1), "voice0", GenerateConfig(temperature=0))
    assert speech.stopped and len(speech.codes) == 0
    assert len(speech.wave) and not speech.wave.any()  # players refuse no samples at all


def test_wav_bytes_are_a_16_bit_wav_of_the_same_sound(voice):
    (speech,) = voice.speak(texts(1), "voice0", SHORT)
    speech = dataclasses.replace(speech, stopped=True, wave=speech.wave.clamp(-0.9, 0.9))
    data = io.BytesIO(wav_bytes(speech, voice.codec.sample_rate))
    assert soundfile.info(data).subtype == "PCM_16"
    data.seek(0)
    wave, rate = soundfile.read(data, dtype="float32")
    assert rate == 22050 and (torch.from_numpy(wave) - speech.wave).abs().max() < 1e-4


def test_speech_that_was_cut_is_not_passed_off_as_whole():
    cut = Speech(text="ሰላም", wave=torch.zeros(9), codes=torch.zeros(3), stopped=False)
    with pytest.raises(VoiceError, match=r"did not find the end of 'ሰላም'.*shorter"):
        wav_bytes(cut, 22050)


def test_a_voice_survives_the_disk(voice, folder):
    again = load_voice(folder)
    assert again.speakers == voice.speakers and not again.model.training
    one, two = (v.speak(texts(3), "voice2", SHORT) for v in (voice, again))
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(one, two))


def test_a_model_may_be_stored_in_half_precision(voice, tmp_path):
    save_model(voice.model, tmp_path / "half.safetensors", torch.float16)
    save_model(voice.model, tmp_path / "full.safetensors")
    sizes = [(tmp_path / f"{n}.safetensors").stat().st_size for n in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    again = load_model(tmp_path / "half.safetensors")
    for a, b in zip(again.parameters(), voice.model.parameters()):
        assert a.dtype == torch.float32 and torch.allclose(a, b, atol=1e-3)


FILES = {
    "references.safetensors": VoiceError,
    "model-ema.safetensors": VoiceError,
    "codec.safetensors": CodecError,
    "tokenizer.model": TextError,
}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FILES[name], match=name):
        load_voice(folder)


@pytest.mark.parametrize("name", list(FILES)[1:])
def test_a_damaged_file_is_named(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FILES[name], match=name):
        load_voice(folder)


def test_damaged_references_are_named(folder):
    (folder / "references.safetensors").write_bytes(b"half a file")
    with pytest.raises(VoiceError, match=r"references\.safetensors"):
        load_voice(folder)


def test_a_model_file_of_another_kind_is_named(folder):
    shutil.copy(folder / "codec.safetensors", folder / "model-ema.safetensors")
    with pytest.raises(VoiceError, match=r"model-ema\.safetensors"):
        load_voice(folder)


def test_a_model_file_with_other_weights_is_named(folder):
    path = folder / "model-ema.safetensors"
    path.write_bytes(path.read_bytes().replace(b"final_norm.bias", b"fINAL_norm.bias"))
    with pytest.raises(VoiceError, match=r"model-ema\.safetensors"):
        load_voice(folder)


def test_helpers_models_differ_by_seed():
    a, b = tiny_model(0), tiny_model(1)
    assert not torch.equal(a.code_head.weight, b.code_head.weight)
