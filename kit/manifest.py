"""From a folder of recordings to a checked manifest, and a ledger of all that was refused.

Reads the LJSpeech layout (`metadata*.csv` with `id|text|normalised text|speaker`, no quoting; audio
in `wavs/`), measures every clip, and keeps what can be trained on. What cannot is never dropped in
silence: each refused row stands in the ledger with its file, line and reason. Originals are only
read. Knows nothing of tokens or codes.
"""

import collections
import dataclasses
import json
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile

from kit.config import require, write_atomic
from kit.text import letters, normalize

AUDIO_SUFFIXES = ("", ".wav", ".flac", ".ogg", ".mp3")


class DatasetError(ValueError):
    """A folder or file that is no usable dataset; the message says what was expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Utterance:
    id: str
    audio: str  # path of the recording
    text: str  # normalised
    speaker: str
    split: str  # "train", "held_out", or the name after metadata_
    line: int  # in its metadata file, from 1
    seconds: float = 0.0  # measured by `check_clips`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    file: str
    line: int
    id: str
    reason: str
    seconds: float = 0.0  # of audio lost, where it could be measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestConfig:
    language: str = "am"
    held_out_percent: float = 2.0  # of a folder that brings no split of its own
    shortest_s: float = 0.2
    longest_s: float = 14.0  # what the model's code positions hold
    most_characters: int = 157  # what its text positions hold
    clipped_share: float = 0.01  # refuse above this share of samples at full scale
    silence_peak: float = 0.005  # refuse below this peak
    characters_per_s: tuple = (2, 40)  # outside this, text and audio do not belong together
    refuse_percent: float = 5.0  # training does not start when more of the hours was refused

    def __post_init__(self):
        require(self.shortest_s < self.longest_s, self, "shortest_s", "must be below longest_s.")


def read_ljspeech(folder: Path, config: ManifestConfig) -> tuple[list[Utterance], list[Refusal]]:
    """Rows of every `metadata*.csv` under `folder`; `metadata_NAME.csv` is the split NAME.

    Raises DatasetError when `folder` is no such dataset.
    """
    folder = Path(folder)
    tables = sorted(folder.glob("metadata*.csv"))
    if not tables or not (folder / "wavs").is_dir():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else ""
        raise DatasetError(
            f"{folder} is not a dataset in LJSpeech layout: expected metadata.csv (id|text) and a "
            f"folder wavs/, found {found or 'no such folder'}."
        )
    kept, refused = [], []
    for table in tables:
        own_split = table.stem.removeprefix("metadata").strip("_")
        for number, raw in enumerate(table.read_bytes().split(b"\n"), 1):
            if raw.strip():
                row = _read_row(raw, table, number, own_split, config)
                (kept if isinstance(row, Utterance) else refused).append(row)
    return _without_repeats(kept, refused)


def _read_row(raw: bytes, table: Path, number: int, split: str, config: ManifestConfig):
    try:
        columns = raw.decode("utf-8-sig").rstrip("\r").split("|")
    except UnicodeDecodeError as error:
        return Refusal(
            file=table.name, line=number, id="", reason=f"not valid UTF-8: {error.reason}"
        )
    name = columns[0].strip()
    refuse = lambda reason: Refusal(file=table.name, line=number, id=name, reason=reason)  # noqa: E731
    if not 2 <= len(columns) <= 4:
        return refuse(f"2 to 4 columns expected (id|text|normalised|speaker), got {len(columns)}")
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        return refuse("the id must name a file inside wavs/")
    text = normalize(
        columns[2] if len(columns) > 2 and columns[2].strip() else columns[1], config.language
    )
    if not letters(text):
        return refuse("the text is empty")
    audio = _find_audio(table.parent / "wavs" / name)
    if audio is None:
        return refuse(f"no recording wavs/{name}.wav")
    speaker = columns[3].strip() if len(columns) > 3 else ""
    return Utterance(
        id=name,
        audio=str(audio),
        text=text,
        speaker=speaker or "speaker",
        split=split or ("held_out" if held_out(name, config.held_out_percent) else "train"),
        line=number,
    )


def _find_audio(stem: Path) -> Path | None:
    files = (stem.with_name(stem.name + suffix) for suffix in AUDIO_SUFFIXES)
    try:
        return next((f for f in files if f.is_file()), None)
    except OSError:  # a name longer than the system allows
        return None


def held_out(name: str, percent: float) -> bool:
    """A split by a stable hash of the id: adding rows never moves the ones already there."""
    return zlib.crc32(name.encode()) % 10_000 < percent * 100


def _without_repeats(kept: list[Utterance], refused: list[Refusal]):
    seen, unique = set(), []
    for row in kept:
        if row.id in seen:
            refused.append(_refuse(row, "this id stands in the manifest already"))
        else:
            seen.add(row.id)
            unique.append(row)
    return unique, refused


def _refuse(row: Utterance, reason: str, seconds: float = 0.0) -> Refusal:
    return Refusal(
        file=Path(row.audio).name, line=row.line, id=row.id, reason=reason, seconds=seconds
    )


def read_clip(path: str) -> tuple[np.ndarray, int]:
    """Mono float32 samples (L,) in [-1, 1] and the sample rate.

    Raises DatasetError with the path for a file that cannot be decoded, holds fewer samples than
    its header says, or samples that are no numbers: libsndfile reads the last two in silence.
    """
    try:
        with soundfile.SoundFile(path) as file:
            wave = file.read(dtype="float32", always_2d=True)
            promised, rate = file.frames, file.samplerate
    except (soundfile.LibsndfileError, OSError, RuntimeError) as error:
        raise DatasetError(f"{path} cannot be read as audio: {error}") from error
    if len(wave) == 0 or len(wave) < promised or _cut_short(path, wave, rate):
        raise DatasetError(f"{path} is truncated: {len(wave)} samples are there")
    if not np.isfinite(wave).all():
        raise DatasetError(f"{path} holds samples that are not finite numbers")
    return wave.mean(axis=1), rate


def _cut_short(path: str, wave: np.ndarray, rate: int) -> bool:
    """Whether a WAV's data chunk promises more bytes than the file has."""
    with open(path, "rb") as file:
        head = file.read(65536)
        size = file.seek(0, 2)
    at = 12 if head.startswith(b"RIFF") else len(head)
    while head[at : at + 4] != b"data" and at + 8 <= len(head):  # walk the chunks before the audio
        at += 8 + (int.from_bytes(head[at + 4 : at + 8], "little") + 1) // 2 * 2
    promised = int.from_bytes(head[at + 4 : at + 8], "little")
    return at + 8 <= len(head) and promised != 0xFFFFFFFF and at + 8 + promised > size + 1


def check_clip(row: Utterance, config: ManifestConfig) -> Utterance | Refusal:
    """`row` with its measured seconds, or why it cannot be trained on."""
    try:
        wave, rate = read_clip(row.audio)
    except DatasetError as error:
        return _refuse(row, str(error).removeprefix(f"{row.audio} "))
    seconds, peak = len(wave) / rate, float(np.abs(wave).max())
    pace = len(letters(row.text)) / seconds
    low, high = config.characters_per_s
    clipped = float((np.abs(wave) > 0.999).mean())
    problems = {
        f"shorter than {config.shortest_s} s": seconds < config.shortest_s,
        f"longer than {config.longest_s:.1f} s": seconds > config.longest_s,
        f"text longer than {config.most_characters} characters": (
            len(row.text) > config.most_characters
        ),
        "silent": peak < config.silence_peak,
        f"clipped ({clipped:.1%} of samples)": clipped > config.clipped_share,
        f"{pace:.1f} characters a second: text and audio do not match": not low <= pace <= high,
    }
    reason = next((text for text, found in problems.items() if found), None)
    if reason:
        return _refuse(row, reason, seconds)
    return dataclasses.replace(row, seconds=seconds)


def check_clips(
    rows: list[Utterance],
    config: ManifestConfig,
    workers: int = 2,
    progress: Callable = lambda *_: None,
) -> tuple[list[Utterance], list[Refusal]]:
    """Decode and measure every clip; `progress(done, total)` is called along the way."""
    kept, refused = [], []
    with ThreadPoolExecutor(workers) as pool:  # decoding releases Python's lock
        for done, row in enumerate(pool.map(lambda r: check_clip(r, config), rows), 1):
            (kept if isinstance(row, Utterance) else refused).append(row)
            if done % 500 == 0 or done == len(rows):
                progress(done, len(rows))
    return kept, refused


def load_manifest(
    folder: Path, config: ManifestConfig, into: Path, progress: Callable = lambda *_: None
):
    """Read and check `folder`, write `manifest.jsonl` and `ledger.jsonl` under `into`, return both.

    Raises DatasetError when nothing is left, or more than `refuse_percent` of the hours is refused.
    """
    rows, unreadable = read_ljspeech(folder, config)
    kept, refused = check_clips(rows, config, progress=progress)
    refused = unreadable + refused
    for name, table in (("manifest", kept), ("ledger", refused)):
        lines = (json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in table)
        write_atomic(Path(into) / f"{name}.jsonl", "".join(line + "\n" for line in lines))
    refuse_share(kept, refused, config, into)
    return kept, refused


def refuse_share(kept: list, refused: list, config: ManifestConfig, into: Path) -> None:
    """Raise DatasetError when too much was refused; clips of unknown length count as average."""
    reasons = collections.Counter(r.reason for r in refused).most_common(3)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    if not any(row.split == "train" for row in kept):
        raise DatasetError(f"No utterance can be trained on. Refused: {listed or 'nothing'}.")
    average = sum(row.seconds for row in kept) / len(kept)
    lost = sum(row.seconds or average for row in refused)
    percent = 100 * lost / (lost + average * len(kept))
    if percent > config.refuse_percent:
        raise DatasetError(
            f"{percent:.1f} % of the hours was refused (limit {config.refuse_percent} %): "
            f"{listed}. "
            f"See {Path(into) / 'ledger.jsonl'}; mend the clips, or raise `refuse_percent`."
        )


def read_manifest(folder: Path) -> list[Utterance]:
    """The checked manifest that 01_data_prep left in `folder`."""
    path = Path(folder) / "manifest.jsonl"
    if not path.is_file():
        raise DatasetError(f"There is no {path}: run notebook 01_data_prep first.")
    return [Utterance(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
