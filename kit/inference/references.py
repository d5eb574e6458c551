"""The file `references.safetensors`: each speaker's log-mel and vector, and the voice's pace.

Shapes: M mels, T frames, S speaker width, L samples.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.reference import reference_mel, reference_mels, require_reference
from kit.audio.spectrogram import DEFAULT_MEL, Mel, MelConfig, front_end_config
from kit.base.config import build, require_within
from kit.base.errors import KitError, SpeechError
from kit.base.files import write_atomic
from kit.base.formatting import shorten
from kit.base.schema import checked
from kit.base.tensor_file import contents, file_bytes
from kit.model.text_attention import AlignmentHead

VECTORS = "__speakers__"  # the tensor (speakers, S), in the order of the header
RESERVED = ("__metadata__", VECTORS)  # the first is safetensors' own
MAX_MELS = 256
MAX_FRAMES = 20_000  # of a reference, some minutes: the conditioner attends to all of them
MAX_VECTOR_WIDTH = 8192
MAX_SPEAKERS = 100_000
HEADER = {
    "front_end": (dict, 0, 100),
    "vectors": (list, 0, MAX_SPEAKERS, (str, 0, 1000)),
    "pieces": (dict, 0, MAX_SPEAKERS, (list, 1, MAX_FRAMES, (int, 1, MAX_FRAMES))),
}
# Missing in older files, which always had the default front end.
HEADER_DEFAULTS = {"front_end": {}, "vectors": [], "pieces": {}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits:
    """What a voice learnt from its recordings: length, pace, and its alignment head."""

    longest_text: int = 0  # text ids of the longest recording; 0: unknown
    pace: float = 0.0  # codes a text id, of slow recordings; 0: unknown
    alignment_layer: int = -1  # of the head that follows the text; -1: unknown
    alignment_head: int = -1  # in that layer

    def __post_init__(self):
        require_within(self, 0, 1e6, "longest_text", "pace")
        require_within(self, -1, 1e6, "alignment_layer", "alignment_head")

    @property
    def head(self) -> AlignmentHead | None:
        """The head of the model that follows the text, if known."""
        if min(self.alignment_layer, self.alignment_head) < 0:
            return None
        return AlignmentHead(self.alignment_layer, self.alignment_head)

    def with_alignment_head(self, head: AlignmentHead | None) -> "Habits":
        """Return these with `head` as the alignment head."""
        layer, number = head or (-1, -1)
        return dataclasses.replace(self, alignment_layer=layer, alignment_head=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeakerReferences:
    """The contents of a references file."""

    mels: dict[str, Tensor]  # speaker -> log-mel (M, T)
    vectors: dict[str, Tensor]  # speaker -> (S,), if the codec takes speaker vectors
    pieces: dict[str, list[int]]  # speaker -> frames of each segment; missing: one segment
    habits: Habits
    front_end: MelConfig  # of the log-mels


def save_references(
    references: dict[str, Tensor],
    path: Path,
    habits: Habits = Habits(),
    front_end: MelConfig = DEFAULT_MEL,
    vectors: dict[str, Tensor] | None = None,
    pieces: dict[str, list[int]] | None = None,
) -> None:
    """Write a `SpeakerReferences` to `path`: log-mels in fp16, vectors in fp32.

    Raises SpeechError for a reserved speaker name.
    """
    for name in RESERVED:
        if name in references:
            raise SpeechError(f"The speaker name `{name}` is reserved: choose another.")
    tensors = {name: mel.half().contiguous() for name, mel in references.items()}
    header = dataclasses.asdict(habits)
    header["front_end"] = dataclasses.asdict(front_end)
    if vectors:
        header["vectors"] = sorted(vectors)
        tensors[VECTORS] = torch.stack([vectors[name].float().cpu() for name in sorted(vectors)])
    if pieces:
        header["pieces"] = {name: list(frames) for name, frames in pieces.items()}
    write_atomic(path, file_bytes(tensors, header))


def load_references(path: Path, fix: str = "run notebook 02_train.") -> SpeakerReferences:
    """Load what `save_references` wrote. Raises SpeechError, with `fix`, if missing or damaged."""
    if not path.is_file():
        raise SpeechError(f"There is no {path}: {fix}")
    try:
        tensors, header = contents(path)
        parts = {key: header.pop(key, default) for key, default in HEADER_DEFAULTS.items()}
        parts = checked(parts, HEADER, "its header")
        vectors = tensors.pop(VECTORS, torch.zeros(0, 1))
        require_tensors(tensors, vectors, parts)
        # Copies: Windows cannot overwrite a file that is still memory-mapped.
        return SpeakerReferences(
            mels={name: mel.clone() for name, mel in tensors.items()},
            vectors=dict(zip(parts["vectors"], vectors.clone())),
            pieces=parts["pieces"],
            habits=build(Habits, header),
            front_end=front_end_config(parts["front_end"]),
        )
    except (OSError, KitError) as error:
        raise SpeechError(f"{path} ({shorten(error, 400)}): {fix}") from error


def require_tensors(mels: dict[str, Tensor], vectors: Tensor, parts: dict) -> None:
    """Raise KitError unless the tensors of a references file are what its header says."""
    for name, mel in mels.items():
        require_matrix(f"the reference of {name!r}", mel, MAX_MELS, MAX_FRAMES)
    require_matrix("the tensor of speaker vectors", vectors, MAX_SPEAKERS, MAX_VECTOR_WIDTH)
    if len(vectors) != len(parts["vectors"]):
        raise KitError(f"it has {len(vectors)} speaker vectors for {len(parts['vectors'])} names")
    for name, frames in parts["pieces"].items():
        total = mels[name].shape[1] if name in mels else 0
        if sum(frames) != total:
            raise KitError(f"the reference of {name!r} has {total} frames, its segments {frames}")


def require_matrix(what: str, tensor: Tensor, max_rows: int, max_columns: int) -> None:
    """Raise KitError unless `tensor` is a matrix of floats of at most that size."""
    rows, columns = tensor.shape if tensor.ndim == 2 else (0, 0)
    if not (tensor.is_floating_point() and rows <= max_rows and 1 <= columns <= max_columns):
        raise KitError(
            f"{what} has shape {tuple(tensor.shape)} and type {tensor.dtype}: it must be a matrix "
            f"of floats, at most {max_rows:,} by {max_columns:,}"
        )


def prepare_reference(wave: Tensor, sample_rate: int, front_end: Mel, frames: int) -> list[Tensor]:
    """Return the log-mels (M, T) of a reference (L,), as in training.

    Its loudest `frames` (0: all), or every segment if the front end works in segments. Raises
    SpeechError for a recording without speech.
    """
    require_reference(wave, sample_rate)
    if front_end.in_pieces:
        return reference_mels(wave, sample_rate, front_end)
    mel = front_end.clip_mel(wave, sample_rate)
    return [reference_mel(mel, frames or mel.shape[-1])]
