"""From a checked manifest to batches: token and code cache on disk, and the stream over it.

Codes, text ids and reference features are computed once and kept in safetensors shards named by
what they were made from (codec weights, tokenizer, clips), so a second run reads no audio and an
interrupted one goes on. `CodeStream` is an IterableDataset of effective batches of like lengths;
its position is two integers, carried by every batch; resuming reads nothing of what was skipped.

Shapes: B batch, S packed sequence, M mels, T reference frames.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
import torchaudio.functional
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from kit.codec import MelCodec
from kit.config import digest, require, write_atomic
from kit.manifest import Utterance, read_clip
from kit.text import Tokenizer


class CacheError(ValueError):
    """A code cache that is missing or damaged; the message names the file and the cure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    effective_batch: int = 32  # utterances per optimiser step, however they are split
    micro_batch: int = 32  # utterances per forward pass
    sort_window: int = 1024  # shuffled utterances sorted by length at a time
    short_first: bool = False  # the first epoch from short to long (SortaGrad, Amodei et al. 2016)
    reference_frames: int = 86  # mel frames of the reference clip (86 is a second at 22 050 Hz)
    shard: int = 2000  # utterances per cache file
    seed: int = 0

    def __post_init__(self):
        whole = self.effective_batch % self.micro_batch == 0
        require(
            whole, self, "micro_batch", f"must divide effective_batch ({self.effective_batch})."
        )

    @property
    def grad_accum(self) -> int:
        return self.effective_batch // self.micro_batch

    def split(self, grad_accum: int) -> "DataConfig":
        """The same effective batch in `grad_accum` passes; ConfigError when it won't divide."""
        return dataclasses.replace(self, micro_batch=max(1, self.effective_batch // grad_accum))


def load_wave(path: str, sample_rate: int) -> Tensor:
    """Mono waveform (L,) at `sample_rate`."""
    wave, rate = read_clip(path)
    wave = torch.from_numpy(wave)
    return wave if rate == sample_rate else torchaudio.functional.resample(wave, rate, sample_rate)


def reference_mel(mel: Tensor, frames: int) -> Tensor:
    """The middle `frames` of a log-mel (M, T), repeated first when there are too few."""
    while mel.shape[-1] < frames:
        mel = torch.cat((mel, mel), dim=-1)
    start = (mel.shape[-1] - frames) // 2
    return mel[:, start : start + frames]


def cache_key(
    rows: list[Utterance], codec_path: Path, tokenizer_path: Path, config: DataConfig
) -> str:
    """Changes with the codec's weights, the tokenizer, the texts, or any clip's size or date."""
    made_of = [
        hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in (codec_path, tokenizer_path)
    ]
    clips = [
        (r.id, r.text, Path(r.audio).stat().st_size, Path(r.audio).stat().st_mtime_ns) for r in rows
    ]
    return digest(made_of, clips, config.reference_frames, config.shard)


def build_cache(
    rows: list[Utterance],
    codec: MelCodec,
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    config: DataConfig,
    progress: Callable = lambda *_: None,
) -> Path:
    """Write what is missing of the cache for `rows` under `folder`; return its index file.

    One shard at a time, atomically: an interrupted build goes on at the first missing shard.
    """
    index = Path(folder) / f"{key}.json"
    names = [f"{key}-{i:05d}.safetensors" for i in range(0, len(rows), config.shard)]
    for done, name in enumerate(names):
        if not sound(Path(folder) / name):
            part = rows[done * config.shard : (done + 1) * config.shard]
            write_atomic(Path(folder) / name, encode_shard(part, codec, tokenizer, config))
        progress(min(len(rows), (done + 1) * config.shard), len(rows))
    write_atomic(index, json.dumps({"shards": names, "utterances": len(rows)}))
    return index


def sound(path: Path) -> bool:
    """Whether a shard is there and can be read; a damaged one is made again."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return "rows" in (file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return False


def encode_shard(
    rows: list[Utterance], codec: MelCodec, tokenizer: Tokenizer, config: DataConfig
) -> bytes:
    """Codes, text ids and references of `rows` as the bytes of one safetensors file."""
    waves = [load_wave(row.audio, codec.sample_rate) for row in rows]
    codes: list = [None] * len(rows)
    references: list = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(waves[i]))
    for at in _batched(order, 32):
        mels, found = codec.encode_clips([waves[i] for i in at])
        for i, mel, row in zip(at, mels, found):
            codes[i] = row.numpy().astype(np.int32)
            references[i] = reference_mel(mel, config.reference_frames).half().numpy()
    texts = [np.array(tokenizer.encode(row.text), dtype=np.int32) for row in rows]
    tensors = {
        "codes": np.concatenate(codes),
        "code_counts": np.array([len(c) for c in codes]),
        "texts": np.concatenate(texts),
        "text_counts": np.array([len(t) for t in texts]),
        "references": np.stack(references),
    }
    head = [{"id": r.id, "speaker": r.speaker, "split": r.split} for r in rows]
    return safetensors.numpy.save(tensors, metadata={"rows": json.dumps(head, ensure_ascii=False)})


def _batched(items: list, size: int) -> Iterator[list]:
    return (items[i : i + size] for i in range(0, len(items), size))


class CodeCache:
    """The cached corpus in memory: `codes[i]`, `texts[i]`, `references[i]`, `rows[i]`.

    Codes are small (a day of speech is 8 MB). Raises CacheError for a missing or damaged file.
    """

    def __init__(self, index: Path):
        if not Path(index).is_file():
            raise CacheError(f"There is no code cache at {index}: run notebook 01_data_prep first.")
        self.rows: list[dict] = []
        self.codes: list[np.ndarray] = []
        self.texts: list[np.ndarray] = []
        self.references: list[np.ndarray] = []
        try:
            names = json.loads(Path(index).read_text())["shards"]
        except (ValueError, KeyError) as error:
            raise CacheError(
                f"{index} is damaged: delete it and run 01_data_prep again."
            ) from error
        for name in names:
            self._read(Path(index).parent / name)

    def _read(self, path: Path) -> None:
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                part = {k: file.get_tensor(k) for k in file.keys()}
                self.rows += json.loads(file.metadata()["rows"])
        except (OSError, safetensors.SafetensorError) as error:
            raise CacheError(
                f"{path} is missing or damaged ({error}): run 01_data_prep again."
            ) from error
        self.codes += np.split(part["codes"], part["code_counts"].cumsum()[:-1])
        self.texts += np.split(part["texts"], part["text_counts"].cumsum()[:-1])
        self.references += list(part["references"])

    def of_split(self, split: str) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row["split"] == split]

    def length(self, i: int) -> int:
        return len(self.codes[i]) + len(self.texts[i])


class CodeStream(IterableDataset):
    """Effective batches of like lengths, in an order set by (seed, epoch), for ever.

    `collate(parts, position)` makes the batch; a part is one micro-batch: (text ids, codes,
    references (B, M, T)). `position` {"epoch", "batch"} says where to begin; the one a batch
    carries is that of the next. With DataLoader workers, each makes every n-th batch and the loader
    restores the order.
    """

    def __init__(
        self, cache: CodeCache, split: str, config: DataConfig, collate: Callable, position=None
    ):
        self.cache, self.config, self.collate = cache, config, collate
        self.members = cache.of_split(split)
        self.position = dict(position or {"epoch": 0, "batch": 0})
        if not self.members:
            raise CacheError(f"The code cache holds no utterance of the split `{split}`.")
        self.voices: dict[str, list[int]] = {}
        for i in self.members:
            self.voices.setdefault(cache.rows[i]["speaker"], []).append(i)

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of `epoch` as lists of utterances; every utterance once, none left out."""
        rng = random.Random(f"{self.config.seed} {epoch}")
        order = rng.sample(self.members, len(self.members))
        size, window = self.config.effective_batch, self.config.sort_window
        batches = []
        for part in _batched(order, window):
            part.sort(key=self.cache.length)
            batches += _batched(part, size)
        rng.shuffle(batches)
        if self.config.short_first and epoch == 0:
            batches.sort(key=lambda batch: self.cache.length(batch[0]))
        return batches

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        role, roles = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, first = self.position["epoch"], self.position["batch"]
        count = 0
        while True:
            plan = self.plan(epoch)
            for number in range(first, len(plan)):
                if count % roles == role:
                    yield self.batch(plan[number], epoch, number, last=number + 1 == len(plan))
                count += 1
            epoch, first = epoch + 1, 0

    def batch(self, members: list[int], epoch: int, number: int, last: bool):
        """Batch `number` of `epoch`: each utterance with a reference clip of the same speaker."""
        rng, parts = random.Random(f"{self.config.seed} {epoch} {number}"), []
        for rows in _batched(members, self.config.micro_batch):
            voices = [rng.choice(self.voices[self.cache.rows[i]["speaker"]]) for i in rows]
            cond = torch.from_numpy(np.stack([self.cache.references[v] for v in voices])).float()
            codes = [self.cache.codes[i].tolist() for i in rows]
            parts.append(([self.cache.texts[i].tolist() for i in rows], codes, cond))
        return self.collate(parts, {"epoch": epoch + last, "batch": 0 if last else number + 1})


def validation_batches(stream: CodeStream) -> list:
    """Every utterance of `stream` once, sorted by length, each with a fixed reference."""
    order = sorted(stream.members, key=stream.cache.length)
    parts = _batched(order, stream.config.effective_batch)
    return [stream.batch(part, 0, number, last=False) for number, part in enumerate(parts)]


def speaker_references(cache: CodeCache, split: str = "train") -> dict[str, Tensor]:
    """One reference log-mel (M, T) per speaker: that of an utterance of middling length."""
    chosen: dict[str, Tensor] = {}
    order = sorted(cache.of_split(split), key=cache.length)
    middle = len(order) // 2
    for i in order[middle:] + order[:middle]:
        chosen.setdefault(cache.rows[i]["speaker"], torch.from_numpy(cache.references[i]).float())
    return chosen


def padding_share(batches: list) -> float:
    """Share of grid cells that hold no token: what random batches waste and like lengths save."""
    cells = sum(m.tokens.numel() for b in batches for m in b.micro)
    return 1 - sum(b.tokens for b in batches) / cells


def random_padding_share(stream: CodeStream, batches: int = 50) -> float:
    """What `padding_share` would be had utterances been drawn in any order."""
    rng, size = random.Random(0), stream.config.micro_batch
    lengths = [stream.cache.length(i) for i in stream.members]
    grid = [rng.sample(lengths, min(size, len(lengths))) for _ in range(batches)]
    return 1 - sum(map(sum, grid)) / sum(max(row) * len(row) for row in grid)
