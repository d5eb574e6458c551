"""Load the voice in a run's folder, and check that its parts belong together.

Training leaves a model, a codec, a tokenizer, references and perhaps a code reader; parts of
different runs would speak gibberish. `sound.safetensors` is the run's codec with its decoder
trained further on the hidden states of the run's weights; it is of no use with any other weights,
so it stores their SHA-256. Exported voices are loaded by `export`.
"""

import dataclasses
import warnings
from pathlib import Path

import torch

from kit.audio.codec import Codec, load_codec
from kit.audio.spectrogram import make_front_end
from kit.base.config import require_within
from kit.base.errors import DamagedFileError, KitError, SpeechError
from kit.base.files import file_digest
from kit.base.hardware import set_cuda_defaults
from kit.base.notes import Note
from kit.base.tensor_file import save_module, saved_header, tensors_sha256
from kit.inference.code_reader import READER, load_matching_reader
from kit.inference.references import load_references
from kit.inference.voice import Voice
from kit.model.weights import WEIGHTS, load_model, trained_with
from kit.text.normalize import language_code
from kit.text.tokenizer import load_tokenizer

SOUND = "sound.safetensors"
CODEC = "codec.safetensors"
STALE = (
    f"the codec decodes without hidden states, because {SOUND} was trained with other weights: run "
    "`sound()` of notebook 02_train to train it again"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderFinetuneConfig:
    """The section `decoder_finetune` of a preset: the codec's decoder, on the model's states."""

    steps: int = 0  # 0: off
    clips: int = 1500  # recordings to train on, at most

    def __post_init__(self):
        require_within(self, 0, 1e9, "steps")
        require_within(self, 1, 1e6, "clips")


def load_voice(
    folder: Path, weights: str = WEIGHTS["ema"], language: str = "am", device: str = "cpu"
) -> Voice:
    """Load the voice in a run's folder in its default format. Raises SpeechError."""
    set_cuda_defaults()
    language = language_code(language)
    folder = Path(folder)
    if (folder / "voice.json").is_file():
        raise SpeechError(
            f"{folder} is an exported voice: kit.inference.export.load_export reads it."
        )
    if not (folder / weights).is_file() and weights == WEIGHTS["ema"]:
        raise SpeechError(
            f"{folder} has no {weights}: training kept no average (`ema` was off) or has not "
            "finished. Run notebook 02_train to its end, then 03_evaluate_ema."
        )
    files = {
        "model": folder / weights,
        "codec": folder / "codec.safetensors",
        "tokenizer": folder / "tokenizer.model",
        "references": folder / "references.safetensors",
    }
    fix = "run notebooks 01_data_prep to 02_train again, in a run of its own."
    speakers = load_references(files["references"])
    try:
        model = load_model(files["model"])
    except DamagedFileError as error:
        raise SpeechError(str(error)) from error
    codec, note = load_voice_codec(folder, files["model"])
    voice = Voice(
        model=model.to(device),
        codec=codec.to(device),
        note=note,
        tokenizer=load_tokenizer(files["tokenizer"], language),
        references=speakers.mels,
        front_end=make_front_end(speakers.front_end),
        language=language,
        habits=speakers.habits,
        pieces=speakers.pieces,
        vectors=speakers.vectors,
    )
    require_matching_parts(voice, files, fix)
    require_training_files(files, fix)
    if (folder / READER).is_file():
        trained_with_files = {
            files[part].name: file_digest(files[part]) for part in ("tokenizer", "codec")
        }
        reader = load_matching_reader(folder, trained_with_files)
        voice.reader = reader.to(device) if reader else None
    return voice.in_format()


def load_voices(folder: Path, language: str = "am", device: str = "cpu") -> dict[str, Voice]:
    """Load the voice of each set of weights in a run's folder: "raw", and "ema" if there is one."""
    voices = {}
    for name, file in WEIGHTS.items():
        # Missing raw weights (training has not finished) raise an error.
        if name == "raw" or (Path(folder) / file).is_file():
            voices[name] = load_voice(folder, file, language, device)
    return voices


def require_training_files(files: dict[str, Path], fix: str) -> None:
    """Raise SpeechError unless tokenizer and codec are those that the model was trained with.

    Two runs with one preset have the same sizes, but their ids mean different things.
    """
    hashes = trained_with(files["model"])
    for path in (files["tokenizer"], files["codec"]):
        digest = hashes.get(path.name)
        if digest and digest != file_digest(path):
            raise SpeechError(
                f"{path} is not the one that {files['model']} was trained with: its ids mean "
                f"something else. Restore that one, or {fix}"
            )


def require_matching_parts(voice: Voice, files: dict[str, Path], fix: str) -> None:
    """Raise SpeechError, ending with `fix`, unless the parts of `voice` fit together."""
    config = voice.model.config
    codec = voice.codec
    sizes = [
        ("tokenizer", "text ids", voice.tokenizer.vocab_size, config.text_vocab),
        ("codec", "codes, START and STOP included", codec.vocab_size + 2, config.code_vocab),
    ]
    front_end_mels = voice.front_end.config.n_mels
    sizes.append(("references", "mels of their front end", front_end_mels, config.n_mels))
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
    """Return whether `folder` has a codec trained on the states of the model in `weights`."""
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
        warnings.warn(
            f"{folder / SOUND} is damaged: it is made again.", category=Note, stacklevel=2
        )
        return None


def load_voice_codec(folder: Path, weights: Path) -> tuple[Codec, str]:
    """Return the codec that goes with the model in `weights`, and a remark on it or "".

    Raises KitError if it is missing or damaged.
    """
    if codec_matches_weights(folder, weights):
        return load_codec(folder / SOUND, "delete it, or run `sound()` of 02_train again."), ""
    return load_codec(folder / CODEC), STALE if (folder / SOUND).exists() else ""
