"""NeuCodec: its tensors are called as released, its sound is the release's, refusals say why."""

import dataclasses
import importlib.metadata
import itertools
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from hub import serving
from torch import nn

from kit.audio.codec import AudioStream, load_codec, save_codec
from kit.base.errors import KitError
from kit.base.files import file_digest
from kit.extras.neucodec import codec as neucodec
from kit.extras.neucodec.codec import WEIGHTS_FILE, NeuCodec, NeuCodecConfig

SIZES = {"width": 64, "layers": 2, "heads": 4, "acoustic_width": 8}
SEMANTIC = {"semantic_width": 64, "semantic_layers": 2, "semantic_heads": 4}
SMALL = NeuCodecConfig(**SIZES, **SEMANTIC, block=8, before=5, after=3)
MISSING = neucodec.encoder_unavailable()
with_transformers = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def codec() -> NeuCodec:
    torch.manual_seed(0)
    return lively(NeuCodec(SMALL)).eval()


def lively(module: nn.Module) -> nn.Module:
    """`module` with weights under which every part changes the output."""
    for parameter in module.parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
        nn.init.normal_(parameter, std=spread)
    return module


def random_codes(count: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 65_536, (rows, count), generator=generator)


def released_names() -> dict[str, tuple]:
    """The half that speaks as `model.safetensors` of the release has it."""
    c = 1024
    layers = {"fc": (c, 2 * c), "embed": (c, c, 7), "norm": (c,), "head.linear": (1922, c)}
    for net, block, n in itertools.product(("prior_net", "post_net"), range(2), (1, 2)):
        layers |= {f"{net}.{block}.norm{n}": (c,), f"{net}.{block}.conv{n}": (c, c, 3)}
    names = {f"{name}.weight": shape for name, shape in layers.items()}
    names |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    layer = {f"self_attn.{part}_proj": (c, c) for part in "qkvo"}
    layer |= {"input_layernorm": (c,), "post_attention_layernorm": (c,)}
    layer |= {"mlp.fc1": (4 * c, c), "mlp.fc2": (c, 4 * c)}
    for i, part in itertools.product(range(12), layer):
        names[f"layers.{i}.{part}.weight"] = layer[part]
    names = {f"acoustic_decoder.{name}": shape for name, shape in names.items()}
    digits = "quantizer.project_out"
    return names | {f"{digits}.weight": (2 * c, 8), f"{digits}.bias": (2 * c,)}


def test_the_half_that_speaks_has_the_names_and_shapes_of_the_release():
    with torch.device("meta"):
        codec = NeuCodec(NeuCodecConfig())
    assert {n: tuple(tensor.shape) for n, tensor in codec.state_dict().items()} == released_names()
    assert sum(p.numel() for p in codec.parameters()) == 187_639_682
    figures = codec.vocab_size, codec.frame_rate, codec.sample_rate, codec.input_sample_rate
    assert (*figures, codec.context, codec.lookahead) == (65_536, 50.0, 24_000, 16_000, 101, 61)


def test_codes_are_as_long_as_it_says_and_others_are_refused(codec):
    assert codec.decode(random_codes(20, rows=2)).shape == (2, codec.samples(20)) == (2, 9600)
    assert codec.decode(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)
    for code in (-1, 65_536):
        with pytest.raises(KitError, match=r"must be in 0\.\.65535"):
            codec.decode(torch.tensor([[code]]))


@pytest.mark.parametrize("size", [1, 30])
def test_a_stream_is_the_whole(codec, size):
    codes = random_codes(97)
    whole = codec.decode(codes)[0]
    stream = AudioStream(codec, first=2, longest=16)
    pieces = [stream.push(part) for part in codes[0].split(size)]
    assert sum(map(len, pieces)) > 0  # some of it before all codes are there
    again = torch.cat([*pieces, stream.finish()])
    torch.testing.assert_close(again, whole, atol=1e-5 * float(whole.abs().max()), rtol=0)


def test_it_is_saved_without_the_encoder(codec, tmp_path):
    codec.config = dataclasses.replace(SMALL, sha256="ab" * 32)
    save_codec(codec, tmp_path / "codec.safetensors")
    again = load_codec(tmp_path / "codec.safetensors")
    codes = random_codes(20)
    assert again.config.sha256 == "ab" * 32 and again.config == SMALL
    assert torch.equal(again.decode(codes), codec.decode(codes))
    codec.config = SMALL


@pytest.fixture
def folder(tmp_path, codec, monkeypatch):
    """A folder with a small release; its encoder is named but never used."""
    tensors = {**codec.state_dict(), "fc_encoder.weight": torch.ones(4, 4)}
    wanted = {name: tensor.to("meta") for name, tensor in tensors.items()}
    monkeypatch.setattr(neucodec, "encoder_unavailable", lambda: "")
    monkeypatch.setattr(neucodec, "library_tensors", lambda config: wanted)
    released = tmp_path / "release"
    released.mkdir()
    safetensors.torch.save_file(tensors, released / WEIGHTS_FILE)
    return released


def taking(folder, **over) -> NeuCodec:
    codec = NeuCodec(dataclasses.replace(SMALL, folder=str(folder), **over)).eval()
    codec.release_line = codec.load_release()
    return codec


def test_a_release_is_taken_with_its_licence_and_its_version(folder, codec):
    taken = taking(folder)
    assert taken.config.sha256 == file_digest(folder / WEIGHTS_FILE)
    for fact in ("Apache-2.0", taken.config.sha256[:12], str(folder)):
        assert fact in taken.release_line
    codes = random_codes(20)
    assert torch.equal(taken.decode(codes), codec.decode(codes))


def test_what_is_not_the_release_is_refused_by_name(folder):
    path = folder / WEIGHTS_FILE
    whole = safetensors.torch.load_file(path)
    without = {name: t for name, t in whole.items() if name != "acoustic_decoder.fc.bias"}
    misshapen = {**whole, "quantizer.project_out.bias": torch.zeros(3)}
    damaged = {**whole, "acoustic_decoder.norm.bias": torch.full((64,), torch.nan)}
    wrong = {
        r"missing: acoustic_decoder\.fc\.bias": without,
        r"misshapen: quantizer\.project_out\.bias \(3,\), not \(128,\)": misshapen,
        r"acoustic_decoder\.norm\.bias is not finite": damaged,
    }
    for message, tensors in wrong.items():
        safetensors.torch.save_file(tensors, path)
        with pytest.raises(KitError, match=message):
            taking(folder)
    path.write_bytes(b"<html>")
    with pytest.raises(KitError, match="damaged or no safetensors file"):
        taking(folder)


def test_another_version_is_not_taken_for_this_one(folder):
    taken = taking(folder)
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    other = tensors | {"fc_encoder.weight": torch.zeros(4, 4)}
    safetensors.torch.save_file(other, folder / WEIGHTS_FILE)
    with pytest.raises(KitError, match="another NeuCodec than this codec was taken from"):
        taken.encode(torch.zeros(1, 16_000))
    with pytest.raises(KitError, match=r"as `codec\.folder`, or its commit"):
        taking(folder, sha256=taken.config.sha256)


def test_it_is_fetched_once_from_a_hub(folder, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    with serving(folder, "neuphonic/neucodec", "main") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        taken = taking("")
        asked = len(hub.asked)
        assert asked and taking("").config.sha256 == taken.config.sha256
        assert len(hub.asked) == asked
        with pytest.raises(KitError, match="revision gone"):
            taking("", revision="gone")
    kept = home / "voicekit" / "neuphonic--neucodec@main"
    assert str(kept) in taken.release_line


def test_without_transformers_it_says_how_to_install_it(codec, monkeypatch):
    missing = importlib.metadata.PackageNotFoundError("transformers")
    monkeypatch.setattr(neucodec.importlib.metadata, "version", Mock(side_effect=missing))
    for asked in (lambda: codec.encode(torch.zeros(1, 16_000)), lambda: taking("/nowhere")):
        with pytest.raises(KitError, match=r'pip install "transformers>=5\.17"'):
            asked()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """transformers' NeuCodec, and the folder of its release, of the small sizes."""
    from transformers import NeuCodecModel

    torch.manual_seed(0)
    model = lively(NeuCodecModel(neucodec.library_settings(SMALL))).eval()
    released = tmp_path_factory.mktemp("released")
    model.save_pretrained(released)
    return model, released


@with_transformers
def test_it_sounds_as_transformers_does(library):
    model, released = library
    codec = taking(released, block=100)
    codes = random_codes(60, rows=2)
    with torch.no_grad():
        theirs = model.decode(audio_codes=codes[:, None]).audio_values[:, 0]
    loudest = float(theirs.abs().max())
    torch.testing.assert_close(codec.decode(codes), theirs, atol=1e-4 * loudest, rtol=0)


@with_transformers
@pytest.mark.parametrize("samples", [100, 16_001])
def test_it_transcribes_as_transformers_does(library, samples):
    from transformers import NeuCodecFeatureExtractor

    model, released = library
    wave = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.1
    codec = taking(released)
    codes = codec.encode(wave[None])
    assert codes.shape == (1, max(1, samples // 320)) and not codec.quantizer.training
    assert codes.ge(0).all() and codes.lt(65_536).all()
    if samples < 320:
        return  # theirs has no frame of so short a clip
    extractor = NeuCodecFeatureExtractor(padding_value=1.0)
    features = extractor(wave.numpy(), sampling_rate=16_000, return_tensors="pt")
    padded = features["input_values"][0, 0]
    torch.testing.assert_close(neucodec.semantic_features(padded), features["input_features"][0])
    with torch.no_grad():
        theirs = model.encode(features["input_values"], features["input_features"])
    assert torch.equal(codes, theirs.audio_codes[:, 0].long())
    assert torch.equal(neucodec.encode_clip(model, wave), codes[0])
