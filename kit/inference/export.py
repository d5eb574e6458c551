"""A voice to take away: one folder, and of all that training needs torch and little else.

`export_voice` writes weights (fp32, fp16, bf16, int8), codec, tokenizer, references, and last of
all `voice.json`, which names them: a folder without it is no export. `load_export` checks every
byte before it uses one, and runs nothing it reads. Knows voices; nothing of training.
"""

import dataclasses
import errno
import importlib.metadata
import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from kit.audio.codec import load_codec, save_codec
from kit.audio.spectrogram import make_front_end
from kit.base.config import build
from kit.base.errors import SpeechError
from kit.base.files import (
    atomic_folder,
    atomic_path,
    digest,
    file_digest,
    make_folder,
    write_atomic,
)
from kit.base.formatting import nearest, shorten
from kit.base.hardware import set_cuda_defaults
from kit.base.tensor_file import is_finite
from kit.inference.code_reader import READER, load_reader, save_reader
from kit.inference.linear_formats import int8
from kit.inference.references import Habits, load_references, save_references
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.inference.voice_files import require_matching_parts
from kit.model.gpt import SpeechGPT
from kit.model.sequence import GPTConfig
from kit.text.normalize import language_code
from kit.text.tokenizer import load_tokenizer

FORMAT = 2  # of the folder; a reader refuses another
CARD = "voice.json"
# Of every voice; one that has a reader of its codes has that, too.
FILES = ("model.safetensors", "codec.safetensors", "tokenizer.model", "references.safetensors")
# What is not rounded to int8 is fp16.
WEIGHTS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float16,
}
SCALE = ".scale"  # after a weight's name: of its rows, where it is stored as whole numbers
AGAIN = "copy the folder again from where it came, or export the voice again."

README = """# A voice

    from pathlib import Path
    from kit.inference.export import load_export, read_card
    from kit.inference.voice import wav_bytes
    folder = "path/to/this/folder"
    voice = load_export(folder)
    settings = read_card(folder).settings
    speech = voice.speak(["..."], voice.speakers[0], settings)[0]
    Path("speech.wav").write_bytes(wav_bytes(speech, voice.codec.sample_rate))

`kit` is the training kit that made this folder; of what it needs, speaking takes torch, numpy,
safetensors and sentencepiece alone. Loading checks every file, and runs none.

| file | what it is |
|---|---|
| model.safetensors | the speech GPT: text ids and a speaker in, codes out |
| codec.safetensors | codes in, sound out |
| tokenizer.model | text in, ids out (SentencePiece) |
| references.safetensors | how each speaker sounds: log-mels, with some codecs a vector |
| reader.safetensors | codes in, letters out: chooses among readings (some voices) |
| voice.json | language, speakers, number format, sampling; size and SHA-256 of each file |

## Licence

To be filled in by the owner of the voice: who spoke, and what may be done with it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What voice.json says."""

    format_version: int  # of the folder
    language: str  # whose spelling rules a text goes through
    speakers: tuple  # names
    sample_rate: int  # Hz
    weights: str  # number format of the GPT on disk: fp32, fp16, bf16 or int8
    habits: dict  # Habits: how long its recordings are, and how slow
    model: dict  # GPTConfig
    sampling: dict  # GenerateConfig
    files: dict  # name -> bytes and sha256
    versions: dict  # of torch and of the kit that wrote it; null where it was not installed

    @property
    def settings(self) -> GenerateConfig:
        """How the owner of the voice has it sampled."""
        return build(GenerateConfig, self.sampling)


def export_voice(
    voice: Voice, folder: Path, weights: str = "fp16", sampling: GenerateConfig | None = None
) -> Path:
    """Write `voice` to `folder`, its GPT's weights as fp32, fp16, bf16 or int8.

    int8 rounds the linear layers of trunk and heads as `linear_formats.int8` does and keeps their
    scales, to the bit; the rest is fp16, so a code may differ from those of int8 made of the fp32
    model, as both do from fp32's. References are half floats, as in every run. `sampling` is what
    the owner recommends; None: the kit's defaults. A README.md that is there already is kept, its
    owner may have written in it. Raises SpeechError for an unknown format, for weights it cannot
    hold, and when `folder` is a file.
    """
    folder = Path(folder)
    if weights not in WEIGHTS:
        raise SpeechError(f"A voice cannot be exported as {weights!r}.{nearest(weights, WEIGHTS)}")
    tensors = packed(voice.model, weights)
    heard = [*voice.references.items(), *voice.vectors.items()]
    damaged = [name for name, tensor in heard if not torch.isfinite(tensor).all()]
    if damaged:
        raise SpeechError(
            f"The references of {damaged} are not finite: run notebook 02_train again."
        )
    with atomic_folder(prepare(folder), (CARD,)) as new:
        with atomic_path(new / "model.safetensors") as file:
            try:
                safetensors.torch.save_file(tensors, file)
            except safetensors.SafetensorError as error:  # it has words of its own for a full disk
                raise OSError(errno.ENOSPC, str(error)) from error
        save_codec(voice.codec, new / "codec.safetensors")
        write_atomic(new / "tokenizer.model", voice.tokenizer.file_bytes())
        save_references(
            voice.references,
            new / "references.safetensors",
            voice.habits,
            voice.front_end.config,
            voice.vectors,
            voice.pieces,
        )
        if voice.reader is not None:
            save_reader(voice.reader, new / READER)
        card = dataclasses.asdict(describe(voice, new, weights, sampling or GenerateConfig()))
        card["checksum"] = digest(card)
        write_atomic(new / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")
    if not (folder / "README.md").exists():
        write_atomic(folder / "README.md", README)
    return folder


def prepare(folder: Path) -> Path:
    """`folder`, made where there is none."""
    if folder.exists() and not folder.is_dir():
        raise SpeechError(f"{folder} is a file: name a folder to export to.")
    return make_folder(folder)


def describe(voice: Voice, folder: Path, weights: str, sampling: GenerateConfig) -> Card:
    """The card of what was just written to `folder`."""
    try:
        kit = importlib.metadata.version("voicekit-notebooks")
    except importlib.metadata.PackageNotFoundError:
        kit = None
    names = [*FILES, READER] if voice.reader is not None else FILES
    return Card(
        format_version=FORMAT,
        language=voice.language,
        speakers=tuple(voice.speakers),
        sample_rate=voice.codec.sample_rate,
        weights=weights,
        habits=dataclasses.asdict(voice.habits),
        model=dataclasses.asdict(voice.model.config),
        sampling=dataclasses.asdict(sampling),
        files={name: size_and_digest(folder / name) for name in names},
        versions={"torch": torch.__version__, "kit": kit},
    )


def size_and_digest(path: Path) -> dict:
    """Size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def packed(model: SpeechGPT, weights: str) -> dict[str, Tensor]:
    """`model`'s weights as they are stored. Raises SpeechError where one is not finite."""
    linears = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
    # The decoder takes the conditioner in full: what is heard is what was measured.
    rounded = {f"{name}.weight" for name in linears if not name.startswith("conditioner.")}
    tensors = {}
    for name, weight in model.state_dict().items():
        whole = weights == "int8" and name in rounded
        stored = weight if whole else weight.to(WEIGHTS[weights])
        if not is_finite(name, stored):
            raise SpeechError(
                f"{name} is not finite in {weights}: export as fp32. If that fails, too, the model "
                "is damaged: train it again, or take an earlier checkpoint."
            )
        if whole:
            tensors[name], tensors[name + SCALE] = int8(stored)
        else:
            tensors[name] = stored
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stored weights in fp32, in memory of their own; whole numbers times their scales.

    Rounded again by `linear_formats.int8` these give the same numbers and the same scales, to the
    bit: 127 times a scale that came from a division by 127 is divided back to that scale.
    """
    scales = {name: tensors[name] for name in tensors if name.endswith(SCALE)}
    # Copies: what is still mapped from a file keeps Windows from writing that file again.
    weights = {name: t for name, t in tensors.items() if name not in scales}
    state = {name: t.to(torch.float32, copy=True) for name, t in weights.items()}
    for name, scale in scales.items():
        state[name.removesuffix(SCALE)].mul_(scale[:, None])
    return state


def read_card(folder: Path) -> Card:
    """What the voice in `folder` is. Raises SpeechError when its voice.json is not sound."""
    path = Path(folder) / CARD
    if not path.is_file():
        raise SpeechError(
            f"There is no {path}: {folder} is no exported voice, or its export was interrupted. "
            f"Name the folder `export_voice` wrote, or {AGAIN}"
        )
    try:
        plain = json.loads(path.read_bytes())
        version = plain.pop("format_version")
        if version != FORMAT:
            raise SpeechError(
                f"{path} has format {version}, this kit reads {FORMAT}: "
                + ("update the kit." if version > FORMAT else "export the voice again.")
            )
        plain["format_version"] = version
        if plain.pop("checksum") != digest(plain):
            raise ValueError("its checksum does not match")
        card = build(Card, plain)
        if card.weights not in WEIGHTS:
            raise ValueError(f"unknown weights {card.weights!r}.{nearest(card.weights, WEIGHTS)}")
    except SpeechError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as why:
        raise SpeechError(
            f"{path} is damaged or of another kind ({shorten(why)}): {AGAIN}"
        ) from why
    return card


def verify(path: Path, told: dict) -> None:
    """Raise SpeechError unless the file at `path` is the one the card tells of."""
    if not path.is_file():
        raise SpeechError(f"There is no {path}: {AGAIN}")
    found = size_and_digest(path)
    if found["bytes"] != told["bytes"]:
        sizes = f"{found['bytes']} bytes, {CARD} says {told['bytes']}"
        raise SpeechError(f"{path} is cut, or another file ({sizes}): {AGAIN}")
    if found != told:
        raise SpeechError(f"{path} is damaged (its SHA-256 is not that of {CARD}): {AGAIN}")


def load_export(folder: Path, device: str = "cpu") -> Voice:
    """The voice `export_voice` wrote to `folder`, every file checked first.

    GPT, codec and reader are on `device`.
    The GPT is fp32 again; one stored as int8 speaks through int8 layers, as it was rounded.
    Raises SpeechError naming the file that is missing, damaged, too new or of another kind.
    """
    set_cuda_defaults()
    folder = Path(folder)
    card = read_card(folder)
    model, codec, tokens, references = (folder / name for name in FILES)
    try:
        language_code(card.language)  # text is read by rules of the kit, or by none
        for path in (model, codec, tokens, references):
            verify(path, card.files[path.name])
        reader = None
        if READER in card.files:
            verify(folder / READER, card.files[READER])
            reader = load_reader(folder / READER)
        kept = load_references(references)
        voice = Voice(
            model=restore_model(model, build(GPTConfig, card.model)),
            codec=load_codec(codec),
            tokenizer=load_tokenizer(tokens, card.language),
            references=kept.mels,
            front_end=make_front_end(kept.front_end),
            pieces=kept.pieces,
            vectors=kept.vectors,
            habits=build(Habits, card.habits),
            language=card.language,
            reader=reader,
        )
    except SpeechError:
        raise
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as why:
        raise SpeechError(
            f"{folder} does not hold what {CARD} says ({shorten(why)}): {AGAIN}"
        ) from why
    files = {"model": model, "codec": codec, "tokenizer": tokens, "references": references}
    require_matching_parts(voice, files, AGAIN)
    require_card(voice, card, folder)
    for module in (voice.model, voice.codec, voice.reader):
        if module is not None:
            module.to(device)
    return voice.in_format("int8" if card.weights == "int8" else "")


def require_card(voice: Voice, card: Card, folder: Path) -> None:
    """Raise SpeechError unless `voice` is what the card in `folder` says."""
    told = {
        "codec.safetensors": (voice.codec.sample_rate, card.sample_rate, "Hz"),
        "references.safetensors": (voice.speakers, sorted(card.speakers), "as its speakers"),
    }
    for name, (found, wanted, what) in told.items():
        if found != wanted:
            raise SpeechError(
                f"{folder / name} has {found} {what}, {folder / CARD} says {wanted}: they are of "
                f"different voices. {AGAIN.capitalize()}"
            )


def restore_model(path: Path, config: GPTConfig) -> SpeechGPT:
    """The GPT of `config` with the weights at `path`, in fp32 and eval mode."""
    with torch.device("meta"):  # no weights are drawn, only to be overwritten
        model = SpeechGPT(config)
    model.load_state_dict(unpacked(safetensors.torch.load_file(path)), assign=True)
    return model.eval()
