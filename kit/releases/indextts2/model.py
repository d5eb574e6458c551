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
from kit.base.files import (
    atomic_folder,
    atomic_path,
    file_digest,
    make_folder,
    require_disk,
    write_atomic,
)
from kit.base.tensor_file import checksum, describe_mismatch, save_tensors
from kit.base.torch_file import read_torch_file, require_backed
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.releases.indextts2.names import (
    CONFIG_FILE,
    MARKS,
    SPEAKER_MARK,
    TEXT_ROWS_2_5,
    WEIGHTS_FILE,
    describe_version_2_5,
    from_file,
    gpt_config,
    is_indextts2,
    to_file,
    updated_config,
)
from kit.releases.indextts2.tokenizer import VOCABULARY_FILE, IndexTTS2Tokenizer, marked
from kit.releases.xtts_v2.model import Provenance, backed_tensor, finite_weights, write_torch
from kit.releases.xtts_v2.names import empty_model, fill_module

SAFE_FILE = "gpt.safetensors"
STATS_FILE = "wav2vec2bert_stats.pt"
OWN_FILES = (WEIGHTS_FILE, SAFE_FILE, CONFIG_FILE, VOCABULARY_FILE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexTTS2:
    """An IndexTTS2: its GPT as the kit's model, and its other files."""

    model: SpeechGPT  # fp32, eval mode
    settings: dict  # config.yaml; `save_indextts2` updates the sizes of the GPT in it
    tokenizer: bytes  # the SentencePiece model, with the kit's mark
    source: Provenance
    notes: tuple[str, ...] = ()


def load_indextts2(path: Path) -> IndexTTS2:
    """Read the IndexTTS2 in the folder `path`, or with the weights in the file `path`.

    Raises KitError or DamagedFileError for files that are missing, damaged, of version 2.5 or do
    not match.
    """
    path = Path(path)
    file = path if path.is_file() else path / WEIGHTS_FILE
    tensors = _read_weights(file)
    settings = read_yaml(file.parent / CONFIG_FILE)
    if not isinstance(settings, dict):
        raise KitError(f"{file.parent / CONFIG_FILE} holds no settings: copy it again.")
    config = gpt_config(settings, file.parent / CONFIG_FILE)
    vocabulary = file.parent / VOCABULARY_FILE
    data, notes = marked(vocabulary, config.text_vocab)
    _require_tensors(tensors, config, file)
    model = fill_module(empty_model(config), from_file(tensors, config), file)
    source = Provenance(path=str(file), sha256=file_digest(file), tensors_sha256=checksum(tensors))
    return IndexTTS2(
        model=model, settings=settings, tokenizer=data, source=source, notes=tuple(notes)
    )


def _read_weights(file: Path) -> dict[str, Tensor]:
    stored = read_torch_file(file)
    if isinstance(stored, dict) and isinstance(stored.get("model"), dict):
        stored = stored["model"]
    if not isinstance(stored, dict) or not is_indextts2(map(str, stored)):
        raise KitError(
            f"{file} is not the GPT of an IndexTTS2: it has no {' and no '.join(sorted(MARKS))}. "
            "Name the folder of a release, or its gpt.pth."
        )
    text = stored.get("text_embedding.weight")
    rows = len(text) if isinstance(text, Tensor) and text.ndim else 0
    if SPEAKER_MARK not in stored or rows == TEXT_ROWS_2_5:
        raise KitError(describe_version_2_5(file))
    return {str(name): backed_tensor(str(name), value, file) for name, value in stored.items()}


def _require_tensors(tensors: dict[str, Tensor], config: GPTConfig, file: Path) -> None:
    problems = describe_mismatch(tensors, to_file(empty_model(config).state_dict()))
    if problems:
        raise KitError(
            f"{file} does not hold the IndexTTS2 that its {CONFIG_FILE} describes; {problems}. "
            "Take weights, configuration and vocabulary from one place."
        )


def load_stats(folder: Path) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (1024,) of w2v-BERT's states, from the release."""
    file = folder / STATS_FILE
    stats = read_torch_file(file)
    try:
        mean, variance = (require_backed(name, stats[name]) for name in ("mean", "var"))
    except (KeyError, TypeError, ValueError) as error:
        raise KitError(f"{file} holds no mean and variance ({error}): copy it again.") from error
    if mean.shape != (1024,) or variance.shape != (1024,) or not bool((variance > 0).all()):
        raise KitError(
            f"{file} must hold 1,024 means and as many variances above 0; it holds "
            f"{tuple(mean.shape)} and {tuple(variance.shape)}. Copy it from the release."
        )
    return mean.float().clone(), variance.float().sqrt()


def save_indextts2(
    release: IndexTTS2, folder: Path, dtype: torch.dtype = torch.float32, readme: str = ""
) -> Path:
    """Write `release` to `folder` for the package's `IndexTTS2(model_dir=folder)` and the kit.

    Files: gpt.pth, the same tensors as gpt.safetensors, config.yaml, bpe.model, and a link to, or
    copy of, what else is beside the weights that it was read from. `dtype` is that of the weights.
    """
    folder = Path(folder)
    before = Path(release.source.path).parent
    if folder.resolve() == before.resolve() or folder.is_file():
        raise KitError(f"{folder} is a file, or what this was read from: name another folder.")
    config = release.model.config
    tokenizer = IndexTTS2Tokenizer.of(release.tokenizer)
    if (tokenizer.vocab_size, 0, 1) != (config.text_vocab, config.start_text, config.stop_text):
        raise KitError(
            f"The model has {config.text_vocab} text ids, the tokenizer {tokenizer.vocab_size}: "
            "use the one that the model was trained with."
        )
    weights = to_file(finite_weights(release.model, dtype))
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    make_folder(folder)
    require_disk(folder, 2 * sum(tensor.nbytes for tensor in tensors.values()))
    with atomic_folder(folder, OWN_FILES) as new:
        write_torch(new / WEIGHTS_FILE, tensors)
        with atomic_path(new / SAFE_FILE) as temporary:
            save_tensors(tensors, temporary, {"tensors_sha256": checksum(tensors)})
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
            shutil.copyfile(path, target)
