"""A voice with an XTTS-v2's sound speaks with it: states and speaker through its vocoder.

And any voice can speak like the speaker of a recording.
"""

import dataclasses

import pytest
import torch
from helpers import manifest, real_voice, tokenizer
from released_sound import spoken
from released_xtts import TINY, random_dvae, random_model, random_sound, settings
from torch import Tensor

from kit.audio.clip import load_wave
from kit.base.errors import SpeechError
from kit.base.tensor_file import contents, file_bytes
from kit.inference.decoder import Decoder
from kit.inference.export import export_voice, load_export
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Voice
from kit.inference.voice_files import load_references, save_references
from kit.releases.xtts_v2.codec import xtts_codec

RATE = 22_050
SHORT = GenerateConfig(temperature=0, exact_codes=9)
LONG = GenerateConfig(temperature=0.7, seed=2, exact_codes=45)


def released_voice(**over) -> Voice:
    """A tiny GPT, a codec that uses its states, two speakers, one with a reference in parts."""
    sizes = {"text_vocab": tokenizer().vocab_size, "max_text": 60, **over}
    model = random_model(dataclasses.replace(TINY, **sizes))
    model.code_head.weight.data *= 10
    codec = xtts_codec(random_sound(), random_dvae(), settings())
    voice = Voice(
        model=model,
        codec=codec,
        tokenizer=tokenizer(),
        references={},
        front_end=codec.reference_mel,
    )
    voice = voice.with_speaker("short", spoken(2 * RATE), RATE)
    return voice.with_speaker("long", spoken(9 * RATE, seed=1), RATE)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return released_voice()


def texts(count: int) -> list[str]:
    return [row.text for row in manifest() if row.split == "train"][:count]


@torch.no_grad()
def states_of(voice: Voice, text: str, speaker: str, codes: Tensor) -> Tensor:
    """The states (N, D) at START and every code but the last, in one pass of the model's layers."""
    decoder = Decoder(voice.model)
    prompt, _ = decoder.prompt([voice.ids(text)], voice.conditioning([speaker], decoder.device))
    said = decoder.embed(codes[:-1], torch.arange(1, len(codes)))
    row = torch.cat((prompt, said[None]), dim=1)
    return voice.model.final_norm(voice.model.gpt(row))[0, -len(codes) :]


@pytest.mark.parametrize("speaker", ["short", "long"])
def test_the_wave_is_made_from_the_states_that_predicted_its_codes(voice, speaker):
    (speech,) = voice.speak(texts(1), speaker, SHORT)
    states = states_of(voice, texts(1)[0], speaker, speech.codes)
    vector = voice.vectors[speaker]
    wanted = voice.codec.decode(speech.codes[None], states=states[None], speaker=vector[None])[0]
    assert speech.wave.shape == wanted.shape == (voice.codec.samples(9),)
    assert (speech.wave - wanted).abs().max() < 1e-4 * wanted.abs().max() + 1e-5
    alone = voice.codec.decode(speech.codes[None])[0]
    assert (speech.wave - alone).abs().max() > 1e-2, "of codes alone it is another"


def test_speakers_sound_otherwise_and_a_batch_is_each_alone(voice):
    names = ["long", "short", "long"]
    together = voice.speak(texts(3), names, SHORT)
    for text, name, speech in zip(texts(3), names, together):
        (alone,) = voice.speak([text], name, SHORT)
        assert torch.equal(alone.codes, speech.codes)
        assert (alone.wave - speech.wave).abs().max() < 1e-4
    swapped = dict(voice.vectors, short=voice.vectors["long"])
    (other,) = dataclasses.replace(voice, vectors=swapped).speak(texts(3)[1:2], "short", SHORT)
    assert (other.wave - together[1].wave).abs().max() > 1e-4


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_pieces_of_a_stream_are_the_whole(voice, weights):
    voice = voice.in_format(weights)
    pieces = []
    with pytest.raises(SpeechError, match="did not find the end"):
        for piece in voice.stream(texts(1)[0], "long", LONG):
            pieces.append(piece)
    (whole,) = voice.speak(texts(1), "long", LONG)
    assert len(pieces) > 2
    joined = torch.cat(pieces)
    assert joined.shape == whole.wave.shape
    assert (joined - whole.wave).abs().max() < 1e-4


def test_the_first_sound_waits_for_no_more_codes_than_the_context(voice):
    """Its own sound needs six codes more, that of codes alone 25."""
    first = next(voice.stream(texts(1)[0], "short", LONG))
    assert len(first) < voice.codec.samples(12)


def test_with_other_states_sound_is_made_from_codes_alone_with_a_warning(voice):
    other = released_voice(width=192, heads=6)
    assert voice.audio_note() == ""
    assert other.audio_note() == (
        "the codec decodes without hidden states, because it was trained on states of width 96 "
        "and this model's have width 192"
    )
    (speech,) = other.speak(texts(1), "long", SHORT)
    assert torch.equal(speech.wave, other.codec.decode(speech.codes[None])[0])


def test_a_reference_in_pieces_is_their_mean(voice):
    pieces = voice.reference_segments("long")
    frames = [len(wave) // 256 + 1 for wave in torch.zeros(9 * RATE).split(4 * RATE)]
    assert [mel.shape[-1] for mel in pieces] == voice.pieces["long"] == frames
    with torch.no_grad():
        each = [voice.model.conditioner(mel[None]) for mel in pieces]
        found = Decoder(voice.model).latents(voice.conditioning(["long"], torch.device("cpu")))
    assert torch.allclose(found, torch.stack(each).mean(0), atol=1e-6)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_an_exported_voice_keeps_pieces_and_speakers(voice, tmp_path, weights):
    # References are kept as half floats.
    halved = {name: mel.half() for name, mel in voice.references.items()}
    voice = dataclasses.replace(voice, references=halved)
    again = load_export(export_voice(voice, tmp_path, weights))
    assert again.pieces == voice.pieces and again.speakers == voice.speakers
    for name, vector in voice.vectors.items():
        assert torch.equal(again.vectors[name], vector)
    for speaker in voice.speakers:
        (before,) = voice.in_format(weights).speak(texts(1), speaker, SHORT)
        (after,) = again.speak(texts(1), speaker, SHORT)
        if weights == "fp32":
            assert torch.equal(after.codes, before.codes)
            assert (after.wave - before.wave).abs().max() < 1e-5
        assert after.wave.shape == before.wave.shape


def test_a_voice_without_a_speakers_vector_is_reported(voice, tmp_path):
    lacking = dataclasses.replace(voice, vectors={"short": voice.vectors["short"]})
    with pytest.raises(SpeechError, match="'long' has no speaker vector"):
        lacking.speak(texts(1), "long", SHORT)
    export_voice(lacking, tmp_path)
    with pytest.raises(SpeechError, match=r"has 0 numbers in .* 'long', .* expects 512"):
        load_export(tmp_path)


# --- the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [[300, 1], [0, 776], []])
def test_pieces_that_are_not_those_of_the_reference_are_refused(voice, tmp_path, frames):
    path = tmp_path / "references.safetensors"
    save_references(voice.references, path, vectors=voice.vectors, pieces=voice.pieces)
    assert load_references(path).pieces == voice.pieces
    tensors, header = contents(path)
    header["pieces"]["long"] = frames
    path.write_bytes(file_bytes(tensors, header))
    with pytest.raises(SpeechError, match=r"(reference of 'long' has \d+ frames|pieces\['long'\])"):
        load_references(path)


# --- anybody's voice --------------------------------------------------------------------------


def test_any_recording_becomes_a_speaker_of_a_voice(tmp_path):
    voice = real_voice()
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


@pytest.mark.parametrize(
    ("wave", "message"),
    [
        (torch.zeros(2 * RATE), "is silent"),
        (spoken(2000), "at least 0.33 s are needed"),
        (spoken(RATE).expand(2, -1), "give one waveform"),
        (spoken(RATE) / 0, "not finite"),
    ],
    ids=["silent", "short", "stereo", "not finite"],
)
def test_a_recording_without_a_voice_in_it_is_reported(voice, wave, message):
    for one in (voice, real_voice()):
        with pytest.raises(SpeechError, match=message):
            one.with_speaker("guest", wave, RATE)


def test_of_a_long_recording_the_beginning_is_used(voice):
    wave = spoken(33 * RATE)
    long = voice.with_speaker("guest", wave, RATE)
    cut = voice.with_speaker("guest", wave[: 30 * RATE], RATE)
    assert long.pieces == cut.pieces and len(long.pieces["guest"]) == 8
    assert torch.equal(long.references["guest"], cut.references["guest"])
    assert torch.equal(long.vectors["guest"], cut.vectors["guest"])
