"""A run with another codec goes the whole way: prepare, train, evaluate, speak, export.

All that a codec of one's own takes is here: a config, a class, an entry in `CODECS`.
"""

import dataclasses
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers import corpus, unchecked
from torch import Tensor, nn

from kit.audio import codec as codecs
from kit.audio.codec import CODECS, Codec, codec_config, require_codes, save_codec
from kit.base.config import load_preset
from kit.base.errors import KitError
from kit.inference.export import load_export
from kit.recipes.evaluate import Evaluation
from kit.recipes.open_run import check_settings
from kit.recipes.prepare import Preparation
from kit.recipes.speak import Speaking
from kit.recipes.start import start
from kit.recipes.train import Training


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToneConfig:
    kind: str = "tones"
    tones: int = 8  # one of them sounds at a time
    frame_rate: float = 25.0  # codes per second


class ToneCodec(nn.Module, Codec):
    """A code is 40 ms of one tone: the strongest in the recording, in one of eight loudnesses."""

    config_class = ToneConfig
    sample_rate = 16_000
    context = 0

    def __init__(self, config: ToneConfig):
        super().__init__()
        self.config = config
        self.frame_rate = config.frame_rate
        self.vocab_size = 8 * config.tones
        samples = torch.arange(round(self.sample_rate / self.frame_rate))
        turns = torch.arange(1, config.tones + 1)[:, None] * 8 * samples / len(samples)
        self.tones = nn.Buffer(torch.sin(2 * math.pi * turns), persistent=False)

    def encode(self, wave: Tensor) -> Tensor:
        size = self.tones.shape[1]
        wave = F.pad(wave.to(self.tones.device), (0, -wave.shape[-1] % size))
        frames = wave.unflatten(-1, (-1, size))
        strongest = (frames @ self.tones.mT).abs().argmax(-1)
        loudness = frames.square().mean(-1).sqrt().clamp(min=1e-4).log2()
        return (loudness.round() + 8).clamp(0, 7).long() * self.config.tones + strongest

    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        require_codes(codes, self.vocab_size)
        codes = codes.to(self.tones.device)
        loudness = 2.0 ** (codes // self.config.tones - 8)
        return (loudness[..., None] * self.tones[codes % self.config.tones]).flatten(1)


SMALL = {
    "model": {"width": 32},
    "train": {"max_steps": 4, "eval_steps": 4, "gate_every": 4, "save_steps": 4},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
    "evaluate": {"sentences": 2},
    "recognizer": {"steps": 2},  # it judges nothing at such sizes
    "infer": {"formats": ["fp32"], "sentences": 2},
}


@pytest.fixture(autouse=True)
def registered():
    with patch.dict(CODECS, {"tones": f"{__name__}:ToneCodec"}):
        yield


@pytest.mark.long
def test_it_is_trained_evaluated_spoken_with_and_exported():
    run = start("with-tones", "tiny", settings=SMALL | {"codec": {"kind": "tones"}})
    reported = [str(result) for result in Preparation(run, str(corpus())).run()]
    assert reported[3].startswith("64 codes, 25.0 of them a second; it needs no training")
    list(unchecked(Training(run)).run())
    list(Evaluation(run).run())
    again = Preparation(run, str(corpus()))
    again.check()
    assert "used again" in str(again.train_codec())
    speaking = Speaking(run)
    (sound,) = speaking.say().sounds
    assert sound.sample_rate_hz == 16_000 and len(sound.wave) >= 480
    assert "is 0.0e+00 of full scale" in str(speaking.stream())
    assert "the same codes as before" in str(Speaking(run).export("fp32"))
    assert isinstance(load_export(run.folder / "export").codec, ToneCodec)


def test_a_kind_is_chosen_by_name_saved_without_weights_and_must_be_complete(tmp_path):
    codec = ToneCodec(ToneConfig(tones=4))
    save_codec(codec, tmp_path / "codec.safetensors")
    again = codecs.load_codec(tmp_path / "codec.safetensors")
    wave = torch.randn(1, 16_000)
    assert torch.equal(again.decode(again.encode(wave)), codec.decode(codec.encode(wave)))

    class Deaf(nn.Module, Codec):
        def decode(self, codes, first=0):
            return codes

    with pytest.raises(TypeError, match="encode"):
        Deaf()
    demo = load_preset("cpu")
    check_settings({"codec": {"kind": "tones", "tones": 4}}, demo)
    with pytest.raises(KitError, match="codec has no setting `levels`"):
        check_settings({"codec": {"kind": "tones", "levels": [2, 2]}}, demo)
    for kind, why in (("tnes", "'tnes'.*Did you mean `tones`"), (None, "'None' .*codecs")):
        with pytest.raises(KitError, match=why):
            codec_config({"kind": kind})
