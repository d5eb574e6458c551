"""A run with NeuCodec's codes goes the whole way: prepare, train, evaluate, speak, export.

Small, of random weights; the encoder is a stand-in for transformers' half (tests/audio has that).
"""

import dataclasses
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from helpers import corpus, unchecked
from torch import Tensor, nn

from kit.base.errors import KitError
from kit.inference.export import load_export
from kit.recipes.active_run import ActiveRun
from kit.recipes.evaluate import Evaluation
from kit.recipes.prepare import Preparation
from kit.recipes.speak import Speaking
from kit.recipes.start import start
from kit.recipes.train import Training
from kit.releases.neucodec import codec as neucodec
from kit.releases.neucodec.codec import NeuCodec
from kit.releases.neucodec.files import WEIGHTS_FILE, NeuCodecConfig

SIZES = {"width": 32, "layers": 1, "heads": 2, "semantic_width": 32, "semantic_heads": 2}
SIZES |= {"block": 10, "before": 5, "after": 2}


class StandIn(nn.Module):
    """Encodes how loud each 20 ms are, in 100 codes far apart."""

    def __init__(self):
        super().__init__()
        self.fc_encoder = nn.Linear(1, 1)

    def encode(self, wave: Tensor, features: Tensor):
        pieces = wave[0, 0][: 320 * features.shape[1]].unflatten(0, (-1, 320))
        loudness = pieces.square().mean(-1).sqrt().clamp(max=0.99)
        codes = (loudness * 100).long() * 655
        return type("Encoded", (), {"audio_codes": codes[None, None]})


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The folder of a release that the kit takes for a NeuCodec of these sizes."""
    torch.manual_seed(0)
    tensors = NeuCodec(NeuCodecConfig(**SIZES)).state_dict()
    folder = tmp_path_factory.mktemp("neucodec")
    safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE)
    with (
        patch.object(neucodec, "require_encoder"),
        patch.object(neucodec, "library_tensors", lambda config: tensors),
        patch.object(neucodec, "load_encoder", lambda folder, config: StandIn()),
    ):
        yield folder


@pytest.fixture(scope="module")
def run(release) -> ActiveRun:
    """A run that was prepared, trained and evaluated with it."""
    settings = {
        "codec": {"kind": "neucodec", "folder": str(release), **SIZES},
        "model": {"width": 32},
        "data": {"effective_batch": 2, "micro_batch": 2},  # of 65,538 logits a code
        "train": {"max_steps": 4, "eval_steps": 4, "gate_every": 4, "save_steps": 4},
        "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
        "evaluate": {"sentences": 2},
        "recognizer": {"steps": 2},  # it judges nothing at such sizes
        "infer": {"formats": ["fp32"], "sentences": 2},
    }
    run = start("neucodec", "tiny", settings=settings)
    reported = [str(result) for result in Preparation(run, str(corpus())).run()]
    assert reported[3].startswith(
        "65536 codes, 50.0 of them a second; the released NeuCodec (Apache"
    )
    list(unchecked(Training(run)).run())
    list(Evaluation(run).run())
    return run


def test_the_model_learns_its_codes_and_they_are_judged(run):
    report = run.report()
    assert report["train"]["steps"] == 4
    assert {"cer", "cer_codec", "cer_floor"} <= set(report["eval"])
    again = Preparation(run, str(corpus()))
    again.check()
    assert "used again" in str(again.train_codec())


def test_it_speaks_in_one_go_and_in_a_stream(run):
    speaking = Speaking(run)
    assert speaking.voice.model.config.code_vocab == 65_538
    said = speaking.say()
    assert said.sounds[0].sample_rate_hz == 24_000 and len(said.sounds[0].wave) >= 480
    assert "largest difference" in str(speaking.stream())


def test_a_voice_is_exported_and_speaks_without_the_encoder(run):
    speaking = Speaking(run)
    assert "the same codes as before" in str(speaking.export("fp32"))
    voice = load_export(run.folder / "export")
    assert isinstance(voice.codec, NeuCodec) and voice.codec.config.sha256
    codes = torch.arange(0, 60_000, 1000)[None]
    assert torch.equal(voice.codec.decode(codes), speaking.voice.codec.cpu().decode(codes))
    voice.codec.config = dataclasses.replace(voice.codec.config, folder="/nowhere")
    with pytest.raises(KitError, match=r"has no model\.safetensors of NeuCodec"):
        voice.codec.encode(torch.zeros(1, 16_000))
