"""Text in, waveform out: with the real tokenizer and codec, and with an XTTS-v2's sound."""

import contextlib
import dataclasses
import io
from unittest.mock import patch

import pytest
import soundfile
import torch
from helpers import manifest, real_config, real_voice, tokenizer
from released_sound import spoken
from released_xtts import TINY, random_dvae, random_model, random_sound, settings
from torch import Tensor

from kit.audio.clip import load_wave
from kit.base.errors import SpeechError
from kit.extras.xtts_v2.codec import xtts_codec
from kit.inference.decoder import Decoder
from kit.inference.export import export_voice, load_export
from kit.inference.voice import Habits, Voice, wav_bytes
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig

GREEDY = GenerateConfig(temperature=0)
SHORT = GenerateConfig(temperature=0, exact_codes=9)


def biased(voice: Voice, bias: float, **over) -> Voice:
    """`voice` with a new model that is likelier or less likely to end."""
    torch.manual_seed(0)
    model = SpeechGPT(real_config())
    model.code_head.bias.data[model.config.stop_code] = bias
    return dataclasses.replace(voice, model=model, **over)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


def texts(count: int) -> list[str]:
    return [row.text for row in manifest() if row.split == "train"][:count]


def test_every_text_is_spoken_in_order_whatever_the_batch(voice):
    expected = voice.speak(texts(7), "voice1", SHORT)
    assert [(s.text, len(s.codes)) for s in expected] == [(text, 9) for text in texts(7)]
    assert all(torch.equal(s.wave, voice.codec.decode(s.codes[None])[0]) for s in expected)
    again = voice.speak(texts(7), "voice1", SHORT, batch=2)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(expected, again))


def test_spelling_and_figures_are_normalised_on_the_way(voice):
    raw, spelt = voice.speak(["ሠላም።", "ሰላም."], "voice0", SHORT)
    assert raw.text == "ሠላም።" and torch.equal(raw.codes, spelt.codes)


WRONG = [("texts", "ሰላም", r"\['ሰላም'\]"), ("speakers", ["voice0"] * 2, "1 texts and 2 speakers")]
WRONG += [("speakers", "alma", "'alma'.*voice0.*voice2"), ("texts", [""], "")]
WRONG += [("texts", ["ሰላም", "!?…።"], ""), ("texts", ["hello"], "")]


@pytest.mark.parametrize(("name", "value", "fault"), WRONG)
def test_wrong_texts_and_speakers_are_refused(voice, name, value, fault):
    with pytest.raises(SpeechError, match=fault):
        voice.speak(**{"texts": ["ሰላም"], "speakers": "voice0", "config": SHORT} | {name: value})


def long_text(sentences: int = 3) -> str:
    return "። ".join(texts(sentences)) + "።"


def test_a_long_text_is_split_into_parts_of_the_length_of_the_recordings(voice):
    (whole,) = voice.speak([long_text()], "voice0", SHORT)
    assert [part.rstrip("።") for part in whole.parts] == texts(3)
    alone = voice.speak(list(whole.parts), "voice0", SHORT)
    assert torch.equal(whole.codes, torch.cat([s.codes for s in alone]))
    pauses = 2 * round(0.30 * voice.codec.sample_rate)
    assert len(whole.wave) == sum(len(s.wave) for s in alone) + pauses
    short = dataclasses.replace(voice, habits=Habits(longest_text=6))
    parts = short.parts(long_text())
    assert len(parts) > 3 and all(len(short.ids(p.text)) <= 6 for p in parts)


def test_speech_much_slower_than_the_recordings_is_truncated(voice):
    slow = biased(voice, -1e4, habits=Habits(pace=2.0))
    text = texts(1)[0]
    strict = GenerateConfig(temperature=0, max_codes_per_text_id=1.0)
    for config, rate in ((GREEDY, 3), (strict, 1)):
        (speech,) = slow.speak([text], "voice0", config)
        assert not speech.stopped and len(speech.codes) == rate * len(voice.ids(text)) + 40


def collected(stream) -> list[torch.Tensor]:
    """The pieces; an exact number of codes never ends by STOP, which the stream tells."""
    pieces = []
    with contextlib.suppress(SpeechError):
        pieces.extend(stream)
    return pieces


STREAMED = GenerateConfig(temperature=0.7, seed=2, exact_codes=90)


@pytest.mark.parametrize("count", [1, 2])
def test_chunks_of_a_stream_join_to_the_whole(voice, count):
    text = long_text(count)
    pieces = collected(voice.stream(text, "voice1", STREAMED))
    (whole,) = voice.speak([text], "voice1", STREAMED)
    assert len(pieces) > count and len(pieces[0]) < len(whole.wave)
    torch.testing.assert_close(torch.cat(pieces), whole.wave, rtol=0, atol=1e-4)


def test_a_stream_begins_at_once_and_reports_an_end_not_found(voice):
    stream = voice.stream(texts(1)[0], "voice0", dataclasses.replace(STREAMED, exact_codes=200))
    with patch.object(Decoder, "advance", autospec=True, side_effect=Decoder.advance) as step:
        assert len(next(stream)) and step.call_count < 150
    with pytest.raises(SpeechError, match="did not find the end"):
        list(stream)


def test_a_voice_in_another_format_leaves_the_first_alone(voice):
    small = voice.in_format("int8")
    assert voice.decoder is None and "int8" in small.decoder.ran
    one, two = (v.speak(texts(2), "voice0", SHORT) for v in (voice, small))
    assert [len(s.codes) for s in one] == [len(s.codes) for s in two]


def test_speech_without_a_single_code_is_silence(voice):
    (speech,) = biased(voice, 1e4).speak(texts(1), "voice0", GREEDY)
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
    with pytest.raises(SpeechError, match=speech.text):
        wav_bytes(dataclasses.replace(speech, stopped=False), 22050)


RATE = 22_050  # of an XTTS-v2's sound, made from states and speaker
LONG = GenerateConfig(temperature=0.7, seed=2, exact_codes=45)


def released_voice(**over) -> Voice:
    """A tiny GPT, a codec that uses its states, two speakers, one with a reference in parts."""
    sizes = {"text_vocab": tokenizer().vocab_size, "max_text": 60, **over}
    model = random_model(dataclasses.replace(TINY, **sizes))
    model.code_head.weight.data *= 10
    codec = xtts_codec(random_sound(), random_dvae(), settings())
    parts = {"model": model, "codec": codec, "tokenizer": tokenizer()}
    voice = Voice(**parts, references={}, front_end=codec.reference_mel)
    voice = voice.with_speaker("short", spoken(2 * RATE), RATE)
    return voice.with_speaker("long", spoken(9 * RATE, seed=1), RATE)


@pytest.fixture(scope="module")
def released() -> Voice:
    return released_voice()


@torch.no_grad()
def states_of(voice: Voice, text: str, speaker: str, codes: Tensor) -> Tensor:
    """The states (N, D) at START and every code but the last, in one pass of the model's layers."""
    decoder = Decoder(voice.model)
    prompt, _ = decoder.prompt([voice.ids(text)], voice.conditioning([speaker], decoder.device))
    embedded = decoder.embed(codes[:-1], torch.arange(1, len(codes)))
    row = torch.cat((prompt, embedded[None]), dim=1)
    return voice.model.final_norm(voice.model.gpt(row))[0, -len(codes) :]


@pytest.mark.parametrize("speaker", ["short", "long"])
def test_the_wave_is_made_from_the_states_that_predicted_its_codes(released, speaker):
    (speech,) = released.speak(texts(1), speaker, SHORT)
    states = states_of(released, texts(1)[0], speaker, speech.codes)
    how = {"states": states[None], "speaker": released.vectors[speaker][None]}
    expected = released.codec.decode(speech.codes[None], **how)[0]
    assert speech.wave.shape == expected.shape == (released.codec.samples(9),)
    assert (speech.wave - expected).abs().max() < 1e-4 * expected.abs().max() + 1e-5
    alone = released.codec.decode(speech.codes[None])[0]
    assert (speech.wave - alone).abs().max() > 1e-2, "of codes alone it is another"


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_chunks_made_from_states_join_to_the_whole(released, weights):
    spoken_with = released.in_format(weights)
    pieces = collected(spoken_with.stream(texts(1)[0], "long", LONG))
    (whole,) = spoken_with.speak(texts(1), "long", LONG)
    assert len(pieces) > 2
    torch.testing.assert_close(torch.cat(pieces), whole.wave, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_an_exported_voice_keeps_pieces_and_speakers(released, tmp_path, weights):
    # References are kept as half floats.
    halved = {name: mel.half() for name, mel in released.references.items()}
    released = dataclasses.replace(released, references=halved)
    again = load_export(export_voice(released, tmp_path, weights))
    assert again.pieces == released.pieces and again.speakers == released.speakers
    for speaker in released.speakers:
        assert torch.equal(again.vectors[speaker], released.vectors[speaker])
        (before,) = released.in_format(weights).speak(texts(1), speaker, SHORT)
        (after,) = again.speak(texts(1), speaker, SHORT)
        if weights == "fp32":
            assert torch.equal(after.codes, before.codes)
            assert (after.wave - before.wave).abs().max() < 1e-5
        assert after.wave.shape == before.wave.shape


def test_any_recording_becomes_a_speaker_of_a_voice(voice, tmp_path):
    row = next(row for row in manifest() if row.split == "held_out")
    wave = load_wave(row.audio, 48_000)
    more = voice.with_speaker("guest", wave, 48_000)
    assert more.speakers == ["guest", *voice.speakers] and "guest" not in voice.references
    assert more.references["guest"].shape == voice.references["voice0"].shape
    assert more.vectors == more.pieces == {}
    together = more.speak(texts(2), ["guest", "voice0"], SHORT)
    (before,) = voice.speak(texts(2)[1:], "voice0", SHORT)
    assert torch.equal(together[1].codes, before.codes)
    (whole,) = more.speak(texts(1), "guest", SHORT)
    assert torch.equal(whole.wave, more.codec.decode(whole.codes[None])[0])
    assert load_export(export_voice(more, tmp_path)).speakers == more.speakers
    with pytest.raises(SpeechError, match="is silent"):
        voice.with_speaker("guest", torch.zeros(48_000), 48_000)


def test_the_first_sound_waits_for_no_more_codes_than_the_context(released):
    """Its own sound needs six codes more, that of codes alone 25."""
    first = next(released.stream(texts(1)[0], "short", LONG))
    assert len(first) < released.codec.samples(12)


def test_with_other_states_sound_is_made_from_codes_alone_with_a_warning(released):
    other = released_voice(width=192, heads=6)
    assert released.audio_note() == ""
    assert "width 96" in other.audio_note() and "width 192" in other.audio_note()
    (speech,) = other.speak(texts(1), "long", SHORT)
    assert torch.equal(speech.wave, other.codec.decode(speech.codes[None])[0])
