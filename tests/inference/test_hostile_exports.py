"""Damaged and false exports are refused in a sentence, or speak; they never fill the memory."""

import copy
import dataclasses
import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import LINES, opinionated_voice

from kit.base.errors import KitError, SpeechError
from kit.base.files import digest
from kit.base.hardware import peak_memory_bytes
from kit.base.tensor_file import contents, file_bytes
from kit.inference import export
from kit.inference.candidates import READER, CodeReader
from kit.inference.export import CARD, FILES, SCALE
from kit.settings import CodeReaderConfig

MUTATIONS = 500
MAX_GROWTH_BYTES = 300 * 2**20
PEAK_RESET = Path("/proc/self/clear_refs")  # of Linux: 5 measures the peak again
NAN = float("nan")
VALUES = (None, True, "", "x", "../x", "a/b", "\0", "x" * 3000, 0, 1, -1, 2**31, 2**63, 10**30)
VALUES += (0.5, 1e308, -1e308, NAN, float("inf"), [], {}, [1, "a"], [[[]]], {"a": {"b": [1]}})


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> list[Path]:
    """One voice in fp32 and in int8, with all that an export may hold."""
    folder = tmp_path_factory.mktemp("exports")
    voice = opinionated_voice(folder)
    alphabet = "".join(sorted(set("".join(LINES))))
    reader = CodeReader(CodeReaderConfig(width=8, blocks=1), alphabet, voice.codec.levels)
    vectors = {name: torch.randn(4) for name in voice.speakers}
    voice = dataclasses.replace(voice, pieces={"alma": [5, 7]}, vectors=vectors, reader=reader)
    return [export.export_voice(voice, folder / weights, weights) for weights in ("fp32", "int8")]


@pytest.fixture
def folder(exports, tmp_path) -> Path:
    return Path(shutil.copytree(exports[0], tmp_path / "voice"))


def seal(folder: Path, **over) -> None:
    """Write the card again, so that it names the files as they are, with `over` laid on top."""
    card = json.loads((folder / CARD).read_text(encoding="utf-8")) | over
    card["files"] = {name: export.size_and_digest(folder / name) for name in card["files"]}
    write_card(folder, card)


def write_card(folder: Path, card: dict) -> None:
    card.pop("checksum", None)
    card["checksum"] = digest(card)
    (folder / CARD).write_text(json.dumps(card), encoding="utf-8")


def split_tensors(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join_tensors(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# mutations


def places(value) -> Iterator[tuple]:
    """Every (container, key) in JSON."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutate(rng: random.Random, value: dict) -> None:
    """Change one entry of JSON."""
    holder, key = rng.choice(list(places(value)))
    kind = rng.choice(["another value", "another size", "missing", "extra", "deep"])
    if kind == "missing":
        del holder[key]
    elif kind == "extra" and isinstance(holder, dict):
        holder[rng.choice(["", "../x", "extra", "__metadata__"])] = copy.deepcopy(holder[key])
    elif kind == "another size" and isinstance(holder[key], int | float):
        holder[key] *= rng.choice([-1, 0, 2, 3, 1000, 2**40])
    elif kind == "deep":
        holder[key] = json.loads("[" * 400 + "]" * 400)
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))


def mutate_card(rng: random.Random, folder: Path) -> None:
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    mutate(rng, card)
    write_card(folder, card)


def mutate_header(rng: random.Random, folder: Path) -> None:
    """What the kit keeps in the metadata of a safetensors file."""
    path = folder / rng.choice(["codec.safetensors", "references.safetensors", READER])
    header, data = split_tensors(path)
    kit_header = json.loads(header["__metadata__"]["header"])
    if rng.random() < 0.1:
        kit_header = rng.choice(VALUES)
    else:
        mutate(rng, kit_header)
    header["__metadata__"]["header"] = json.dumps(kit_header)
    join_tensors(path, header, data)
    seal(folder)


def mutate_tensors(rng: random.Random, folder: Path) -> None:
    """Names, shapes, types and offsets in a safetensors file, and its metadata's type."""
    path = folder / rng.choice([name for name in [*FILES, READER] if "safetensors" in name])
    header, data = split_tensors(path)
    name = rng.choice([name for name in header if name != "__metadata__"])
    kind = rng.choice(["json", "rename", "shape", "dtype", "metadata", "empty"])
    if kind == "json":
        mutate(rng, header)
    elif kind == "rename":
        header[rng.choice(["", "../x", "a/b", "__speakers__", name + SCALE])] = header.pop(name)
    elif kind == "shape":
        shape = header[name]["shape"]
        header[name]["shape"] = rng.choice([[], shape[::-1], [1, *shape], [2**62, *shape]])
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(["F32", "I32", "F16", "F8_E4M3", "C64", "U16", "I8"])
    elif kind == "metadata":
        header["__metadata__"] = rng.choice([*VALUES, {"header": "null"}])
    else:
        shape = rng.choice([[0], [0, 2**62, 2**62], [0] * 100])
        header["empty"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data)] * 2}
    join_tensors(path, header, data)
    seal(folder)


def mutate_bytes(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice([*FILES, READER, CARD])
    data = bytearray(path.read_bytes())
    first = rng.choice([16, 2000, len(data)])  # of which header and metadata come first
    for _ in range(rng.choice([1, 3])):
        data[rng.randrange(min(first, len(data)))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    if path.name != CARD and rng.random() < 0.8:
        seal(folder)


def mutate_files(rng: random.Random, folder: Path) -> None:
    name, other = rng.sample([*FILES, READER, CARD], 2)
    path = folder / name
    kind = rng.choice(["swap", "link", "own link", "folder", "missing", "device", "empty"])
    if kind == "swap":
        data = path.read_bytes()
        path.write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(data)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        targets = {"link": folder / other, "own link": path, "device": Path("/dev/zero")}
        if kind in targets:
            path.symlink_to(targets[kind])
        elif kind == "folder":
            path.mkdir()
    sealable = [p.is_file() and p.stat().st_size for p in (folder / n for n in [*FILES, READER])]
    if CARD not in (name, other) and all(sealable):
        seal(folder)


KINDS = (mutate_card, mutate_header, mutate_tensors, mutate_bytes, mutate_files)


def speak(folder: Path) -> None:
    """Load the voice and speak; a mutation without an effect does."""
    voice = export.load_export(folder)
    settings = dataclasses.replace(export.read_card(folder).settings, best_of=1, retries=0)
    speech = voice.speak(LINES[:1], voice.speakers[0], settings)[0]
    assert torch.isfinite(speech.wave).all()


@pytest.mark.long
def test_no_export_of_a_stranger_ends_in_a_stack_trace_or_fills_the_memory(exports, tmp_path):
    speak(exports[0])
    if PEAK_RESET.exists():
        PEAK_RESET.write_text("5")
    before_bytes = peak_memory_bytes("cpu")
    refused = 0
    failures = {}
    for seed in range(MUTATIONS):
        rng = random.Random(seed)
        folder = Path(shutil.copytree(exports[seed % 2], tmp_path / str(seed)))
        mutation = KINDS[seed % len(KINDS)]
        mutation(rng, folder)
        try:
            speak(folder)
        except KitError as error:
            refused += 1
            if len(str(error)) > 3000:
                failures[seed, mutation.__name__] = f"{len(str(error))} characters"
        except BaseException as error:  # pyo3's panics are no Exceptions
            failures[seed, mutation.__name__] = repr(error)[:200]
        shutil.rmtree(folder)
    grown_bytes = peak_memory_bytes("cpu") - before_bytes
    assert failures == {}
    assert MUTATIONS / 2 < refused < MUTATIONS
    assert grown_bytes < MAX_GROWTH_BYTES


# what a hostile tester found


def rewrite(folder: Path, name: str, tensors: dict | None = None, **over) -> None:
    """Write the safetensors file `name` again, its header with `over` on top, and seal the card."""
    mapped, header = contents(folder / name)
    kept = {key: tensor.clone() for key, tensor in mapped.items()}
    (folder / name).write_bytes(file_bytes(kept | (tensors or {}), header | over))
    seal(folder)


def refused(folder: Path, match: str) -> None:
    with pytest.raises(SpeechError, match=match):
        export.load_export(folder)


PIECES = [[], "alma", 7, {"alma": 12}, {"alma": [5.0, 7.0]}, {"x": [1]}, {"alma": [5, 8]}]
PIECES += [{"alma": [0, 12]}, {"alma": []}]


@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_that_are_no_lists_of_frames_are_named(folder, pieces):
    rewrite(folder, "references.safetensors", pieces=pieces)
    refused(folder, r"references\.safetensors.*(pieces|reference of '(x|alma)' has (0|12) frames)")


@pytest.mark.parametrize("name", ["alma", "", "../x"])
@pytest.mark.parametrize("shape", [(), (80,), (80, 0), (3000, 4), (1, 80, 12)])
def test_a_reference_that_is_no_log_mel_is_named(folder, name, shape):
    rewrite(folder, "references.safetensors", {name: torch.zeros(shape)}, pieces={})
    refused(folder, rf"reference of '{name}' has shape")


@pytest.mark.parametrize(
    "over", [{"n_mels": 32_769, "n_fft": 65_536}, {"n_fft": 2**20}, {"sample_rate": 10**9}]
)
def test_a_front_end_no_voice_can_have_is_refused_before_it_is_made(folder, over):
    front_end = {"sample_rate": 22050, "n_fft": 1024, "hop_length": 256, "n_mels": 80} | over
    rewrite(folder, "references.safetensors", front_end=front_end)
    refused(folder, r"MelConfig\.(n_fft|sample_rate) = \d+: must lie in")
    rewrite(folder, "references.safetensors", front_end={"n_mels": 40})
    refused(folder, r"40 mels of their front end.*expects 80")


@pytest.mark.parametrize("speakers", [[1, "a"], "alma", [], [["alma"]], {"alma": 1}])
def test_speakers_that_are_no_names_and_a_card_larger_than_any_are_refused(folder, speakers):
    seal(folder, speakers=speakers)
    refused(folder, rf"{CARD}.*speakers")
    os.truncate(folder / CARD, 2**30)
    refused(folder, f"{CARD} is damaged.*larger than")


@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(3), torch.ones(2, 2)])
def test_int8_scales_that_do_not_fit_are_named(exports, tmp_path, scale):
    folder = Path(shutil.copytree(exports[1], tmp_path / "int8"))
    tensors = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    name = next(name for name in tensors if name.endswith(SCALE))
    data = safetensors.torch.save(tensors | {name: scale.half()})
    (folder / "model.safetensors").write_bytes(data)
    seal(folder)
    refused(folder, f"{name} does not fit")
