"""Reads a released IndexTTS2 (Zhou et al. 2025) into the kit's own model, and writes one.

A release is a folder: `gpt.pth`, `config.yaml`, `bpe.model`, `wav2vec2bert_stats.pt`, and what only
the package speaks with. No code in the files is run, and every tensor must be known.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import torch
import yaml
from torch import Tensor

from kit.base.config import read_yaml
from kit.base.errors import KitError
from kit.base.files import atomic_folder, atomic_path, make_folder, require_disk, write_atomic
from kit.base.formatting import shorten
from kit.base.torch_file import read_torch_file, require_backed
from kit.extras.indextts2.tokenizer import VOCABULARY_FILE, IndexTTS2Tokenizer, marked
from kit.extras.xtts_v2 import model as xtts
from kit.extras.xtts_v2.tensor_names import GPT, released_name, to_released
from kit.model.gpt import SpeechGPT
from kit.settings import GPTConfig

WEIGHTS_FILE = "gpt.pth"
CONFIG_FILE = "config.yaml"
INDEXTTS2_REPOSITORY = "IndexTeam/IndexTTS-2"  # on the hub
# Layers of the emotion vector of an IndexTTS2 (or 2.5); no other model has both.
MARKS = {"emo_perceiver_encoder.latents", "emovec_layer.weight"}
# The first layer of the speaker encoder that version 2.5 replaced.
SPEAKER_MARK = "conditioning_encoder.embed.conv.0.weight"
LATENTS = 34  # 32 of the speaker, 2 of the length

# {field of GPTConfig: name in section `gpt`}, and what its classes add.
SIZES = {
    "layers": "layers",
    "width": "model_dim",
    "heads": "heads",
    "text_vocab": "number_text_tokens",
    "code_vocab": "number_mel_codes",
    "max_text": "max_text_tokens",
    "max_code": "max_mel_tokens",
    "start_text_id": "start_text_token",
    "stop_text_id": "stop_text_token",
    "start_code_id": "start_mel_token",
    "stop_code_id": "stop_mel_token",
}
EXTRA = {"text_vocab": 1, "max_text": 2, "max_code": 3}
ENCODERS = ("condition_module", "emo_condition_module")
ENCODER_SIZES = ("output_size", "linear_units", "attention_heads", "num_blocks", "perceiver_mult")
STATS_FILE = "wav2vec2bert_stats.pt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTTS2:
    """An IndexTTS2: its GPT as the kit's model, and its other files."""

    model: SpeechGPT  # fp32, eval mode
    settings: dict  # config.yaml; `save_indextts2` updates the sizes of the GPT in it
    tokenizer: bytes  # the SentencePiece model, with the kit's mark
    source: dict  # as `xtts.provenance` says


def load_indextts2(path: Path) -> IndexTTS2:
    """Read the IndexTTS2 in the folder `path`, or with the weights in the file `path`.

    Raises KitError or DamagedFileError for files that are missing, damaged, of version 2.5 or do
    not match.
    """
    file = path if path.is_file() else path / WEIGHTS_FILE
    tensors = _read_weights(file)
    settings = read_yaml(file.parent / CONFIG_FILE)
    if not isinstance(settings, dict):
        raise KitError(f"{file.parent / CONFIG_FILE} holds no settings: copy it again.")
    config = gpt_config(settings, file.parent / CONFIG_FILE)
    data = marked(file.parent / VOCABULARY_FILE, config.text_vocab)
    model = xtts.build_model(tensors, config, file, "IndexTTS2", file_name)
    source = xtts.provenance(file, tensors)
    return IndexTTS2(model=model, settings=settings, tokenizer=data, source=source)


def _read_weights(file: Path) -> dict[str, Tensor]:
    stored = read_torch_file(file)
    if isinstance(stored, dict) and isinstance(stored.get("model"), dict):
        stored = stored["model"]
    if not isinstance(stored, dict) or not MARKS.issubset(map(str, stored)):
        missing = " and no ".join(sorted(MARKS))
        raise KitError(
            f"{file} is not the GPT of an IndexTTS2: it has no {missing}. "
            "Name the folder of a release, or its gpt.pth."
        )
    if SPEAKER_MARK not in stored:
        raise KitError(
            f"{file} is IndexTTS2 of version 2.5 (one latent of CAMPPlus in place of the speaker "
            "encoder), and the kit trains version 2: take IndexTeam/IndexTTS-2."
        )
    return {str(n): xtts.backed_tensor(str(n), value, file) for n, value in stored.items()}


def load_stats(folder: Path) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (1024,) of w2v-BERT's states, from the release."""
    file = folder / STATS_FILE
    stats = read_torch_file(file)
    try:
        mean, variance = (require_backed(name, stats[name]) for name in ("mean", "var"))
        if mean.shape != (1024,) or variance.shape != (1024,) or not bool((variance > 0).all()):
            raise ValueError(f"it holds {tuple(mean.shape)} and {tuple(variance.shape)}")
    except (KeyError, TypeError, ValueError) as error:
        raise KitError(
            f"{file} must hold 1,024 means `mean` and as many variances `var` above 0 ({error}): "
            "copy it from the release."
        ) from error
    return mean.float().clone(), variance.float().sqrt()


def save_indextts2(
    release: IndexTTS2, folder: Path, dtype: torch.dtype = torch.float32, readme: str = ""
) -> Path:
    """Write `release` to `folder` for the package's `IndexTTS2(model_dir=folder)` and the kit.

    Files: gpt.pth, config.yaml, bpe.model, and a link to, or copy of, what else is beside the
    weights that it was read from. `dtype` is that of the weights.
    """
    before = Path(release.source["path"]).parent
    if folder.resolve() == before.resolve() or folder.is_file():
        raise KitError(f"{folder} is a file, or what this was read from: name another folder.")
    config = release.model.config
    assert IndexTTS2Tokenizer.of(release.tokenizer).vocab_size == config.text_vocab
    weights = to_released(xtts.finite_weights(release.model, dtype), file_name)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    make_folder(folder)
    require_disk(folder, sum(tensor.nbytes for tensor in tensors.values()))
    with atomic_folder(folder, (WEIGHTS_FILE, CONFIG_FILE, VOCABULARY_FILE)) as new:
        xtts.write_torch(new / WEIGHTS_FILE, tensors)
        settings = updated_config(release.settings, config)
        write_atomic(new / CONFIG_FILE, yaml.safe_dump(settings, sort_keys=False))
        write_atomic(new / VOCABULARY_FILE, release.tokenizer)
        if readme:
            write_atomic(new / "README.md", readme)
    _add_others(before, folder)
    return folder


def _add_others(before: Path, folder: Path) -> None:
    """Link or copy to `folder` what it lacks of the files in and below `before`."""
    for path in sorted(before.rglob("*")):
        relative = path.relative_to(before)
        target = folder / relative
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_dir() or target.exists() or folder in path.parents or hidden:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), target)
        except OSError:  # another disk
            with atomic_path(target) as temporary:
                shutil.copyfile(path, temporary)


# --- names and sizes ------------------------------------------------------------------------------


def indextts2_in(folder: Path) -> bool:
    """Whether `folder` has the files of an IndexTTS2, by their names."""
    return all((folder / name).is_file() for name in (WEIGHTS_FILE, CONFIG_FILE))


def file_name(name: str) -> str:
    """Return the release's name of a tensor of the kit: an XTTS-v2's, without the first `gpt.`.

    Tensors of the conditioning have the release's names in the kit, too.
    """
    conditioner = "conditioner."
    if name.startswith(conditioner):
        return name.removeprefix(conditioner)
    return released_name(name).removeprefix(GPT)


def gpt_config(settings: dict, file: Path) -> GPTConfig:
    """Return the GPT that the configuration in `file` describes. Raises KitError if it is none."""
    gpt = settings.get("gpt")
    try:
        sizes = {field: int(gpt[name]) + EXTRA.get(field, 0) for field, name in SIZES.items()}
        conformers = tuple(int(gpt[name][size]) for name in ENCODERS for size in ENCODER_SIZES)
        return GPTConfig(
            latents=LATENTS,
            n_mels=1024,
            dropout=xtts.DROPOUT,
            stop_targets=2,  # as its forward pass makes rows
            conformers=conformers,
            **sizes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise KitError(
            f"{file} describes no GPT of an IndexTTS2 ({shorten(error)}): copy it from the "
            "same place as the weights."
        ) from error


def updated_config(settings: dict, config: GPTConfig) -> dict:
    """Return `settings` with the sizes of `config` in section `gpt`."""
    sizes = {name: getattr(config, field) - EXTRA.get(field, 0) for field, name in SIZES.items()}
    return settings | {"gpt": settings["gpt"] | sizes}
