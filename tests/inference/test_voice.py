"""Text in, waveform out: with the real tokenizer and codec, and a voice folder on disk."""

import contextlib
import copy
import dataclasses
import io
import json
import shutil

import pytest
import safetensors.torch
import soundfile
import torch
from helpers import (
    leave_voice_files,
    manifest,
    real_config,
    real_voice,
    tiny_model,
    world,
)

from kit.audio.codec import CodecError
from kit.audio.codec_kinds import save_codec
from kit.audio.hearing import RecognizerError
from kit.audio.recognizer_kinds import load_recognizer
from kit.audio.spectrogram import MelConfig
from kit.base.config import ConfigError
from kit.base.files import file_digest
from kit.base.weights_file import contents, file_bytes
from kit.inference.decoder import Decoder
from kit.inference.references import load_references, save_references
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import (
    Habits,
    Speech,
    Voice,
    VoiceError,
    load_voice,
    load_voices,
    remark,
    wav_bytes,
)
from kit.model.gpt import SpeechGPT
from kit.model.weights import load_model, save_model
from kit.text.normalize import TextError, letters, normalize
from kit.text.train_tokenizer import TokenizerConfig, train_tokenizer

SHORT = GenerateConfig(temperature=0, exact_codes=9)


def new_model() -> SpeechGPT:
    torch.manual_seed(0)
    return SpeechGPT(real_config())


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


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


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"texts": "ሰላም"}, r"is a list: write \['ሰላም'\]"),
        ({"speakers": ["voice0"] * 2}, "1 texts and 2 speakers: give one for each, or one name"),
        ({"speakers": []}, "1 texts and 0 speakers"),
        ({"batch": 0}, "`batch` is 0: how many readings at a time"),
    ],
)
def test_what_does_not_go_together_is_told(voice, asked, wanted):
    with pytest.raises(VoiceError, match=wanted):
        voice.speak(**{"texts": ["ሰላም"], "speakers": "voice0", "config": SHORT} | asked)


def test_how_a_speech_came_about_is_told(voice):
    make = lambda **how: Speech(text="ሰላም", wave=torch.zeros(9), codes=torch.zeros(9), **how)  # noqa: E731
    config = GenerateConfig(temperature=0.6)
    assert remark(make(stopped=True, temperature=0.6), config) == ""
    assert "Read again, at temperature 0.3" in remark(make(stopped=True, temperature=0.3), config)
    assert "was cut off" in remark(make(stopped=False, temperature=0.15), config)
    asked = dataclasses.replace(config, guidance=2.0)
    assert "has never learnt to speak without a text" in remark(
        make(stopped=True, temperature=0.6), asked
    )
    guided = make(stopped=True, temperature=0.6, guidance=2.0)
    assert remark(guided, asked) == ""


def test_an_unknown_speaker_names_the_known_ones(voice):
    with pytest.raises(VoiceError, match=r"No voice 'alma'.*voice0.*voice2"):
        voice.speak(["ሰላም"], "alma", SHORT)


@pytest.mark.parametrize("text", ["", "…", "hello"])
def test_text_that_cannot_be_spoken_is_told(voice, text):
    with pytest.raises(TextError):
        voice.speak([*texts(1), text], "voice0", SHORT)


def long_text(sentences: int = 3) -> str:
    return "። ".join(texts(sentences)) + "።"


def test_a_long_text_is_said_in_parts_of_the_length_it_was_trained_on(voice):
    (whole,) = voice.speak([long_text()], "voice0", SHORT)
    assert [part.rstrip("።") for part in whole.parts] == texts(3)
    alone = voice.speak(list(whole.parts), "voice0", SHORT)
    assert torch.equal(whole.codes, torch.cat([s.codes for s in alone]))
    pauses = 2 * round(0.30 * voice.codec.sample_rate)
    assert len(whole.wave) == sum(len(s.wave) for s in alone) + pauses
    short = dataclasses.replace(voice, habits=Habits(longest_text=6))
    parts = short.parts(long_text())
    assert len(parts) > 3 and all(len(short.ids(p.text)) <= 6 for p in parts)


def test_one_part_that_was_cut_makes_the_whole_cut(voice):
    config = GenerateConfig(temperature=0, max_codes_per_text_id=0.1)
    endless = dataclasses.replace(voice, model=new_model())
    endless.model.code_head.bias.data[endless.model.config.stop_code] = -1e4
    (speech,) = endless.speak([long_text(2)], "voice0", config)
    assert not speech.stopped and len(speech.parts) == 2


def test_a_reading_much_slower_than_the_recordings_is_cut(voice):
    slow = dataclasses.replace(voice, model=new_model(), habits=Habits(pace=2.0))
    slow.model.code_head.bias.data[slow.model.config.stop_code] = -1e4
    text = texts(1)[0]
    for config in (GenerateConfig(temperature=0), GenerateConfig(retries=1)):
        (speech,) = slow.speak([text], "voice0", config)
        assert not speech.stopped and len(speech.codes) == 3 * len(voice.ids(text)) + 40
    strict = GenerateConfig(temperature=0, max_codes_per_text_id=1.0)
    assert len(slow.speak([text], "voice0", strict)[0].codes) == len(voice.ids(text)) + 40


def collected(stream) -> list[torch.Tensor]:
    """The pieces; an exact number of codes never ends by STOP, which the stream tells."""
    pieces = []
    with contextlib.suppress(VoiceError):
        for piece in stream:
            pieces.append(piece)
    return pieces


STREAMED = GenerateConfig(temperature=0.7, seed=2, exact_codes=90)


@pytest.mark.parametrize("count", [1, 2])
def test_pieces_of_a_stream_are_the_whole(voice, count):
    text = long_text(count)
    pieces = collected(voice.stream(text, "voice1", STREAMED))
    (whole,) = voice.speak([text], "voice1", STREAMED)
    assert len(pieces) > count and len(pieces[0]) < len(whole.wave)
    assert (torch.cat(pieces) - whole.wave).abs().max() < 1e-4


def test_a_stream_begins_before_the_codes_are_all_made(voice, monkeypatch):
    steps, real = [], Decoder.decode_one
    count = lambda self, *args: steps.append(1) or real(self, *args)  # noqa: E731
    monkeypatch.setattr(Decoder, "decode_one", count)
    long = dataclasses.replace(STREAMED, exact_codes=200)
    assert len(next(voice.stream(texts(1)[0], "voice0", long))) and len(steps) < 150


def test_a_stream_that_was_cut_says_so_after_its_sound(voice):
    pieces = []
    with pytest.raises(VoiceError, match="did not find the end"):
        for piece in voice.stream(texts(1)[0], "voice0", STREAMED):
            pieces.append(piece)
    (whole,) = voice.speak(texts(1), "voice0", STREAMED)
    assert not whole.stopped and len(torch.cat(pieces)) == len(whole.wave)


def test_a_voice_in_another_format_leaves_the_first_alone(voice):
    small = voice.using("int8")
    assert voice.decoder is None and "int8" in small.decoder.ran
    one, two = (v.speak(texts(2), "voice0", SHORT) for v in (voice, small))
    assert [len(s.codes) for s in one] == [len(s.codes) for s in two]
    with pytest.raises(ConfigError, match="int8"):
        voice.using("int9")


@pytest.mark.parametrize("text", ["!?…።", "🙂🙂", "ሰላም hello", "Привет"])
def test_what_has_no_letters_of_the_voice_is_told(voice, text):
    with pytest.raises(TextError):
        voice.speak([text], "voice0", SHORT)


def test_ten_thousand_characters_are_spoken_whole(voice):
    text = (long_text(5) + " ") * 200
    text = text[: text.rindex(" ", 0, 10_000)]
    quick = GenerateConfig(temperature=0, exact_codes=1)
    (speech,) = dataclasses.replace(voice, habits=Habits(longest_text=40)).speak(
        [text], "voice0", quick
    )
    assert letters(normalize(" ".join(speech.parts))) == letters(normalize(text))


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


def test_a_run_without_an_average_has_one_voice(folder):
    (folder / "model-ema.safetensors").rename(folder / "model-raw.safetensors")
    assert list(load_voices(folder)) == ["raw"]
    with pytest.raises(VoiceError, match=r"no average \(`ema` was off\).*03_evaluate_ema"):
        load_voice(folder)
    shutil.copy(folder / "model-raw.safetensors", folder / "model-ema.safetensors")
    assert list(load_voices(folder)) == ["raw", "ema"]


def test_weights_that_training_has_not_left_yet_are_named(folder):
    with pytest.raises(VoiceError, match=r"model-raw\.safetensors.*02_train"):
        load_voices(folder)


def test_a_voice_knows_what_it_can_say(voice):
    assert voice.can_say(texts(1)[0])
    assert not voice.can_say(f"{texts(1)[0]} Ж") and not voice.can_say("...")


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


@pytest.mark.parametrize(
    "name", ["model-ema.safetensors", "codec.safetensors", "references.safetensors"]
)
def test_a_flipped_bit_is_noticed(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises((VoiceError, CodecError), match=rf"{name}.*checksum is another"):
        load_voice(folder)


def test_a_model_saved_without_a_checksum_is_read(folder):
    path = folder / "model-ema.safetensors"
    mapped, header = contents(path)
    weights = {name: tensor.clone() for name, tensor in mapped.items()}  # the file is written anew
    safetensors.torch.save_file(weights, path, {"header": json.dumps(header)})
    again = load_voice(folder).model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_a_file_of_another_version_is_not_called_damaged(folder):
    path = folder / "model-ema.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(2)}, path, {"config": "{}"})
    with pytest.raises(VoiceError, match=r"kit: move it away, then run notebook 02_train\.$"):
        load_voice(folder)


def test_an_exported_voice_is_told_from_a_run(folder):
    (folder / "voice.json").write_text("{}")
    with pytest.raises(VoiceError, match=r"exported voice: .*\.load_export reads it"):
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


OTHER = {
    "text_vocab": r"tokenizer\.model has \d+ text ids, .*model-ema\.safetensors goes with 300",
    "code_vocab": r"codec\.safetensors has 62 codes.*model-ema\.safetensors goes with 300",
    "n_mels": r"references\.safetensors has 80 mels of .*model-ema\.safetensors goes with 300",
}


@pytest.mark.parametrize("size", OTHER)
def test_parts_of_different_runs_are_told_apart(folder, size):
    save_model(
        SpeechGPT(dataclasses.replace(real_config(), **{size: 300})),
        folder / "model-ema.safetensors",
    )
    with pytest.raises(VoiceError, match=OTHER[size] + ".*different runs"):
        load_voice(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "codec.safetensors"])
def test_parts_of_the_same_size_are_told_apart_too(folder, voice, name):
    noted = {part: file_digest(folder / part) for part in ("tokenizer.model", "codec.safetensors")}
    save_model(voice.model, folder / "model-ema.safetensors", trained_with=noted)
    load_voice(folder)
    if name == "tokenizer.model":
        lines = [row.text for row in manifest()]  # held-out ones, too: another order of pieces
        train_tokenizer(lines, folder / name, TokenizerConfig(vocab_size=410))
    else:
        other = copy.deepcopy(voice.codec)
        other.mel_head.bias.data += 0.1
        save_codec(other, folder / name)
    told = rf"{name} is not the one that .*model-ema\.safetensors was trained with.*01_data_prep"
    with pytest.raises(VoiceError, match=told):
        load_voice(folder)


@pytest.mark.parametrize("name", ["model-ema", "references", "recognizer"])
def test_a_part_that_is_not_finite_is_refused(folder, voice, name):
    """As an earlier version, which did not look, may have written it."""
    leave_voice_files(folder, voice)
    path = folder / f"{name}.safetensors"
    tensors, header = contents(path)
    first = next(key for key, values in tensors.items() if values.is_floating_point())
    tensors[first] = tensors[first].clone().fill_(float("nan"))
    path.write_bytes(file_bytes(tensors, header))
    with pytest.raises((VoiceError, RecognizerError), match=rf"{name}\.safetensors.* not finite"):
        load_recognizer(path) if name == "recognizer" else load_voice(folder)


@pytest.mark.parametrize(
    ("mels", "wanted"),
    [
        ({"a": torch.randn(40, 20)}, r"has 40 mels of 'a', .*goes with 80"),
        ({"a": torch.randn(80, 20), "b": torch.randn(80, 12)}, r"12 frames of 'b', .*with 20"),
        ({"a": torch.randn(80)}, r"has 0 mels of 'a'"),
        ({}, "holds no speaker"),
    ],
)
def test_references_of_another_shape_are_told(folder, mels, wanted):
    save_references(mels, folder / "references.safetensors")
    with pytest.raises(VoiceError, match=rf"references\.safetensors.*{wanted}"):
        load_voice(folder)


def test_references_say_what_made_them(folder):
    path = folder / "references.safetensors"
    mels = {"a": torch.randn(80, 20)}
    save_references(mels, path, front_end=MelConfig(hop_length=128))
    assert load_voice(folder).front_end.config == MelConfig(hop_length=128)
    tensors, header = contents(path)
    del header["front_end"]  # as earlier versions wrote it
    path.write_bytes(file_bytes(tensors, header))
    assert load_voice(folder).front_end.config == MelConfig()


def test_a_model_file_that_asks_for_more_than_it_holds_is_refused(folder):
    path = folder / "model-ema.safetensors"
    weights, header = contents(path)
    header["config"] |= {"layers": 90, "width": 65_536}  # 5 trillion weights, were they made
    path.write_bytes(file_bytes(weights, header))
    with pytest.raises(VoiceError, match=r"model-ema\.safetensors.*its header means"):
        load_voice(folder)
    header["config"] |= {"layers": 10**8}
    path.write_bytes(file_bytes(weights, header))
    with pytest.raises(VoiceError, match=r"GPTConfig\.layers = 100000000: must lie in"):
        load_voice(folder)


@pytest.mark.parametrize("over", [{"blocks": 10**8}, {"griffin_lim_iters": 10**9}, {"width": 9**9}])
def test_a_codec_that_asks_for_too_much_is_refused(folder, over):
    path = folder / "codec.safetensors"
    weights, header = contents(path)
    header["config"] |= over
    path.write_bytes(file_bytes(weights, header))
    with pytest.raises(CodecError, match=rf"CodecConfig\.{next(iter(over))} = \d+: must lie in"):
        load_voice(folder)


def test_helpers_models_differ_by_seed():
    a, b = tiny_model(0), tiny_model(1)
    assert not torch.equal(a.code_head.weight, b.code_head.weight)


def test_a_speaker_with_the_name_that_files_keep_for_themselves_is_refused(tmp_path):
    with pytest.raises(VoiceError, match="No speaker can be called `__metadata__`"):
        save_references({"__metadata__": torch.randn(80, 12)}, tmp_path / "r.safetensors")
    save_references({"a/ሰላም \u200c|": torch.randn(80, 12)}, tmp_path / "r.safetensors")
    assert list(load_references(tmp_path / "r.safetensors").mels) == ["a/ሰላም \u200c|"]
