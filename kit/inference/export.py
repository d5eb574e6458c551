"""Export a voice to one folder, and load it from there with few dependencies.

`export_voice` writes weights (fp32, fp16, bf16, int8), codec, tokenizer, references, and last
`voice.json`, which names them: a folder without it is no export. `load_export` checks the SHA-256
of every file and executes nothing.
"""

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import kit
from kit.audio.codec import load_codec, save_codec
from kit.base.config import checked, parse_object
from kit.base.errors import KitError, SpeechError
from kit.base.files import atomic_folder, atomic_path, digest, file_digest, write_atomic
from kit.base.formatting import join_names, nearest, shorten
from kit.base.hardware import DTYPES, set_cuda_defaults
from kit.base.tensor_file import SHA256, describe_mismatch, is_finite, read, save_tensors
from kit.inference.candidates import READER, load_reader, save_reader
from kit.inference.linear_formats import int8
from kit.inference.voice import Habits, Voice
from kit.inference.voice_files import (
    MAX_SPEAKERS,
    load_references,
    require_matching,
    save_references,
)
from kit.model.gpt import SpeechGPT
from kit.settings import GenerateConfig, GPTConfig
from kit.text.normalize import language_code
from kit.text.tokenizer import load_tokenizer

FORMAT = 2  # of the folder; others are refused
CARD = "voice.json"
MAX_CARD_BYTES = 2**24  # thousands of speakers
# Of every voice; READER is optional.
FILES = ("model.safetensors", "codec.safetensors", "tokenizer.model", "references.safetensors")
WEIGHTS = DTYPES | {"int8": torch.float16}  # in an int8 export the other weights are fp16
SCALE = ".scale"  # suffix of the name of an int8 weight's row scales
# Of the sampling in cards of older kits.
FORMER_NAMES = {"candidates": "best_of", "guidance": "guidance_scale"}
FIX = "copy the folder again, or export the voice again."

README = """# A voice

    from pathlib import Path
    from kit.inference.export import load_export, read_card
    from kit.inference.voice import wav_bytes
    folder = "path/to/this/folder"
    voice = load_export(folder)
    settings = read_card(folder).settings
    speech = voice.speak(["..."], voice.speakers[0], settings)[0]
    Path("speech.wav").write_bytes(wav_bytes(speech, voice.codec.sample_rate))

`kit` is the training kit that wrote this folder. To install it with all that training needs:
`pip install git+https://github.com/voicekit/voicekit-notebooks`. Then these commands work, too:
`voicekit speak --voice FOLDER --text "..." --out speech.wav` and `voicekit serve --voice FOLDER`.
The lines above need only torch, numpy, safetensors and sentencepiece: install these, then the kit
with `pip install --no-deps` and the same address. Loading checks every file and executes none.

## Licence

To be filled in by the owner of the voice: who spoke, and what use is allowed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """The contents of voice.json."""

    language: str  # for text normalisation
    speakers: tuple  # names
    sample_rate: int  # Hz
    weights: str  # of the GPT on disk: fp32, fp16, bf16 or int8
    habits: Habits
    model: GPTConfig
    settings: GenerateConfig  # of sampling, as the owner of the voice recommends
    files: dict  # name -> bytes and sha256
    versions: dict  # of torch and the kit
    licence: str = ""  # of the model that training started from, where it binds this one, too


# What a card may hold: see `checked`.
CARD_SCHEMA = {
    "format_version": (int, FORMAT, FORMAT),
    "language": (str, 0, 1000),
    "speakers": (list, 1, MAX_SPEAKERS, (str, 0, 1000)),
    "sample_rate": (int, 8000, 192_000),
    "weights": (str, 0, 100),
    "habits": Habits,
    "model": GPTConfig,
    "sampling": GenerateConfig,
    "files": (dict, len(FILES), len(FILES) + 1, {"bytes": (int, 1, 2**40), "sha256": SHA256}),
    "versions": (dict, 0, 100, (str | None, 0, 100)),
    "licence": (str, 0, 100),
    "checksum": (str, 12, 12),
}


def export_voice(
    voice: Voice,
    folder: Path,
    weights: str = "fp16",
    sampling: GenerateConfig | None = None,
    licence: str = "",
) -> Path:
    """Write `voice` to `folder`, the GPT's weights as fp32, fp16, bf16 or int8.

    int8 quantises the linear layers of trunk and heads as `linear_formats.int8` does; the rest is
    fp16, the codec, too. `sampling` are the recommended settings (None: the defaults), `licence`
    that of the base model, if it binds this voice, too. An existing README.md stays.
    Raises SpeechError for an unknown format and weights that overflow it.
    """
    folder = Path(folder)
    if weights not in WEIGHTS:
        raise SpeechError(f"There is no export format {weights!r}.{nearest(weights, WEIGHTS)}")
    tensors = packed(voice.model, weights)
    with atomic_folder(folder, (READER, CARD)) as new:
        with atomic_path(new / "model.safetensors") as file:
            save_tensors(tensors, file)
        codec_dtype = torch.float16 if weights == "int8" else torch.float32
        save_codec(voice.codec, new / "codec.safetensors", codec_dtype)
        write_atomic(new / "tokenizer.model", voice.tokenizer.file_bytes())
        path = new / "references.safetensors"
        mel = voice.front_end.config
        save_references(voice.references, path, voice.habits, mel, voice.vectors, voice.pieces)
        if voice.reader is not None:
            save_reader(voice.reader, new / READER)
        card = describe(voice, new, weights, sampling or GenerateConfig())
        card["licence"] = licence
        card["checksum"] = digest(card)
        write_atomic(new / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")
    if not (folder / "README.md").exists():
        write_atomic(folder / "README.md", README)
    return folder


def describe(voice: Voice, folder: Path, weights: str, sampling: GenerateConfig) -> dict:
    names = [*FILES, READER] if voice.reader is not None else FILES
    return {
        "format_version": FORMAT,
        "language": voice.language,
        "speakers": voice.speakers,
        "sample_rate": voice.codec.sample_rate,
        "weights": weights,
        "habits": dataclasses.asdict(voice.habits),
        "model": dataclasses.asdict(voice.model.config),
        "sampling": dataclasses.asdict(sampling),
        "files": {name: size_and_digest(folder / name) for name in names},
        "versions": {"torch": torch.__version__, "kit": kit.__version__},
    }


def size_and_digest(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def packed(model: SpeechGPT, weights: str) -> dict[str, Tensor]:
    """Return `model`'s weights as stored. Raises SpeechError if one is not finite."""
    linears = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
    # The decoder never quantises the conditioner.
    quantised = {f"{name}.weight" for name in linears if not name.startswith("conditioner.")}
    tensors = {}
    for name, weight in model.state_dict().items():
        is_int8 = weights == "int8" and name in quantised
        stored = weight if is_int8 else weight.to(WEIGHTS[weights])
        if not is_finite(name, stored):
            raise SpeechError(
                f"{name} is not finite in {weights}: export as fp32. If that fails, too, the model "
                "is damaged: train it again, or use an earlier checkpoint."
            )
        tensors[name] = stored
        if is_int8:
            tensors[name], tensors[name + SCALE] = int8(stored)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored weights in fp32, int8 ones multiplied by their scales.

    Quantised again by `linear_formats.int8` they give the same numbers and scales, bit for bit.
    Raises KitError for scales without a matrix of as many rows.
    """
    # Copies: the scales are multiplied in, and the file stays mapped otherwise.
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    for name in [name for name in state if name.endswith(SCALE)]:
        scale = state.pop(name)
        weight = state.get(name.removesuffix(SCALE), torch.zeros(0))
        if weight.ndim != 2 or scale.shape != weight.shape[:1]:
            raise KitError(f"{shorten(name)} does not fit the weights it scales")
        weight.mul_(scale[:, None])
    return state


def read_card(folder: Path) -> Card:
    """Load voice.json of `folder`. Raises SpeechError if it is missing or damaged."""
    path = Path(folder) / CARD
    try:
        if not path.is_file():
            raise SpeechError(
                f"There is no {path}: {folder} is no exported voice, or its export was "
                f"interrupted. Name the folder that `export_voice` wrote, or {FIX}"
            )
        if path.stat().st_size > MAX_CARD_BYTES:
            raise KitError(f"it is larger than {MAX_CARD_BYTES:,} bytes")
        fields = parse_object(path.read_bytes(), CARD)
        version = fields.get("format_version")
        if type(version) is int and version != FORMAT:
            raise SpeechError(
                f"{path} has format {version}, this kit reads {FORMAT}: "
                + ("update the kit." if version > FORMAT else "export the voice again.")
            )
        written = digest({key: value for key, value in fields.items() if key != "checksum"})
        fields.setdefault("licence", "")
        if isinstance(fields.get("sampling"), dict):
            sampling = fields["sampling"].items()
            fields["sampling"] = {FORMER_NAMES.get(key, key): value for key, value in sampling}
        values = checked(fields, CARD_SCHEMA, CARD)
        if values.pop("checksum") != written:
            raise KitError("its checksum does not match")
        del values["format_version"]
        values["settings"] = values.pop("sampling")
        card = Card(**values | {"speakers": tuple(values["speakers"])})
        if card.weights not in WEIGHTS:
            raise KitError(f"unknown weights {card.weights!r}.{nearest(card.weights, WEIGHTS)}")
        if not set(FILES) <= set(card.files) <= {*FILES, READER}:
            raise KitError(f"its files are {join_names(sorted(card.files))}")
        language_code(card.language)  # raises for an unknown language
    except SpeechError:
        raise
    except (OSError, KitError) as error:
        raise SpeechError(
            f"{path} is damaged or of another kind ({shorten(error, 400)}): {FIX}"
        ) from error
    return card


def load_export(folder: Path, device: str = "cpu") -> Voice:
    """Load the voice that `export_voice` wrote to `folder`, after checking every file.

    Its decoder is int8 if the weights were stored as int8. Raises SpeechError naming the file that
    is missing, damaged, too new or of another kind.
    """
    set_cuda_defaults()
    folder = Path(folder)
    card = read_card(folder)
    files = {name.partition(".")[0]: folder / name for name in FILES}
    try:
        for name, recorded in card.files.items():
            path = folder / name
            if not path.is_file():
                raise SpeechError(f"There is no {path}: {FIX}")
            # The size first: a device that never ends has none.
            if path.stat().st_size != recorded["bytes"] or file_digest(path) != recorded["sha256"]:
                raise SpeechError(f"{path} is damaged (its SHA-256 is not that of {CARD}): {FIX}")
        language = language_code(card.language)
        speakers = load_references(files["references"], FIX)
        speakers["habits"] = card.habits
        voice = Voice(
            model=restore_model(files["model"], card.model),
            codec=load_codec(files["codec"], FIX),
            tokenizer=load_tokenizer(files["tokenizer"], language),
            language=language,
            reader=load_reader(folder / READER) if READER in card.files else None,
            **speakers,
        )
        require_matching(voice, files, FIX)
    except SpeechError:
        raise
    except (OSError, KitError) as error:
        reason = shorten(error, 400)
        raise SpeechError(f"{folder} does not match {CARD} ({reason}): {FIX}") from error
    return voice.to(device).in_format("int8" if card.weights == "int8" else "")


def restore_model(path: Path, config: GPTConfig) -> SpeechGPT:
    weights = unpacked(read(path)[0])
    with torch.device("meta"):  # allocates nothing, and skips random initialisation
        model = SpeechGPT(config)
    mismatch = describe_mismatch(weights, model.state_dict())
    if mismatch:
        raise KitError(f"{path.name}: {mismatch}")
    model.load_state_dict(weights, assign=True)
    return model.eval()
