"""A voice's files in a run's folder: read, damaged, or of different runs."""

import copy
import dataclasses
import shutil

import pytest
import torch
from helpers import leave_voice_files, manifest, real_config, real_voice, world

from kit.audio.codec import save_codec
from kit.audio.recognizer import load_recognizer
from kit.base.errors import KitError, SpeechError
from kit.base.files import file_digest
from kit.base.tensor_file import contents, file_bytes
from kit.inference.voice import Voice
from kit.inference.voice_files import load_voice, load_voices, save_references
from kit.model.gpt import SpeechGPT
from kit.model.weights import save_model
from kit.settings import GenerateConfig, MelConfig, TokenizerConfig
from kit.text.train_tokenizer import train_tokenizer

SHORT = GenerateConfig(temperature=0, exact_codes=9)


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


def test_a_saved_voice_speaks_as_before(voice, folder):
    again = load_voice(folder)
    assert again.speakers == voice.speakers and not again.model.training
    texts = [row.text for row in manifest() if row.split == "train"][:3]
    one, two = (v.speak(texts, "voice2", SHORT) for v in (voice, again))
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(one, two))


NAMES = ["references.safetensors", "model-ema.safetensors", "tokenizer.model", "codec.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_cut_or_damaged_file_is_named(folder, name):
    data = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(KitError, match=name):
        load_voice(folder)
    if name.endswith("safetensors"):
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(KitError, match=rf"{name}.*checksum"):
            load_voice(folder)
    (folder / name).unlink()
    with pytest.raises(KitError, match=name):
        load_voice(folder)


def test_a_run_without_ema_has_one_voice(folder):
    (folder / "model-ema.safetensors").rename(folder / "model-raw.safetensors")
    assert list(load_voices(folder)) == ["raw"]
    with pytest.raises(KitError, match=r"model-ema\.safetensors.*02_train"):
        load_voice(folder)
    shutil.copy(folder / "model-raw.safetensors", folder / "model-ema.safetensors")
    assert list(load_voices(folder)) == ["raw", "ema"]


OTHER = {
    "text_vocab": r"tokenizer\.model .*model-ema\.safetensors expects 200",
    "code_vocab": r"codec\.safetensors has 62 codes.*model-ema\.safetensors expects 200",
    "n_mels": r"references\.safetensors has 80 mels.*model-ema\.safetensors expects 200",
}


@pytest.mark.parametrize("size", OTHER)
def test_parts_of_different_runs_are_distinguished(folder, size):
    config = dataclasses.replace(real_config(), **{size: 200})
    save_model(SpeechGPT(config), folder / "model-ema.safetensors")
    with pytest.raises(SpeechError, match=OTHER[size] + ".*different runs"):
        load_voice(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "codec.safetensors"])
def test_parts_of_the_same_size_are_distinguished_too(folder, voice, name):
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
    with pytest.raises(SpeechError, match=rf"{name} .*model-ema\.safetensors.*01_data_prep"):
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
    with pytest.raises((SpeechError, KitError), match=rf"{name}\.safetensors.* not finite"):
        load_recognizer(path) if name == "recognizer" else load_voice(folder)


SHAPES = [({"a": (40, 20)}, "40 mels of 'a', .*expects 80"), ({}, "no speaker")]
SHAPES += [({"a": (80, 20), "b": (80, 12)}, "12 frames of 'b', .*expects 20")]


@pytest.mark.parametrize(("shapes", "expected"), SHAPES)
def test_references_of_another_shape_are_reported(folder, shapes, expected):
    mels = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_references(mels, folder / "references.safetensors")
    with pytest.raises(SpeechError, match=rf"references\.safetensors.*{expected}"):
        load_voice(folder)


def test_a_model_file_that_asks_for_more_than_it_holds_is_refused(folder):
    path = folder / "model-ema.safetensors"
    configure(path, layers=90, width=8192)  # 70 billion weights, were they made
    with pytest.raises(KitError, match=r"model-ema\.safetensors.*its header means"):
        load_voice(folder)
    configure(path, layers=10**8)
    with pytest.raises(KitError, match=r"GPTConfig\.layers = 100000000: must lie in"):
        load_voice(folder)


def configure(path, **over) -> None:
    """Change the config in the header of a safetensors file."""
    tensors, header = contents(path)
    header["config"] |= over
    path.write_bytes(file_bytes(tensors, header))


def test_references_store_their_front_end(folder):
    path = folder / "references.safetensors"
    mels = {"a": torch.randn(80, 20)}
    save_references(mels, path, front_end=MelConfig(hop_length=128))
    assert load_voice(folder).front_end.config == MelConfig(hop_length=128)
    tensors, header = contents(path)
    del header["front_end"]  # as earlier versions wrote it
    path.write_bytes(file_bytes(tensors, header))
    assert load_voice(folder).front_end.config == MelConfig()
