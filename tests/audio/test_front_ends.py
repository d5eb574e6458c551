"""A front end is chosen by its kind; plain values are all that it is made of."""

import dataclasses
import json

import pytest
import torch
from released_sound import spoken

from kit.audio.spectrogram import (
    DEFAULT_MEL,
    Mel,
    MelConfig,
    front_end_config,
    make_front_end,
    recognizer_mel,
)
from kit.base.errors import KitError
from kit.releases.xtts_v2.dvae import XTTSMel

XTTS = {"kind": "xtts", "n_fft": 2048, "mel_stats": [0.5 + i / 80 for i in range(80)]}


def test_without_a_kind_it_is_the_kits_own():
    assert front_end_config({}) == DEFAULT_MEL
    assert front_end_config({"kind": "mel", "n_mels": 40}) == MelConfig(n_mels=40)
    assert type(make_front_end(DEFAULT_MEL)) is Mel


def test_xttss_goes_through_a_file_of_plain_values():
    config = front_end_config(XTTS)
    again = front_end_config(json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config
    front_end = make_front_end(again)
    assert isinstance(front_end, XTTSMel)
    assert front_end.clip_mel(spoken(22_050), 22_050).shape == (80, 87)


def test_the_recogniser_gets_features_not_scaled_for_another_network():
    assert recognizer_mel(MelConfig(n_mels=40)) == MelConfig(n_mels=40)
    assert recognizer_mel(front_end_config(XTTS)) == DEFAULT_MEL


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "xtt"}, r"no front end `xtt`.*xtts"),
        ({"win_length": 512}, r"MelConfig has no setting `win_length`"),
        ({**XTTS, "mel_stats": [1.0]}, r"give 80 numbers"),
        ({**XTTS, "mel_stats": ["a"] * 80}, r"give 80 numbers"),
    ],
)
def test_what_is_none_is_reported(values, message):
    with pytest.raises(KitError, match=message):
        front_end_config(values)


def test_the_values_are_what_makes_the_log_mels():
    scaled = dict(XTTS, mel_stats=[1.0] * 80)
    plain = make_front_end(front_end_config(scaled)).log_mel(spoken(22_050)[None])
    found = make_front_end(front_end_config(XTTS)).log_mel(spoken(22_050)[None])
    stats = torch.tensor(XTTS["mel_stats"])[:, None]
    assert torch.allclose(found * stats, plain, atol=1e-5)
