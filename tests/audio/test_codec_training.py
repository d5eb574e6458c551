"""Training what makes sound: critics teach a blurred maker, and crops are of the same moments."""

import pytest
import torch
from torch import nn

from kit.audio.codec import ClipWithStates
from kit.audio.codec_training import Critic, CropShape, crops, state_crops, train_generator
from kit.base.errors import KitError

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
    for wave, codes, states in zip(found.wave[:, 8:-8], found.codes, found.states):
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
    assert not found.wave[0, 8 + 10 * codes :].any()
    assert crops([counted(codes).wave], 35, 2, torch.Generator()).shape == (2, 35)


def test_a_share_is_learnt_without_states():
    assert not drawn(9).dropped.any() and drawn(9, dropped_share=1.0).dropped.all()
    assert 0.2 < drawn(9, dropped_share=0.3).dropped.float().mean() < 0.4


def wavy(rows: int, depth) -> torch.Tensor:
    """Log-spectrograms (B, 40, 24) with harmonics of this depth, each at another place."""
    at = 10 * torch.rand(rows, 1, 1)
    return depth * torch.sin(torch.arange(40)[:, None] + at).expand(-1, -1, 24) - 3


@pytest.mark.parametrize("shape", [(2, 513, 48), (1, 80, 32), (3, 40, 1)])
def test_a_critic_scores_patches_of_any_spectrogram(shape):
    score, seen = Critic(4)(torch.randn(shape))
    assert score.shape[:2] == (shape[0], 1) and score.numel() >= shape[0] * -(-shape[2] // 2)
    assert len(seen) == 4 and all(torch.isfinite(features).all() for features in seen)


def test_a_maker_of_shallow_harmonics_learns_to_make_them_deep():
    torch.manual_seed(0)
    depth = nn.Parameter(torch.tensor(0.2))

    def views():
        return [wavy(4, 2.0)], [wavy(4, depth)], 0 * depth.square()

    steps = list(train_generator([depth], views, 120, adversarial=True))
    assert [step for step, _ in steps] == list(range(1, 121))
    assert depth > 0.21  # 4e-4 a step at most


def test_where_the_error_is_no_number_it_ends():
    depth = nn.Parameter(torch.tensor(float("nan")))
    with pytest.raises(KitError, match=r"nan at step 1 .*sharpen_steps=0"):
        next(train_generator([depth], lambda: ([], [], depth.sum()), 5, adversarial=True))
