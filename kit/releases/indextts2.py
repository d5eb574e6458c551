"""IndexTTS2's GPT, recognised so that a person is told what it is (Zhou et al. 2025).

Its layers are those of an XTTS-v2, under nearly the same names; what they are given of a voice and
what their codes mean is not. docs/indextts2.md compares the two tensor by tensor. Knows names of
tensors alone.
"""

from collections.abc import Iterable
from pathlib import Path

from kit.base.errors import DamagedFileError
from kit.base.torch_file import read_torch_file

INDEXTTS2_FILE = "gpt.pth"
INDEXTTS2_REPOSITORIES = "IndexTeam/IndexTTS-2"  # how their names on the hub begin: 2, 2.5
# The emotion of a reference is one vector there; nothing else has both.
MARKS = {"emo_perceiver_encoder.latents", "emovec_layer.weight"}


def is_indextts2(names: Iterable[str]) -> bool:
    """Whether tensors of these `names` are the GPT of an IndexTTS2 (or 2.5)."""
    return set(names) >= MARKS


def told_indextts2(where: Path | str) -> str:
    """In words, what lies at `where` and why the kit cannot begin with it."""
    return (
        f"{where} is the GPT of IndexTTS2. Its layers are an XTTS-v2's, but it is no voice for the "
        "kit: it hears a reference through w2v-BERT 2.0, a speaker and an emotion encoder of its "
        "own, its codes are those of MaskGCT's semantic codec, and sound is made of them by a flow "
        "model with BigVGAN. The kit has none of these, so it can neither make codes of recordings "
        "for it nor speak. Begin with an XTTS-v2 or a voice of the kit's; docs/indextts2.md says "
        "what would be needed."
    )


def indextts2_in(path: Path) -> Path | None:
    """The file of an IndexTTS2's GPT that `path` means, itself or in that folder.

    None where there is none, and where it cannot be read: then it is no voice either way.
    """
    file = path / INDEXTTS2_FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".pth":
        return None
    try:
        found = read_torch_file(file)
    except DamagedFileError:
        return None
    if isinstance(found, dict) and isinstance(found.get("model"), dict):
        found = found["model"]
    return file if isinstance(found, dict) and is_indextts2(map(str, found)) else None
