"""A codec the kit does not know goes the whole way: prepare, train, evaluate, speak, export.

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

from kit.audio.codec import (
    CODECS,
    Codec,
    codec_config,
    load_codec,
    make_codec,
    mels_and_codes,
    save_codec,
)
from kit.audio.mel_codec import MelCodecConfig
from kit.audio.spectrogram import Mel
from kit.audio.streaming import AudioStream
from kit.base.config import build, load_preset, merge
from kit.base.errors import KitError, SpeechError
from kit.inference.export import load_export
from kit.recipes.active_run import ActiveRun
from kit.recipes.evaluate import Evaluation
from kit.recipes.prepare import Preparation
from kit.recipes.settings import check_settings
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
        frames = F.pad(wave, (0, -wave.shape[-1] % size)).unflatten(-1, (-1, size))
        strongest = (frames @ self.tones.mT).abs().argmax(-1)
        loudness = frames.square().mean(-1).sqrt().clamp(min=1e-4).log2()
        return (loudness.round() + 8).clamp(0, 7).long() * self.config.tones + strongest

    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise KitError(f"Codes must lie in 0..{self.vocab_size - 1}.")
        loudness = 2.0 ** (codes // self.config.tones - 8)
        return (loudness[..., None] * self.tones[codes % self.config.tones]).flatten(1)


SMALL = {
    "codec": {"kind": "tones"},
    "model": {"width": 32},
    "train": {"max_steps": 4, "eval_steps": 2, "gate_every": 2, "save_steps": 2},
    "generate": {"best_of": 2, "max_codes_per_text_id": 0.5, "retries": 0},
    "evaluate": {"sentences": 2},
    "recognizer": {"steps": 2},  # it judges nothing at such sizes
    "infer": {"formats": ["fp32"], "sentences": 2},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    with patch.dict(CODECS, {"tones": f"{__name__}:ToneCodec"}):
        yield


@pytest.fixture(scope="module")
def run() -> ActiveRun:
    """A run that was prepared, trained and evaluated with it."""
    run = start("tones", "tiny", settings=SMALL)
    reported = [str(result) for result in Preparation(run, str(corpus())).run()]
    assert reported[3] == "64 codes, 25.0 of them a second; it needs no training"
    list(unchecked(Training(run)).run())
    list(Evaluation(run).run())
    return run


def test_its_codes_are_trained_and_evaluated(run):
    report = run.report()
    assert report["train"]["steps"] == 4
    assert {"cer", "cer_codec", "cer_floor"} <= set(report["eval"])
    again = Preparation(run, str(corpus()))
    again.check()
    assert "used again" in str(again.train_codec())


def test_it_speaks_in_one_go_and_in_a_stream(run):
    speaking = Speaking(run)
    said = speaking.say()
    assert said.sounds[0].sample_rate_hz == 16_000 and len(said.sounds[0].wave) > 640
    assert "is 0.0e+00 of full scale" in str(speaking.stream())


def test_a_voice_with_it_is_exported_and_comes_back(run):
    speaking = Speaking(run)
    assert "the same codes as before" in str(speaking.export("fp32"))
    voice = load_export(run.folder / "export")
    assert isinstance(voice.codec, ToneCodec) and voice.codec.config == ToneConfig()
    assert voice.front_end.config == speaking.voice.front_end.config
    with patch.dict(CODECS):
        del CODECS["tones"]
        with pytest.raises(SpeechError, match=r"There is no codec `tones`"):
            load_export(run.folder / "export")


def test_without_weights_it_is_a_file_all_the_same(tmp_path):
    codec = ToneCodec(ToneConfig(tones=4))
    save_codec(codec, tmp_path / "codec.safetensors")
    again = load_codec(tmp_path / "codec.safetensors")
    wave = torch.randn(1, 16_000)
    assert torch.equal(again.decode(again.encode(wave)), codec.decode(codec.encode(wave)))
    mels, codes = mels_and_codes(codec, Mel(), [wave[0], wave[0, :5000]])
    assert [len(each) for each in codes] == [25, 8] and codes[0].equal(codec.encode(wave)[0])
    assert [mel.shape for mel in mels] == [(80, 87), (80, 27)]  # at the 22,050 Hz of the mels
    stream = AudioStream(codec)
    pieces = [stream.push(part) for part in codes[0].split(7)]
    assert torch.equal(torch.cat([*pieces, stream.finish()]), codec.decode(codes[0][None])[0])


def test_a_codec_that_lacks_what_the_contract_asks_cannot_be_made():
    class Deaf(nn.Module, Codec):
        def decode(self, codes, first=0):
            return codes

    with pytest.raises(TypeError, match="encode"):
        Deaf()


def test_a_kind_is_chosen_by_name_and_settings_of_another_do_not_follow():
    demo = load_preset("cpu")
    assert codec_config(demo["codec"]).kind == "mel"
    assert codec_config({}) == MelCodecConfig()  # presets and files that name none
    chosen = merge(demo, {"codec": {"kind": "tones", "tones": 4}})["codec"]
    assert make_codec(codec_config(chosen)).vocab_size == 32
    check_settings({"codec": {"kind": "tones", "tones": 4}}, demo)
    with pytest.raises(KitError, match="codec has no setting `levels`"):
        check_settings({"codec": {"kind": "tones", "levels": [2, 2]}}, demo)
    with pytest.raises(KitError, match=r"no codec `tnes`\. Did you mean `tones`"):
        codec_config({"kind": "tnes"})
    with pytest.raises(KitError, match="no codec `None`"):
        codec_config({"kind": None})
    assert build(ToneConfig, {"kind": "tones"}) == ToneConfig()
