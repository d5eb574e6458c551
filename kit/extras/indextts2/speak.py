"""IndexTTS2 speaks by its own package, from a folder that `save_indextts2` wrote."""

from pathlib import Path

import torch
from torch import Tensor

from kit.base.config import read_yaml
from kit.base.errors import KitError
from kit.extras.indextts2.codec import package
from kit.extras.indextts2.model import CONFIG_FILE
from kit.text.normalize import normalize

EXPORT_FOLDER = "indextts2"  # in that of a run
# Settings of config.yaml that name what only the package speaks with.
ITS_OWN = ("s2mel_checkpoint", "emo_matrix", "spk_matrix", "qwen_emo_path")
README = """# A fine-tuned IndexTTS2

The kit speaks from this folder: `python -m kit speak --voice . --text "..." --out speech.wav`. So
does the package (`pip install indextts2-inference`), if it is given texts as the voice has learnt
them: normalised by the kit, and not by the package, whose rules are for Chinese, English and
Spanish. It splits sentences only at `.`, `!` and `?`: give them one by one.

    from indextts import IndexTTS2
    from kit.text.normalize import normalize
    tts = IndexTTS2(model_dir=".")
    tts.tokenizer.normalizer = None
    tts.infer("reference.wav", normalize("...", "{language}", {respell}), "speech.wav")

With transformers 5.3 the package decodes as published; with 5.24 it runs without its cache, slower,
and its first code has another position.

This model is made from IndexTTS2, which is under the bilibili Model Use License Agreement. Its
conditions bind whoever is given it: pass the licence on.
"""


def missing_files(folder: Path) -> list[str]:
    """What the package speaks with and `folder` lacks: files, or their settings of config.yaml."""
    settings = read_yaml(folder / CONFIG_FILE)
    missing = []
    for name in ITS_OWN:
        file = settings.get(name)
        if not file or not (folder / file).exists():
            missing.append(str(file or f"`{name}` in {CONFIG_FILE}"))
    return missing


class PackageSpeaker:
    """The fine-tuned IndexTTS2 in `folder`, which speaks in the voice of a recording.

    Raises KitError where the export, the package or a file that it speaks with is missing.
    """

    sample_rate = 22_050

    def __init__(self, folder: Path, reference: str = ""):
        if not (folder / CONFIG_FILE).is_file():
            raise KitError(f"There is no {folder}: export the voice first (07_finetune_xtts).")
        self.reference = Path(reference or folder / "reference.wav").expanduser()
        if not self.reference.is_file():
            raise KitError(f"There is no {self.reference}: give a recording as the reference.")
        indextts = package("infer_v2")
        missing = missing_files(folder)
        if missing:
            raise KitError(
                f"{folder} lacks {', '.join(missing)}, with which the package makes sound: copy "
                "them from the release (hf download IndexTeam/IndexTTS-2)."
            )
        settings = read_yaml(folder / CONFIG_FILE)
        self.language = settings.get("language", "en")
        self.respell = settings.get("respell", True)
        self.tts = indextts.IndexTTS2(model_dir=str(folder))
        self.tts.tokenizer.normalizer = None  # texts are normalised as in training

    def speak(self, text: str) -> Tensor:
        """Return the waveform (L,) of `text`."""
        text = normalize(text, self.language, self.respell)
        _, samples = self.tts.infer(str(self.reference), text, None)
        return torch.from_numpy(samples[:, 0].copy()).float() / 2**15  # from (L, 1), 16 bits
