"""Parts of recordings drawn by chance, all of one length: what a training step of a codec sees.

Knows waveforms, codes and a model's states as they lie; nothing of networks.

Shapes: B stretches, L samples, N codes, D width of a model's states.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.audio.codec import StatedClip


@dataclasses.dataclass(frozen=True, kw_only=True)
class StretchShape:
    """How much of a clip is one stretch."""

    codes: int
    code_samples: int  # samples a code stands for
    samples: int  # from the middle of its first frame to that of its last
    margin: int  # samples before and after these that a spectrogram of them needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretches:
    wave: Tensor  # (B, L), with margins
    margin: int
    codes: Tensor  # (B, N)
    states: Tensor  # (B, N, D), each the one that foretold its code
    untold: Tensor  # (B, 1, 1): rows that are learnt without states

    @property
    def inner_wave(self) -> Tensor:
        """The sound (B, L) without margins."""
        return self.wave[:, self.margin : -self.margin]

    def to(self, device: torch.device) -> "Stretches":
        return dataclasses.replace(
            self,
            wave=self.wave.to(device),
            codes=self.codes.to(device),
            states=self.states.to(device),
            untold=self.untold.to(device),
        )


def stretches(
    clips: list[StatedClip],
    shape: StretchShape,
    count: int,
    generator: torch.Generator,
    untold_share: float,
) -> Stretches:
    drawn = [_stretch(clips, shape, generator) for _ in range(count)]
    wave, codes, states = (torch.stack(part) for part in zip(*drawn, strict=True))
    untold = torch.rand(count, 1, 1, generator=generator) < untold_share
    return Stretches(wave=wave, margin=shape.margin, codes=codes, states=states, untold=untold)


def _stretch(
    clips: list[StatedClip], shape: StretchShape, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sound with margins, codes and states of one."""
    clip = clips[int(torch.randint(len(clips), (), generator=generator))]
    starts = max(1, len(clip.codes) - shape.codes + 1)
    start = int(torch.randint(starts, (), generator=generator))
    end = start + shape.codes
    short = max(0, end - len(clip.codes))  # a clip that is shorter ends in its last code
    codes = torch.cat((clip.codes[start:end], clip.codes[-1:].expand(short)))
    states = torch.cat((clip.states[start:end], clip.states[-1:].expand(short, -1))).float()
    first = start * shape.code_samples - shape.margin
    length = shape.samples + 2 * shape.margin
    wave = F.pad(clip.wave, (max(0, -first), max(0, first + length - len(clip.wave))))
    return wave[max(0, first) :][:length], codes, states


def crops(waves: list[Tensor], samples: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` stretches of clips (L,), as (B, samples); shorter clips end in silence."""
    return torch.stack([_crop(waves, samples, generator) for _ in range(count)])


def _crop(waves: list[Tensor], samples: int, generator: torch.Generator) -> Tensor:
    wave = waves[int(torch.randint(len(waves), (), generator=generator))]
    wave = F.pad(wave, (0, max(0, samples - len(wave))))
    start = int(torch.randint(len(wave) - samples + 1, (), generator=generator))
    return wave[start : start + samples]
