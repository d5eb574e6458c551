"""The voice in a run's folder: its parts read, and checked to be of one run.

What the training notebooks left are a model, a codec, a tokenizer, the references and perhaps a
reader of codes. Of different runs they would speak gibberish, so they are compared before anything
is said. An exported voice is read by `export` instead.
"""

from pathlib import Path

import torch

from kit.audio.spectrogram import make_front_end
from kit.base.errors import DamagedFileError, SpeechError
from kit.base.files import file_digest
from kit.base.hardware import set_cuda_defaults
from kit.inference.code_reader import READER, load_matching_reader
from kit.inference.finetuned_codec import load_voice_codec
from kit.inference.references import load_references
from kit.inference.voice import Voice
from kit.model.weights import WEIGHTS, load_model, trained_with
from kit.text.tokenizer import load_tokenizer


def load_voice(
    folder: Path, weights: str = WEIGHTS["ema"], language: str = "am", device: str = "cpu"
) -> Voice:
    """The voice in a run's folder on `device`, in its default format (`Voice.in_format`).

    Codec and reader are there, too. SpeechError names what is missing.
    """
    set_cuda_defaults()
    folder = Path(folder)
    if (folder / "voice.json").is_file():
        raise SpeechError(
            f"{folder} is an exported voice: kit.inference.export.load_export reads it."
        )
    if not (folder / weights).is_file() and weights == WEIGHTS["ema"]:
        raise SpeechError(
            f"{folder} has no {weights}: its training kept no average (`ema` was off), or has not "
            "ended. Run notebook 02_train to its end, then 03_evaluate_ema."
        )
    files = {
        "model": folder / weights,
        "codec": folder / "codec.safetensors",
        "tokenizer": folder / "tokenizer.model",
        "references": folder / "references.safetensors",
    }
    again = "run notebooks 01_data_prep to 02_train again, in a run of its own."
    kept = load_references(files["references"])
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
        references=kept.mels,
        front_end=make_front_end(kept.front_end),
        language=language,
        habits=kept.habits,
        pieces=kept.pieces,
        vectors=kept.vectors,
    )
    require_matching_parts(voice, files, again)
    require_training_files(files, again)
    if (folder / READER).is_file():
        made_by = {files[part].name: file_digest(files[part]) for part in ("tokenizer", "codec")}
        reader = load_matching_reader(folder, made_by)
        voice.reader = reader.to(device) if reader else None
    return voice.in_format()


def load_voices(folder: Path, language: str = "am", device: str = "cpu") -> dict[str, Voice]:
    """The voice of each set of weights in a run's folder: "raw", and "ema" where there is one."""
    found = {}
    for name, file in WEIGHTS.items():
        # Without the last weights training has not ended: asked for, they are told to be missing.
        if name == "raw" or (Path(folder) / file).is_file():
            found[name] = load_voice(folder, file, language, device)
    return found


def require_training_files(files: dict[str, Path], cure: str) -> None:
    """Raise SpeechError unless tokenizer and codec are those that the model was trained with.

    Of two runs with one preset they have the same sizes, and their ids mean different things.
    """
    noted = trained_with(files["model"])
    for path in (files["tokenizer"], files["codec"]):
        digest = noted.get(path.name)
        if digest and digest != file_digest(path):
            raise SpeechError(
                f"{path} is not the one that {files['model']} was trained with: its ids mean "
                f"something else. Bring back that one, or {cure}"
            )


def require_matching_parts(voice: Voice, files: dict[str, Path], cure: str) -> None:
    """Raise SpeechError, with `cure`, unless the parts of `voice`, read from `files`, fit together.

    A tokenizer of another run gives ids that the model does not have, or that mean other pieces.
    """
    shape = voice.model.config
    codec = voice.codec
    told = [
        ("tokenizer", "text ids", voice.tokenizer.vocab_size, shape.text_vocab),
        ("codec", "codes, START and STOP included", codec.vocab_size + 2, shape.code_vocab),
    ]
    frames = None
    for speaker, mel in voice.references.items():
        mels = mel.shape[0] if mel.ndim == 2 and mel.numel() else 0
        told.append(("references", f"mels of {speaker!r}", mels, shape.n_mels))
        if speaker not in voice.pieces:
            frames = frames or mel.shape[-1]
            told.append(("references", f"frames of {speaker!r}", mel.shape[-1], frames))
        if voice.decodes_from_states:
            numbers = voice.vectors.get(speaker, torch.zeros(0)).numel()
            what = f"numbers of who {speaker!r} is"
            told.append(("references", what, numbers, codec.speaker_width))
    for part, what, found, wanted in told:
        if found != wanted:
            raise SpeechError(
                f"{files[part]} has {found:,} {what}, {files['model']} goes with {wanted:,}: they "
                f"are of different runs. Take both from one run, or {cure}"
            )
    head = voice.habits.head
    if head and not (head.layer < shape.layers and head.head < shape.heads):
        raise SpeechError(
            f"{files['references']} tells of head {head.head} in layer {head.layer}, "
            f"{files['model']} has {shape.layers} layers of {shape.heads} heads: they are of "
            f"different runs. Take both from one run, or {cure}"
        )
    if not voice.references:
        raise SpeechError(f"{files['references']} holds no speaker: {cure}")
