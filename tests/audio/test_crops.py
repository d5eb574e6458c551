"""Stretches of clips: sound, codes and states of the same moments, whatever the clip's length."""

import pytest
import torch

from kit.audio.codec import ClipWithStates
from kit.audio.crops import CropShape, crops, state_crops

SHAPE = CropShape(codes=4, code_samples=10, samples=35, margin=8)


def counted(codes: int) -> ClipWithStates:
    """A clip whose every sample, code and state tells its place."""
    return ClipWithStates(
        wave=torch.arange(1.0, 10 * codes + 1),
        codes=torch.arange(codes),
        states=torch.arange(codes)[:, None].expand(codes, 3).half(),
    )


def drawn(codes: int, count: int = 200, dropped_share: float = 0.0):
    generator = torch.Generator().manual_seed(0)
    return state_crops([counted(codes)], SHAPE, count, generator, dropped_share)


def test_sound_codes_and_states_are_of_the_same_moment():
    found = drawn(9)
    starts = set()
    for wave, codes, states in zip(found.inner_wave, found.codes, found.states):
        start = int(codes[0])
        assert torch.equal(codes, torch.arange(start, start + 4))
        assert torch.equal(states[:, 0], codes.float())
        assert torch.equal(wave, torch.arange(10 * start + 1.0, 10 * start + 36))
        starts.add(start)
    assert starts == set(range(6))  # the first and the last, too


def test_beyond_the_clip_is_silence():
    found = drawn(4, 1)
    assert found.wave.shape == (1, 35 + 16)
    assert not found.wave[0, :8].any() and not found.wave[0, 48:].any()
    assert torch.equal(found.wave[0, 8:48], torch.arange(1.0, 41))


@pytest.mark.parametrize("codes", [1, 3])
def test_a_shorter_clip_stays_at_its_last_code(codes):
    found = drawn(codes, 1)
    assert found.codes[0].tolist() == [min(i, codes - 1) for i in range(4)]
    assert not found.inner_wave[0, 10 * codes :].any()
    assert crops([counted(codes).wave], 35, 2, torch.Generator()).shape == (2, 35)


def test_a_share_is_learnt_without_states():
    assert not drawn(9).dropped.any() and drawn(9, dropped_share=1.0).dropped.all()
    assert 0.2 < drawn(9, dropped_share=0.3).dropped.float().mean() < 0.4
