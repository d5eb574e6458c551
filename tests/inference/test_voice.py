"""Text in, waveform out: with the real tokenizer and codec."""

import contextlib
import dataclasses
import io

import pytest
import soundfile
import torch
from helpers import manifest, real_config, real_voice

from kit.base.errors import KitError, SpeechError
from kit.inference.decoder import Decoder
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Habits, Speech, Voice, remark, wav_bytes
from kit.model.gpt import SpeechGPT
from kit.text.normalize import letters, normalize

SHORT = GenerateConfig(temperature=0, exact_codes=9)


def new_model() -> SpeechGPT:
    torch.manual_seed(0)
    return SpeechGPT(real_config())


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


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
        ({"texts": "ሰላም"}, r"must be a list: write \['ሰላም'\]"),
        ({"speakers": ["voice0"] * 2}, "1 texts and 2 speakers: pass one each, or one name"),
        ({"speakers": []}, "1 texts and 0 speakers"),
        ({"batch": 0}, "`batch` is 0"),
    ],
)
def test_what_does_not_go_together_is_reported(voice, asked, wanted):
    with pytest.raises(SpeechError, match=wanted):
        voice.speak(**{"texts": ["ሰላም"], "speakers": "voice0", "config": SHORT} | asked)


def test_the_speech_settings_are_reported(voice):
    make = lambda **how: Speech(text="ሰላም", wave=torch.zeros(9), codes=torch.zeros(9), **how)  # noqa: E731
    config = GenerateConfig(temperature=0.6)
    assert remark(make(stopped=True, temperature=0.6), config) == ""
    assert "at temperature 0.3" in remark(make(stopped=True, temperature=0.3), config)
    assert "was truncated" in remark(make(stopped=False, temperature=0.15), config)
    asked = dataclasses.replace(config, guidance_scale=2.0)
    assert "text_dropout" in remark(make(stopped=True, temperature=0.6), asked)
    guided = make(stopped=True, temperature=0.6, guidance=2.0)
    assert remark(guided, asked) == ""


def test_an_unknown_speaker_names_the_known_ones(voice):
    with pytest.raises(SpeechError, match=r"No voice 'alma'.*voice0.*voice2"):
        voice.speak(["ሰላም"], "alma", SHORT)


@pytest.mark.parametrize("text", ["", "!?…።", "hello", "Привет"])
def test_text_that_cannot_be_spoken_is_reported(voice, text):
    with pytest.raises(SpeechError):
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
    with contextlib.suppress(SpeechError):
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
    with pytest.raises(SpeechError, match="did not find the end"):
        for piece in voice.stream(texts(1)[0], "voice0", STREAMED):
            pieces.append(piece)
    (whole,) = voice.speak(texts(1), "voice0", STREAMED)
    assert not whole.stopped and len(torch.cat(pieces)) == len(whole.wave)


def test_a_voice_in_another_format_leaves_the_first_alone(voice):
    small = voice.in_format("int8")
    assert voice.decoder is None and "int8" in small.decoder.ran
    one, two = (v.speak(texts(2), "voice0", SHORT) for v in (voice, small))
    assert [len(s.codes) for s in one] == [len(s.codes) for s in two]
    with pytest.raises(KitError, match="int8"):
        voice.in_format("int9")


def test_on_a_gpu_it_speaks_in_half_precision_by_graphs(voice, monkeypatch):
    configs = []
    monkeypatch.setattr(
        "kit.inference.voice.Decoder", lambda _model, config: configs.append(config)
    )
    monkeypatch.setattr("kit.inference.voice.default_format", lambda _device: "fp16")
    voice.in_format()
    voice.in_format("int8", compile=True)
    voice.ready()  # of a model that is being trained: its weights change between two calls
    assert [c.weights for c in configs] == ["fp16", "int8", "fp32"]
    assert [c.graphs for c in configs] == [True, True, False]
    assert [c.compile for c in configs] == [False, True, False]


def test_ten_thousand_characters_are_spoken_whole(voice):
    text = (long_text(5) + " ") * 200
    text = text[: text.rindex(" ", 0, 10_000)]
    quick = GenerateConfig(temperature=0, exact_codes=1)
    (speech,) = dataclasses.replace(voice, habits=Habits(longest_text=40)).speak(
        [text], "voice0", quick
    )
    assert letters(normalize(" ".join(speech.parts))) == letters(normalize(text))


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
    with pytest.raises(SpeechError, match=r"did not find the end of 'ሰላም'.*shorter"):
        wav_bytes(cut, 22050)


def test_a_voice_knows_what_it_can_say(voice):
    assert voice.can_speak(texts(1)[0])
    assert not voice.can_speak(f"{texts(1)[0]} Ж") and not voice.can_speak("...")
