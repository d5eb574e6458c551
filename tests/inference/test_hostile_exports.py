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
from kit.base.hardware import peak_resident_bytes
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


def places(value) -> Iterator[tuple]:
    """Every (container, key) in JSON."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutate(rng: random.Random, value: dict) -> None:
    """Change one entry of JSON: another value, another size, or it is gone."""
    holder, key = rng.choice(list(places(value)))
    kind = rng.choice(["another value", "another size", "missing"])
    if kind == "missing":
        del holder[key]
    elif kind == "another size" and isinstance(holder[key], int | float):
        holder[key] *= rng.choice([-1, 0, 2, 1000, 2**40])
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))


def mutate_card(rng: random.Random, folder: Path) -> None:
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    mutate(rng, card)
    write_card(folder, card)


def mutate_header(rng: random.Random, folder: Path) -> None:
    """Change what a safetensors file says of its tensors, or what the kit keeps beside it."""
    path = folder / rng.choice([name for name in [*FILES, READER] if "safetensors" in name])
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:end])
    metadata = header.get("__metadata__", {})
    kit_header = json.loads(metadata.get("header", "{}"))
    if kit_header and rng.random() < 0.5:
        mutate(rng, kit_header)
        metadata["header"] = json.dumps(rng.choice([kit_header] * 9 + [rng.choice(VALUES)]))
    else:
        mutate(rng, header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])
    seal(folder)


def mutate_bytes(rng: random.Random, folder: Path) -> None:
    path = folder / rng.choice([*FILES, READER, CARD])
    data = bytearray(path.read_bytes())
    first = rng.choice([16, 2000, len(data)])  # of which header and metadata come first
    data[rng.randrange(min(first, len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    if path.name != CARD and rng.random() < 0.8:
        seal(folder)


KINDS = (mutate_card, mutate_header, mutate_bytes)


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
    before_bytes = peak_resident_bytes()
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
    grown_bytes = peak_resident_bytes() - before_bytes
    assert failures == {}
    assert MUTATIONS / 2 < refused < MUTATIONS
    assert grown_bytes < MAX_GROWTH_BYTES


def refused(folder: Path, match: str) -> None:
    with pytest.raises(SpeechError, match=match):
        export.load_export(folder)


# Tensors, header, and facts that the message must name.
REFERENCES = [
    ({}, {"pieces": []}, "pieces"),
    ({}, {"pieces": {"alma": [5.0, 7.0]}}, "pieces"),
    ({}, {"pieces": {"x": [1]}}, "reference of 'x' has 0 frames"),
    ({}, {"pieces": {"alma": [5, 8]}}, "reference of 'alma' has 12 frames"),
    ({"alma": torch.zeros(80)}, {"pieces": {}}, "reference of 'alma' has shape"),
    ({"../x": torch.zeros(3000, 4)}, {"pieces": {}}, "reference of '../x' has shape"),
    ({}, {"front_end": {"n_fft": 2**20}}, r"MelConfig\.n_fft = \d+: must lie in"),
    ({}, {"front_end": {"sample_rate": 10**9}}, r"\.sample_rate = \d+: must lie in"),
]


@pytest.mark.parametrize(("tensors", "over", "facts"), REFERENCES)
def test_impossible_references_are_refused(folder, tensors, over, facts):
    path = folder / "references.safetensors"
    mapped, header = contents(path)
    kept = {key: tensor.clone() for key, tensor in mapped.items()}
    path.write_bytes(file_bytes(kept | tensors, header | over))
    seal(folder)
    refused(folder, facts)


@pytest.mark.parametrize("speakers", [[1, "a"], "alma", []])
def test_speakers_that_are_no_names_and_a_card_larger_than_any_are_refused(folder, speakers):
    seal(folder, speakers=speakers)
    refused(folder, rf"{CARD}.*speakers")
    os.truncate(folder / CARD, 2**30)
    refused(folder, f"{CARD} is damaged.*larger than")


def test_a_card_with_former_names_of_settings_is_read(folder):
    sampling = dataclasses.asdict(export.read_card(folder).settings)
    del sampling["best_of"], sampling["guidance_scale"]
    seal(folder, sampling=sampling | {"candidates": 5, "guidance": 2.0})
    settings = export.read_card(folder).settings
    assert (settings.best_of, settings.guidance_scale) == (5, 2.0)


HEADS = {"alignment_layer": 9, "alignment_head": 0}
FALSE_CARDS = [
    ({"format_version": 3}, "format 3.* reads 2.*update the kit"),
    ({"format_version": 1}, "format 1.* reads 2.*export the voice again"),
    ({"weights": "int3"}, f"{CARD}.*'int3'.*int8"),
    ({"model": {"width": 64}}, rf"{CARD}.*model\.safetensors"),
    ({"model": {"heads": 3}}, rf"{CARD} is damaged.*GPTConfig"),
    ({"model": {"wings": 2}}, rf"{CARD} is damaged.*GPTConfig"),
    ({"model": {"layers": 10**8}}, r"GPTConfig\.layers = \d+: must lie in"),
    ({"sampling": {"best_of": 10**9}}, r"\.best_of = \d+: must lie in"),
    ({"habits": {"pace": float("nan")}}, r"\.pace = nan"),
    ({"habits": HEADS}, "head 0 in layer 9, .* has 2 layers of 2 heads"),
]


@pytest.mark.parametrize(("over", "facts"), FALSE_CARDS)
def test_a_card_that_describes_another_voice_is_refused(folder, over, facts):
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    parts = {k: card[k] | v if isinstance(v, dict) else v for k, v in over.items()}
    seal(folder, **parts)
    refused(folder, facts)


@pytest.mark.parametrize("name", [FILES[0], CARD])
def test_a_link_to_a_device_is_no_file(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refused(folder, f"There is no .*{name}")


def test_int8_scales_that_do_not_fit_are_named(exports, tmp_path):
    folder = Path(shutil.copytree(exports[1], tmp_path / "int8"))
    tensors = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    name = next(name for name in tensors if name.endswith(SCALE))
    data = safetensors.torch.save(tensors | {name: torch.ones(3).half()})
    (folder / "model.safetensors").write_bytes(data)
    seal(folder)
    refused(folder, f"{name} does not fit")
