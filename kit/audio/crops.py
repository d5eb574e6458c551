"""Random crops of recordings, the batches that codecs are trained on.

Shapes: B crops, L samples, N codes, D width of a model's hidden states.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from kit.audio.codec import ClipWithStates


@dataclasses.dataclass(frozen=True, kw_only=True)
class CropShape:
    codes: int
    code_samples: int  # per code
    samples: int  # from the centre of the first frame to that of the last
    margin: int  # further samples on either side that a spectrogram of them needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCrops:
    """Crops of recordings with their codes and a model's states."""

    wave: Tensor  # (B, L), margins included
    margin: int
    codes: Tensor  # (B, N)
    states: Tensor  # (B, N, D), each the one that predicted its code
    dropped: Tensor  # (B, 1, 1): rows to be decoded without states

    @property
    def inner_wave(self) -> Tensor:
        """The waveforms (B, L) without margins."""
        return self.wave[:, self.margin : -self.margin]

    def to(self, device: torch.device) -> "StateCrops":
        return dataclasses.replace(
            self,
            wave=self.wave.to(device),
            codes=self.codes.to(device),
            states=self.states.to(device),
            dropped=self.dropped.to(device),
        )


def state_crops(
    clips: list[ClipWithStates],
    shape: CropShape,
    count: int,
    generator: torch.Generator,
    dropped_share: float,
) -> StateCrops:
    """Draw `count` crops; those of a clip that is too short repeat its last code, in silence."""
    drawn = [_state_crop(clips, shape, generator) for _ in range(count)]
    wave, codes, states = (torch.stack(part) for part in zip(*drawn, strict=True))
    dropped = torch.rand(count, 1, 1, generator=generator) < dropped_share
    return StateCrops(wave=wave, margin=shape.margin, codes=codes, states=states, dropped=dropped)


def _state_crop(
    clips: list[ClipWithStates], shape: CropShape, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    clip = clips[int(torch.randint(len(clips), (), generator=generator))]
    starts = max(1, len(clip.codes) - shape.codes + 1)
    start = int(torch.randint(starts, (), generator=generator))
    end = start + shape.codes
    missing = max(0, end - len(clip.codes))
    codes = torch.cat((clip.codes[start:end], clip.codes[-1:].expand(missing)))
    states = torch.cat((clip.states[start:end], clip.states[-1:].expand(missing, -1))).float()
    first = start * shape.code_samples - shape.margin
    length = shape.samples + 2 * shape.margin
    wave = F.pad(clip.wave, (max(0, -first), max(0, first + length - len(clip.wave))))
    return wave[max(0, first) :][:length], codes, states


def crops(waves: list[Tensor], samples: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` crops of clips (L,), as (B, samples); shorter clips are padded with silence."""
    drawn = []
    for _ in range(count):
        wave = waves[int(torch.randint(len(waves), (), generator=generator))]
        wave = F.pad(wave, (0, max(0, samples - len(wave))))
        start = int(torch.randint(len(wave) - samples + 1, (), generator=generator))
        drawn.append(wave[start : start + samples])
    return torch.stack(drawn)
