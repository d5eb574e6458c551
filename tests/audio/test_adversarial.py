"""Critics: what they look at, and that a maker who is blurred learns not to be."""

import pytest
import torch
from torch import nn

from kit.audio.adversarial import Critic, train_adversarial
from kit.base.errors import TrainError


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

    steps = list(train_adversarial([depth], views, 120, "cpu", 0))
    assert [step for step, _ in steps] == list(range(1, 121))
    assert depth > 0.21  # 4e-4 a step at most


def test_where_the_error_is_no_number_it_ends():
    depth = nn.Parameter(torch.tensor(float("nan")))
    with pytest.raises(TrainError, match=r"nan at step 1 .*sharpen_steps=0"):
        next(train_adversarial([depth], lambda: ([], [], depth.sum()), 5, "cpu", 0))
