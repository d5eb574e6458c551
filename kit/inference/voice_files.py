"""Load the voice in a run's folder, and check that its parts belong together.

`sound.safetensors` is the run's codec with its decoder trained further on the hidden states of the
run's weights, whose SHA-256 it stores: it is of no use with others. `references.safetensors` holds
each speaker's log-mel and vector, and the voice's pace. `export` loads exported voices.

Shapes: M mels, T frames, S speaker width.
"""

import dataclasses
import warnings
from pathlib import Path

import torch
from torch import Tensor

from kit.audio.codec import Codec, load_codec
from kit.audio.spectrogram import DEFAULT_MEL, front_end_config, make_front_end
from kit.base.config import build, checked
from kit.base.errors import KitError, Note, SpeechError
from kit.base.files import file_digest, write_atomic
from kit.base.formatting import shorten
from kit.base.hardware import set_cuda_defaults
from kit.base.tensor_file import contents, file_bytes, save_module, saved_header, tensors_sha256
from kit.inference.candidates import load_matching_reader
from kit.inference.voice import Habits, Voice
from kit.model.weights import WEIGHTS, load_model, trained_with
from kit.settings import MelConfig
from kit.text.normalize import language_code
from kit.text.tokenizer import load_tokenizer

SOUND = "sound.safetensors"
CODEC = "codec.safetensors"
STALE = (
    f"the codec decodes without hidden states, because {SOUND} was trained with other weights: run "
    "`sound()` of notebook 02_train to train it again"
)
VECTORS = "__speakers__"  # the tensor (speakers, S), in the order of the header
MAX_MELS = 1024
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


def load_voice(
    folder: Path, weights: str = WEIGHTS["ema"], language: str = "am", device: str = "cpu"
) -> Voice:
    """Load the voice in a run's folder in its default format. Raises KitError."""
    set_cuda_defaults()
    language = language_code(language)
    folder = Path(folder)
    files = {
        "model": folder / weights,
        "codec": folder / CODEC,
        "tokenizer": folder / "tokenizer.model",
        "references": folder / "references.safetensors",
    }
    fix = "run notebooks 01_data_prep to 02_train again, in a run of its own."
    note = ""
    if codec_matches_weights(folder, files["model"]):
        codec = load_codec(folder / SOUND, "delete it, or run `sound()` of 02_train again.")
    else:
        codec = load_codec(folder / CODEC)
        note = STALE if (folder / SOUND).exists() else ""
    voice = Voice(
        model=load_model(files["model"]),
        codec=codec,
        tokenizer=load_tokenizer(files["tokenizer"], language),
        language=language,
        note=note,
        **load_references(files["references"]),
    )
    require_matching(voice, files, fix)
    hashes = {files[part].name: file_digest(files[part]) for part in ("tokenizer", "codec")}
    # Two runs with one preset have the same sizes, but their ids mean different things.
    expected = trained_with(files["model"])
    for name, found in hashes.items():
        if expected.get(name) not in (None, "", found):
            raise SpeechError(
                f"{folder / name} is not the one that {files['model']} was trained with: its ids "
                f"mean something else. Restore that one, or {fix}"
            )
    voice.reader = load_matching_reader(folder, hashes)
    return voice.to(device).in_format()


def load_voices(folder: Path, language: str = "am", device: str = "cpu") -> dict[str, Voice]:
    """Load the voice of each set of weights in a run's folder: "raw", and "ema" if there is one."""
    return {
        name: load_voice(folder, file, language, device)
        for name, file in WEIGHTS.items()
        # Missing raw weights (training has not finished) raise an error.
        if name == "raw" or (Path(folder) / file).is_file()
    }


def require_matching(voice: Voice, files: dict[str, Path], fix: str) -> None:
    """Raise SpeechError, ending with `fix`, unless the parts of `voice`, read from `files`, fit."""
    config = voice.model.config
    codec = voice.codec
    sizes = [
        ("tokenizer", "text ids", voice.tokenizer.vocab_size, config.text_vocab),
        ("codec", "codes, START and STOP included", codec.vocab_size + 2, config.code_vocab),
        ("references", "mels of their front end", voice.front_end.config.n_mels, config.n_mels),
    ]
    frames = None
    for speaker, mel in voice.references.items():
        sizes.append(("references", f"mels of {speaker!r}", mel.shape[0], config.n_mels))
        if speaker not in voice.pieces:
            frames = frames or mel.shape[-1]
            sizes.append(("references", f"frames of {speaker!r}", mel.shape[-1], frames))
        if voice.decodes_from_states:
            width = voice.vectors.get(speaker, torch.zeros(0)).numel()
            what = f"numbers in the speaker vector of {speaker!r}"
            sizes.append(("references", what, width, codec.speaker_width))
    for part, what, actual, expected in sizes:
        if actual != expected:
            raise SpeechError(
                f"{files[part]} has {actual:,} {what}, {files['model']} expects {expected:,}: "
                f"they are of different runs. Use both from one run, or {fix}"
            )
    head = voice.habits.head
    if head and not (head.layer < config.layers and head.head < config.heads):
        raise SpeechError(
            f"{files['references']} names head {head.head} in layer {head.layer}, "
            f"{files['model']} has {config.layers} layers of {config.heads} heads: they are of "
            f"different runs. Use both from one run, or {fix}"
        )
    if not voice.references:
        raise SpeechError(f"{files['references']} has no speaker: {fix}")


def save_finetuned_codec(codec: Codec, folder: Path, weights: list[Path]) -> None:
    """Write `codec`, trained on the states of the models in `weights`, to a run's `folder`."""
    hashes = [tensors_sha256(path) for path in weights]
    config = dataclasses.asdict(codec.config)
    save_module(folder / SOUND, codec, config=config, states_of=hashes)


def codec_matches_weights(folder: Path, weights: Path) -> bool:
    try:
        hashes = saved_header(folder / SOUND).get("states_of")
    except (OSError, KitError):
        return False  # missing or damaged: the run's plain codec is used
    return isinstance(hashes, list) and tensors_sha256(weights) in hashes


def load_finetuned_codec(folder: Path, weights: list[Path]) -> Codec | None:
    """Return the codec trained on the states of all `weights`; None if missing or damaged."""
    if not all(codec_matches_weights(folder, path) for path in weights):
        return None
    try:
        return load_codec(folder / SOUND)
    except KitError:
        note = f"{folder / SOUND} is damaged: it is made again."
        warnings.warn(note, category=Note, stacklevel=2)
        return None


# --- references.safetensors -----------------------------------------------------------------------


def save_references(
    references: dict[str, Tensor],
    path: Path,
    habits: Habits | None = None,
    front_end: MelConfig = DEFAULT_MEL,
    vectors: dict[str, Tensor] | None = None,
    pieces: dict[str, list[int]] | None = None,
) -> None:
    """Write fields of a `Voice` to `path`: log-mels in fp16, vectors in fp32.

    Raises SpeechError for a reserved speaker name.
    """
    for name in ("__metadata__", VECTORS):  # the first is safetensors' own
        if name in references:
            raise SpeechError(f"The speaker name `{name}` is reserved: choose another.")
    tensors = {name: mel.half().contiguous() for name, mel in references.items()}
    header = dataclasses.asdict(habits or Habits())
    header["front_end"] = dataclasses.asdict(front_end)
    if vectors:
        header["vectors"] = sorted(vectors)
        tensors[VECTORS] = torch.stack([vectors[name].float().cpu() for name in sorted(vectors)])
    if pieces:
        header["pieces"] = {name: list(frames) for name, frames in pieces.items()}
    write_atomic(path, file_bytes(tensors, header))


def load_references(path: Path, fix: str = "run notebook 02_train.") -> dict:
    """Return the fields of a `Voice` that `save_references` wrote to `path`.

    Raises SpeechError, with `fix`, if it is missing or damaged.
    """
    if not path.is_file():
        raise SpeechError(f"There is no {path}: {fix}")
    try:
        tensors, header = contents(path)
        parts = {key: header.pop(key, default) for key, default in HEADER_DEFAULTS.items()}
        parts = checked(parts, HEADER, "its header")
        vectors = tensors.pop(VECTORS, torch.zeros(0, 1))
        for name, mel in tensors.items():
            require_matrix(f"the reference of {name!r}", mel, MAX_MELS, MAX_FRAMES)
        require_matrix("the speaker vectors", vectors, MAX_SPEAKERS, MAX_VECTOR_WIDTH)
        if len(vectors) != len(parts["vectors"]):
            raise KitError(f"it has {len(vectors)} vectors for {len(parts['vectors'])} speakers")
        for name, frames in parts["pieces"].items():
            total = tensors[name].shape[1] if name in tensors else 0
            if sum(frames) != total:
                raise KitError(
                    f"the reference of {name!r} has {total} frames, its segments {frames}"
                )
        # Copies: the file, which stays mapped otherwise, may be overwritten.
        return {
            "references": {name: mel.clone() for name, mel in tensors.items()},
            "vectors": dict(zip(parts["vectors"], vectors.clone())),
            "pieces": parts["pieces"],
            "habits": build(Habits, header),
            "front_end": make_front_end(front_end_config(parts["front_end"])),
        }
    except (OSError, KitError) as error:
        raise SpeechError(f"{path} ({shorten(error, 400)}): {fix}") from error


def require_matrix(what: str, tensor: Tensor, max_rows: int, max_columns: int) -> None:
    rows, columns = tensor.shape if tensor.ndim == 2 else (0, 0)
    if not (tensor.is_floating_point() and rows <= max_rows and 1 <= columns <= max_columns):
        raise KitError(
            f"{what} has shape {tuple(tensor.shape)} and type {tensor.dtype}: it must be a matrix "
            f"of floats, at most {max_rows:,} by {max_columns:,}"
        )
