"""Whether a voice follows the speaker reference: the loss of its codes, by reference."""

import copy

import pytest
import torch
from helpers import opinionated_voice

from kit.inference.evaluate import LabeledClip, SpeakerLoss, loss_by_speaker
from kit.inference.voice import Voice


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> Voice:
    return opinionated_voice(tmp_path_factory.mktemp("voice"))


def recordings(voice: Voice, count: int = 20) -> list[LabeledClip]:
    chance = torch.Generator().manual_seed(0)
    texts = ["ሰላም", "ሰላም ሰላም"]
    return [
        LabeledClip(
            text=texts[i % 2],
            speaker=voice.speakers[i % 2],
            wave=0.1 * torch.randn(4000 + 100 * i, generator=chance),
        )
        for i in range(count)
    ]


def test_it_is_the_models_own_loss_whatever_is_read_together(voice):
    rows = recordings(voice)
    together = loss_by_speaker(voice, rows)
    assert list(together) == voice.speakers == ["alma", "brook"]
    for speaker in voice.speakers:
        assert together[speaker].own != together[speaker].other
        alone = [loss_by_speaker(voice, [row])[speaker] for row in rows if row.speaker == speaker]
        assert min(found.own for found in alone) < together[speaker].own
        assert together[speaker].own < max(found.own for found in alone)


def test_a_voice_that_ignores_the_reference_is_reported(voice):
    deaf = copy.copy(voice)
    deaf.model = copy.deepcopy(voice.model)
    deaf.model.conditioner.latents.data.fill_(1e9)  # the reference has no effect beside them
    for found in loss_by_speaker(deaf, recordings(voice)).values():
        assert found.own == pytest.approx(found.other, rel=1e-6) and not found.uses_reference


@pytest.mark.parametrize(
    ("own", "other", "used"), [(2.0, 2.1, True), (2.0, 2.001, False), (2.1, 2.0, False)]
)
def test_a_reference_of_ones_own_must_gain_something(own, other, used):
    assert SpeakerLoss(own=own, other=other).uses_reference == used


def test_one_speaker_is_nobody_elses(voice):
    alone = copy.copy(voice)
    alone.references = {"alma": voice.references["alma"]}
    assert loss_by_speaker(alone, recordings(voice)) == {}


def test_what_is_too_long_for_the_model_is_left_out(voice):
    rows = recordings(voice, 2)
    long = LabeledClip(text="ሰላም", speaker="alma", wave=torch.randn(22050 * 60))
    stranger = LabeledClip(text="ሰላም", speaker="nobody", wave=rows[0].wave)
    assert loss_by_speaker(voice, [*rows, long, stranger]) == loss_by_speaker(voice, rows)
    assert loss_by_speaker(voice, [long]) == {}
