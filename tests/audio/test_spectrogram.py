"""A front end is chosen by its kind; plain values are all that it is made of."""

import dataclasses
import json
import sys

import pytest
import torch
from clips import encoded, written
from helpers import RATE
from released_sound import spoken

from kit.audio import spectrogram
from kit.audio.clip import resampled
from kit.audio.spectrogram import Mel
from kit.base.errors import KitError, SpeechError
from kit.extras.xtts_v2.codec import XTTSMel
from kit.settings import MelConfig

XTTS = {"kind": "xtts", "n_fft": 2048, "mel_stats": [0.5 + i / 80 for i in range(80)]}


def test_without_a_kind_it_is_the_kits_own_and_xttss_goes_through_a_file_of_plain_values():
    assert spectrogram.front_end_config({}) == spectrogram.DEFAULT_MEL
    assert spectrogram.front_end_config({"kind": "mel", "n_mels": 40}) == MelConfig(n_mels=40)
    assert type(spectrogram.make_front_end(spectrogram.DEFAULT_MEL)) is Mel
    config = spectrogram.front_end_config(XTTS)
    again = spectrogram.front_end_config(json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config
    # The recogniser gets features that are not scaled for another network.
    assert spectrogram.recognizer_mel(MelConfig(n_mels=40)) == MelConfig(n_mels=40)
    assert spectrogram.recognizer_mel(config) == spectrogram.DEFAULT_MEL
    front_end = spectrogram.make_front_end(again)
    assert isinstance(front_end, XTTSMel)
    assert front_end.clip_mel(spoken(22_050), 22_050).shape == (80, 87)


WRONG = [({"kind": "xtt"}, "'xtt'.*`xtts`"), ({"win_length": 512}, "MelConfig.*`win_length`")]
WRONG += [({**XTTS, "mel_stats": ["a"] * 80}, "mel_stats")]


@pytest.mark.parametrize(("values", "facts"), WRONG)
def test_what_is_no_front_end_is_refused(values, facts):
    with pytest.raises(KitError, match=facts):
        spectrogram.front_end_config(values)


def test_stereo_at_48_khz_is_one_channel_at_the_rate_asked_for(tmp_path):
    wave = spoken(2 * 48_000, rate=48_000)
    path = written(tmp_path, encoded(torch.stack((wave, 0 * wave), dim=1).numpy(), 48_000))
    reference, wanted = spectrogram.load_reference(path, RATE), spoken(2 * RATE)
    assert len(reference) == 2 * RATE
    assert torch.corrcoef(torch.stack((reference, wanted)))[0, 1] > 0.99
    assert reference.abs().max() < 0.6 * wanted.abs().max(), "the mean of both channels"
    path = written(tmp_path, encoded(spoken(RATE * 32).numpy()))
    assert len(spectrogram.load_reference(path, RATE)) == 30 * RATE


NO_REFERENCES = {
    r"is silent \(peak 0\.0000": torch.zeros(RATE),
    r"lasts 0\.32 s: at least 0\.33 s": spoken(7000),
    r"has the shape \(2, 22050\)": spoken(RATE).expand(2, -1),
    "not finite": torch.full((RATE,), torch.nan),
}


@pytest.mark.parametrize(("facts", "wave"), NO_REFERENCES.items())
def test_what_is_no_reference_is_refused(wave, facts):
    with pytest.raises(SpeechError, match=facts):
        spectrogram.require_reference(wave, RATE)


def test_pieces_are_four_seconds_and_a_short_rest_is_left_out():
    mels = spectrogram.reference_mels(spoken(round(12.2 * RATE)), RATE, Mel())
    assert [mel.shape for mel in mels] == [(80, 4 * RATE // 256 + 1)] * 3
    mels = spectrogram.reference_mels(spoken(RATE * 31), RATE, Mel())
    assert [mel.shape[1] for mel in mels] == [345] * 7 + [173]


def test_a_reference_is_always_full_the_loudest_part_and_no_pause():
    for frames in (1, 19, 20, 21, 200):
        mel = torch.arange(frames).float().expand(80, frames)
        assert spectrogram.reference_mel(mel, 20).shape == (80, 20)
    mel = torch.full((80, 200), -7.6)
    mel[:, 30:50] = -3.0
    mel[:, 45:48] = -5.0
    mel[:, 120:135] = -2.9
    assert torch.equal(spectrogram.reference_mel(mel, 20), mel[:, 30:50])


def test_a_torchaudio_that_torch_refuses_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # an import raises ImportError
    with pytest.raises(KitError, match=r"pip install .*torchaudio=="):
        resampled(torch.zeros(9), 8000, RATE)
