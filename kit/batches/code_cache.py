"""The code cache: what training reads of each clip, computed once and kept in safetensors shards.

A shard holds codes and reference features of some clips, filed under the digests of the clips'
bytes and under the codec that made them. So new rows cost only their own encoding, a changed text
costs none, and any run that points at the folder shares it. An index, one small file, says where
each row of a manifest lies, with its text ids. Every file carries its own checksum and is written
whole or not at all; a damaged one is made again. Processes need no lock: names follow from content,
and a claim only tells another builder which shard to begin with. The folder stays below
`max_cache_gib`; what lay unused longest goes first. Knows no batch and no model.

Shapes: L samples, M mels, T reference frames.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from kit.audio.clip import KEPT_SILENCE_S, DatasetError, without_edges
from kit.audio.codec import Codec, mels_and_codes
from kit.audio.reference import reference_mel
from kit.audio.spectrogram import Mel, MelConfig
from kit.audio.waveform import load_wave
from kit.base.files import digest, file_digest, make_folder, require_disk, write_atomic
from kit.batches.batching import DataConfig, chunks
from kit.batches.shards import CacheError, claimed, make_room, seal, sweep, touch, unseal
from kit.dataset.ledger import Utterance
from kit.text.tokenizer import Tokenizer

# What may be removed to make room: nothing else that lies in the folder is the cache's.
OWN = ("codes-*.safetensors", "index-*.safetensors")
REHEARSAL = "rehearsal"  # the split of rows that no recording is of: a voice has spoken them
CLIPS_AT_ONCE = 32  # encoded together
Place = tuple[Path, int]  # the shard a clip lies in, and its row there


def cache_key(codec_path: Path, front_end: MelConfig, config: DataConfig) -> str:
    """Names what a shard is made with: changes with the codec's weights and the references."""
    return digest(file_digest(codec_path), front_end, config.reference_frames, KEPT_SILENCE_S)


def clip_digest(path: str) -> str:
    """32 hex digits that change when any byte of the recording does."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be read ({error.strerror}): put it back, or run "
            "notebook 01_data_prep from its top to check the recordings again."
        ) from error


def clip_digests(rows: list[Utterance], known: Sequence[str | None] | None = None) -> list[str]:
    """A digest of every recording: the one in `known`, in the order of `rows`, or `clip_digest`."""
    pairs = list(zip(rows, known or [None] * len(rows), strict=True))
    with ThreadPoolExecutor(2) as pool:  # hashing lets go of Python's lock
        return list(pool.map(lambda pair: pair[1] or clip_digest(pair[0].audio), pairs))


def build_cache(
    rows: list[Utterance],
    codec: Codec,
    front_end: Mel,
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    config: DataConfig,
    progress: Callable = lambda *_: None,
    digests: Sequence[str | None] | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Encode what `folder` lacks of `rows`, one shard at a time; return the index of `rows`.

    `key` is `cache_key`'s. `digests` are those of the recordings, one a row, where they are known
    already: they must change when a recording does, and be of one kind from run to run.
    `progress(done, total)` counts recordings; `say` hears of each damaged shard. An interrupted
    build goes on with what is missing. Raises DatasetError for a recording that cannot be read,
    DiskError for a full disk, CacheError when `rows` alone need more than `max_cache_gib`.
    """
    folder = Path(folder)
    make_folder(folder)
    sweep(folder)
    clips = clip_digests(rows, digests)
    found = find_clips(folder, key, set(clips), say)
    missing = {clip: row for clip, row in zip(clips, rows) if clip not in found}
    total = len(found) + len(missing)
    keep = shards_of(found.values())
    progress(len(found), total)
    for path, part in encode_missing(missing, codec, front_end, folder, key, config, keep):
        for at, clip in enumerate(part):
            found[clip] = (path, at)
        progress(len(found), total)
    return write_index(rows, [found[clip] for clip in clips], tokenizer, folder, config)


def bytes_per_clip(codec: Codec, front_end: Mel, config: DataConfig) -> int:
    """About what one clip takes in a shard: half floats, and 4 bytes a code of some 10 s."""
    n_mels = front_end.config.n_mels
    return 2 * n_mels * config.reference_frames + round(40 * codec.frame_rate)


def find_clips(
    folder: Path, key: str, wanted: set[str], say: Callable[[str], None]
) -> dict[str, Place]:
    """Where those of `wanted` lie that are encoded.

    Every shard of `key` is checked; a damaged one is told and removed.
    """
    found: dict[str, Place] = {}
    for path in sorted(folder.glob(f"codes-{key}-*.safetensors")):
        try:
            clips = from_bytes(unseal(path)["clips"])
        except CacheError as error:
            say(f"{error} Its clips are encoded again.")
            path.unlink(missing_ok=True)
            continue
        for at, clip in enumerate(clips):
            if clip in wanted:
                found[clip] = (path, at)
    return found


def shards_of(places: Iterable[Place]) -> set[Path]:
    return {path for path, _ in places}


def encode_missing(
    missing: dict[str, Utterance],
    codec: Codec,
    front_end: Mel,
    folder: Path,
    key: str,
    config: DataConfig,
    keep: set[Path],
) -> Iterator[tuple[Path, list[str]]]:
    """Make the shards of the clips in `missing`; yield each, once it is there, with its clips."""
    require_disk(folder, len(missing) * bytes_per_clip(codec, front_end, config))
    parts = {
        folder / f"codes-{key}-{digest(clips)}.safetensors": clips
        for clips in chunks(list(missing), config.shard)
    }

    def make(path: Path) -> None:
        rows = [missing[clip] for clip in parts[path]]
        shard = encode(rows, codec, front_end, config)
        shard["clips"] = as_bytes(parts[path])
        data = seal(shard)
        make_room(folder, OWN, config.max_cache_gib, len(data), keep | set(parts))
        write_atomic(path, data)

    for path in claimed(list(parts), make):
        yield path, parts[path]


def encode(
    rows: list[Utterance], codec: Codec, front_end: Mel, config: DataConfig
) -> dict[str, np.ndarray]:
    """Codes and references of `rows` as a shard's tensors; a few waveforms in memory at a time."""
    codes: list = [None] * len(rows)
    references: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i].seconds)  # like lengths together
    for at in chunks(order, CLIPS_AT_ONCE):
        waves = [load_speech(rows[i].audio, codec.heard_rate) for i in at]
        for i, mel, found in zip(at, *mels_and_codes(codec, front_end, waves)):
            codes[i] = found.numpy().astype(np.int32)
            references[i] = reference_mel(mel, config.reference_frames).half().numpy()
    return {
        "codes": np.concatenate(codes),
        "code_counts": np.array([len(c) for c in codes]),
        "references": np.stack(references),
    }


def load_speech(path: str, rate_hz: int) -> Tensor:
    """The recording (L,) at `path`, at `rate_hz`, without the silence around its speech.

    Half a second of it before every sentence, and a voice that is not sure yet begins with the code
    of silence and stays with it.
    """
    return torch.from_numpy(without_edges(load_wave(path, rate_hz).numpy(), rate_hz))


def write_index(
    rows: list[Utterance],
    places: list[Place],
    tokenizer: Tokenizer,
    folder: Path,
    config: DataConfig,
) -> Path:
    """Text ids of `rows` and where their codes lie, as a file named by its content."""
    shards = sorted(shards_of(places))
    number = {path: i for i, path in enumerate(shards)}
    texts = [np.array(tokenizer.encode(row.text), dtype=np.int32) for row in rows]
    tensors = {
        "shards": as_bytes([path.name for path in shards]),
        "rows": as_bytes([{"id": r.id, "speaker": r.speaker, "split": r.split} for r in rows]),
        "places": np.array([(number[path], at) for path, at in places]),
        "texts": np.concatenate(texts),
        "text_counts": np.array([len(t) for t in texts]),
    }
    data = seal(tensors)
    index = folder / f"index-{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
    new_bytes = 0 if index.is_file() else len(data)
    make_room(folder, OWN, config.max_cache_gib, new_bytes, {index, *shards})
    write_atomic(index, data)
    touch({index, *shards})
    return index


def as_bytes(value) -> np.ndarray:
    """JSON as a tensor: a safetensors header is no place for a million rows."""
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), dtype=np.uint8)


def from_bytes(tensor: np.ndarray):
    return json.loads(tensor.tobytes())


class CodeCache:
    """The cached corpus: `rows[i]`, `texts[i]` and `codes[i]` in memory, `references[i]` on disk.

    Codes are small (a day of speech is 8 MB); references are read as they are asked for. Raises
    CacheError for a missing or damaged file.
    """

    def __init__(self, index: Path):
        index = Path(index)
        table = unseal(index)
        self.rows: list[dict] = from_bytes(table["rows"])
        self.texts: list[np.ndarray] = split_by(table["texts"], table["text_counts"])
        shards = [index.parent / name for name in from_bytes(table["shards"])]
        codes = []
        for path in shards:
            part = unseal(path)
            codes.append(split_by(part["codes"], part["code_counts"]))
        self.codes: list[np.ndarray] = [codes[shard][at] for shard, at in table["places"]]
        self.references = References(shards, table["places"].tolist())
        touch({index, *shards})

    def add_rehearsal(
        self, speakers: list[str], texts: list[np.ndarray], codes: list[np.ndarray]
    ) -> None:
        """Rows of the split "rehearsal", here in memory alone.

        They have no reference of their own: a recording of their speaker is one for them.
        """
        for number, speaker in enumerate(speakers):
            row = {"id": f"{REHEARSAL}-{number}", "speaker": speaker, "split": REHEARSAL}
            self.rows.append(row)
        self.texts += texts
        self.codes += codes

    def of_split(self, split: str) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row["split"] == split]

    def length(self, i: int) -> int:
        return len(self.codes[i]) + len(self.texts[i])


def split_by(tensor: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(tensor, counts.cumsum()[:-1])


class References(Sequence):
    """`references[i]`: the reference log-mel (M, T) of row i, half floats, mapped from its shard.

    A file stays mapped while this lives, even when another run has removed it to make room.
    """

    def __init__(self, shards: list[Path], places: list[list[int]]):
        self.shards = shards
        self.places = places
        self._open()

    def _open(self) -> None:
        files = (safetensors.safe_open(path, framework="numpy") for path in self.shards)
        self.slices = [file.get_slice("references") for file in files]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> np.ndarray:
        shard, at = self.places[i]
        return self.slices[shard][at]

    def __getstate__(self) -> dict:  # a mapping cannot travel to a spawned worker; the paths can
        return {"shards": self.shards, "places": self.places}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()


def reference_rows(cache: CodeCache, split: str = "train") -> dict[str, int]:
    """The row of each speaker that is to be the reference: an utterance of middling length."""
    chosen: dict[str, int] = {}
    order = sorted(cache.of_split(split), key=cache.length)
    middle = len(order) // 2
    for i in order[middle:] + order[:middle]:
        chosen.setdefault(cache.rows[i]["speaker"], i)
    return chosen


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """One reference log-mel (M, T) per speaker, that of `reference_rows`."""
    found = {}
    for speaker, i in reference_rows(cache, split).items():
        found[speaker] = torch.from_numpy(cache.references[i]).float()
    return found


def longest_text(cache: CodeCache, split: str = "train") -> int:
    """How many text ids a voice learns to say in one go: all but the longest 5 % are shorter."""
    counts = [len(cache.texts[i]) for i in cache.of_split(split)]
    return int(np.quantile(counts, 0.95, method="higher"))


def slowest_pace(cache: CodeCache, split: str = "train") -> float:
    """Codes a text id takes where a voice speaks slowly: in all but 1 % of its recordings fewer."""
    paces = [len(cache.codes[i]) / len(cache.texts[i]) for i in cache.of_split(split)]
    return float(np.quantile(paces, 0.99))
