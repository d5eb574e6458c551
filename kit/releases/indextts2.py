"""Detect an IndexTTS2 GPT (Zhou et al. 2025), which the kit cannot use, by its tensors' names.

Its layers are those of an XTTS-v2, under nearly the same names, but its speaker conditioning and
its codes are different. docs/indextts2.md compares the two tensor by tensor.
"""

from collections.abc import Iterable
from pathlib import Path

from kit.base.errors import DamagedFileError
from kit.base.torch_file import read_torch_file

INDEXTTS2_FILE = "gpt.pth"
INDEXTTS2_REPOSITORIES = "IndexTeam/IndexTTS-2"  # prefix on the hub, of versions 2 and 2.5
# Layers of its emotion vector; no other model has both.
MARKS = {"emo_perceiver_encoder.latents", "emovec_layer.weight"}


def is_indextts2(names: Iterable[str]) -> bool:
    """Whether tensors of these `names` are the GPT of an IndexTTS2 (or 2.5)."""
    return set(names) >= MARKS


def describe_indextts2(where: Path | str) -> str:
    """Return why the kit cannot start from the IndexTTS2 at `where`."""
    return (
        f"{where} is the GPT of IndexTTS2. Its layers are those of an XTTS-v2, but the kit cannot "
        "use it: it encodes a reference with w2v-BERT 2.0 and its own speaker and emotion "
        "encoders, its codes are those of MaskGCT's semantic codec, and a flow model with BigVGAN "
        "decodes them. The kit has none of these, so it can neither encode recordings for it nor "
        "speak. Start from an XTTS-v2 or a voice of the kit; docs/indextts2.md says what would be "
        "needed."
    )


def indextts2_in(path: Path) -> Path | None:
    """Return the file of an IndexTTS2 GPT at `path` or in that folder.

    None if there is none or if it cannot be read, because then it is no voice either way.
    """
    file = path / INDEXTTS2_FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".pth":
        return None
    try:
        contents = read_torch_file(file)
    except DamagedFileError:
        return None
    if isinstance(contents, dict) and isinstance(contents.get("model"), dict):
        contents = contents["model"]
    return file if isinstance(contents, dict) and is_indextts2(map(str, contents)) else None
