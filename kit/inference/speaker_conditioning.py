"""Does a voice hear who is to speak? What a code costs it, told whose reference.

A model may read well and never listen to a reference: then all its speakers sound alike. Codes of a
speaker who is heard cost less with a reference of that speaker than with one of somebody else.
"""

import dataclasses

import torch
from torch import Tensor

from kit.audio.clip import resampled
from kit.inference.voice import Voice
from kit.model.sequence import pack

ROWS_AT_ONCE = 16
LEAST_GAIN = 0.001  # of the cost of a code, below which nothing is heard


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledClip:
    text: str
    speaker: str
    wave: Tensor  # (L,) at the codec's `sample_rate`


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeakerLoss:
    """Nats a code, over the recordings of a speaker."""

    own: float  # told a reference of that speaker
    other: float  # told one of somebody else

    @property
    def uses_reference(self) -> bool:
        return self.other - self.own > LEAST_GAIN * self.own


def loss_by_speaker(voice: Voice, recordings: list[LabeledClip]) -> dict[str, SpeakerLoss]:
    """What the codes of each speaker's recordings cost; nothing for a voice with one speaker.

    Somebody else is the next speaker by name. Recordings that are too long for the model, or of a
    speaker it has no reference of, are left out.
    """
    names = voice.speakers
    if len(names) < 2:
        return {}
    found = {}
    for name, other in zip(names, names[1:] + names[:1]):
        rows = coded(voice, [each for each in recordings if each.speaker == name])
        if rows:
            found[name] = SpeakerLoss(own=cost(voice, rows, name), other=cost(voice, rows, other))
    return found


def coded(voice: Voice, recordings: list[LabeledClip]) -> list[tuple[list[int], list[int]]]:
    """Text ids and codes of those recordings that fit into the model."""
    shape = voice.model.config
    rows = []
    for each in recordings:
        heard = resampled(each.wave, voice.codec.sample_rate, voice.codec.input_sample_rate)
        codes = voice.codec.encode(heard[None])[0].tolist()
        ids = voice.ids(each.text)
        if len(ids) + 2 <= shape.max_text and len(codes) + 2 <= shape.max_code:
            rows.append((ids, codes))
    return sorted(rows, key=lambda row: len(row[1]))  # like lengths together


@torch.inference_mode()
def cost(voice: Voice, rows: list[tuple[list[int], list[int]]], speaker: str) -> float:
    """Nats a code of `rows`, text ids and codes, told that `speaker` says them."""
    device = voice.model.final_norm.weight.device
    reference = voice.reference(speaker).to(device)
    nats = codes = 0
    for first in range(0, len(rows), ROWS_AT_ONCE):
        texts, said = zip(*rows[first : first + ROWS_AT_ONCE])
        batch = pack(voice.model.config, texts, said, reference.expand(len(texts), -1, -1))
        _, loss = voice.model(batch.to(device))
        nats += loss.item()
        codes += len(batch.code_targets)
    return nats / codes
