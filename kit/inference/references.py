"""What a voice keeps of its speakers: how each sounds to the GPT, and to a codec that asks for it.

One file, `references.safetensors`, with the habits of the voice beside it. Runs no model and reads
no text.

Shapes: M mels, T frames, S speaker width, L samples.
"""

import dataclasses
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from kit.audio.reference import reference_mel, reference_mels, require_reference
from kit.audio.spectrogram import DEFAULT_MEL, Mel, MelConfig, front_end_config
from kit.base.config import build, require_within
from kit.base.errors import SpeechError
from kit.base.files import write_atomic
from kit.base.tensor_file import contents, file_bytes
from kit.model.alignment_head import AlignmentHead

VECTORS = "__speakers__"  # the tensor (speakers, S), in the order that the header tells
RESERVED = ("__metadata__", VECTORS)  # the first is safetensors' own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits:
    """How a voice reads: as the recordings were spoken that it was trained on."""

    longest_text: int = 0  # ids said in one go; 0: not known
    pace: float = 0.0  # codes a text id takes where it is slow; 0: not known
    alignment_layer: int = -1  # of the head that follows the text; -1: none is known to
    alignment_head: int = -1  # in that layer

    def __post_init__(self):
        require_within(self, 0, 1e6, "longest_text", "pace")
        require_within(self, -1, 1e6, "alignment_layer", "alignment_head")

    @property
    def head(self) -> AlignmentHead | None:
        """The head of the voice's model that follows the text, where one is known to."""
        if min(self.alignment_layer, self.alignment_head) < 0:
            return None
        return AlignmentHead(self.alignment_layer, self.alignment_head)

    def with_alignment_head(self, head: AlignmentHead | None) -> "Habits":
        """These habits, with `head` as the one that follows the text."""
        layer, number = head or (-1, -1)
        return dataclasses.replace(self, alignment_layer=layer, alignment_head=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeakerReferences:
    """What a references file holds."""

    mels: dict[str, Tensor]  # speaker -> log-mel (M, T)
    vectors: dict[str, Tensor]  # speaker -> (S,), where the codec asks who speaks
    pieces: dict[str, list[int]]  # speaker -> frames of each piece; not there: it is one
    habits: Habits
    front_end: MelConfig  # what made the log-mels


def save_references(
    references: dict[str, Tensor],
    path: Path,
    habits: Habits = Habits(),
    front_end: MelConfig = DEFAULT_MEL,
    vectors: dict[str, Tensor] | None = None,
    pieces: dict[str, list[int]] | None = None,
) -> None:
    """Write a `SpeakerReferences` to `path`: log-mels as half floats, vectors as floats.

    Raises SpeechError for a speaker with a name that such files keep for themselves.
    """
    for name in RESERVED:
        if name in references:
            raise SpeechError(f"No speaker can be called `{name}`: name them otherwise.")
    tensors = {name: mel.half().contiguous() for name, mel in references.items()}
    header = dataclasses.asdict(habits)
    header["front_end"] = dataclasses.asdict(front_end)
    if vectors:
        header["vectors"] = sorted(vectors)
        tensors[VECTORS] = torch.stack([vectors[name].float().cpu() for name in sorted(vectors)])
    if pieces:
        header["pieces"] = {name: list(frames) for name, frames in pieces.items()}
    write_atomic(path, file_bytes(tensors, header))


def load_references(path: Path) -> SpeakerReferences:
    """What `save_references` wrote. Raises SpeechError when it is missing or damaged."""
    if not path.is_file():
        raise SpeechError(f"There is no {path}: run notebook 02_train.")
    try:
        tensors, header = contents(path)
        # Earlier versions did not note it: theirs was always the one that is the default now.
        front_end = front_end_config(header.pop("front_end", {}))
        names = header.pop("vectors", [])
        pieces = header.pop("pieces", {})
        # Copies: what is still mapped from a file keeps Windows from writing that file again.
        mels = {name: tensor.clone() for name, tensor in tensors.items()}
        stacked = mels.pop(VECTORS, torch.zeros(0, 0))
        require_pieces(mels, pieces)
        return SpeakerReferences(
            mels=mels,
            vectors=dict(zip(names, stacked, strict=True)),
            pieces=pieces,
            habits=build(Habits, header),
            front_end=front_end,
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise SpeechError(f"{path} ({error}): run notebook 02_train.") from error


def require_pieces(mels: dict[str, Tensor], pieces: dict[str, list[int]]) -> None:
    """Raise ValueError unless `pieces` cut `mels` without a rest."""
    for name, frames in pieces.items():
        there = mels[name].shape[-1]
        if min(frames, default=0) < 1 or sum(frames) != there:
            raise ValueError(f"the reference of {name!r} has {there} frames, its pieces {frames}")


def prepare_reference(wave: Tensor, sample_rate: int, front_end: Mel, frames: int) -> list[Tensor]:
    """The log-mels (M, T) of a reference (L,) as a voice was trained to hear one.

    The loudest `frames` of it (0: the whole); but where the front end listens in pieces, each of
    them. Raises SpeechError for one that no voice can be heard in.
    """
    require_reference(wave, sample_rate)
    if front_end.in_pieces:
        return reference_mels(wave, sample_rate, front_end)
    mel = front_end.clip_mel(wave, sample_rate)
    return [reference_mel(mel, frames or mel.shape[-1])]
