"""Make the index of a corpus: each row's text ids and the place of its codes, as columns.

What concerns all rows (those of a split or speaker, histograms of lengths, each speaker's
reference) is computed once, when the index is made. `CodeCache` reads it.

Shapes: N rows, S splits, P speakers.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from kit.batches.code_shards import Clip
from kit.batches.columns import as_bytes, narrow, offsets_of

LENGTHS = ("texts", "codes", "tokens")  # text ids, codes, and both together


def index_columns(
    ids: list[str],
    speakers: list[str],
    splits: list[str],
    texts: list[np.ndarray],
    clips: list[Clip],
) -> dict[str, np.ndarray]:
    """Return the columns of an index; each list has a value a row, `texts` the ids of its text."""
    shard_paths, shards = numbered(clip.shard for clip in clips)
    speaker_names, speaker_numbers = numbered(speakers)
    split_names, split_numbers = numbered(splits)
    encoded = [name.encode() for name in ids]
    checks = np.array([(clip.code_check, clip.reference_check) for clip in clips], np.uint32)
    columns = {
        "ids": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "id_offsets": offsets_of(encoded),
        "texts": narrow(np.concatenate(texts)),
        "text_offsets": offsets_of(texts),
        "codes": narrow(np.array([clip.codes for clip in clips])),
        "shards": shards,
        "places": narrow(np.array([clip.place for clip in clips])),
        "code_checks": checks[:, 0].copy(),
        "reference_checks": checks[:, 1].copy(),
        "speakers": speaker_numbers,
        "splits": split_numbers,
    }
    return add_counts(columns, [path.name for path in shard_paths], speaker_names, split_names)


def numbered(values: Iterable) -> tuple[list, np.ndarray]:
    """Return the sorted distinct `values`, and the index of each of `values` among them."""
    values = list(values)
    names = sorted(set(values))
    numbers = {name: i for i, name in enumerate(names)}
    return names, narrow(np.array([numbers[value] for value in values]))


def add_counts(
    columns: dict[str, np.ndarray], shards: list[str], speakers: list[str], splits: list[str]
) -> dict[str, np.ndarray]:
    """Return `columns` (one number a row) with the names and the statistics of all rows."""
    result = dict(columns)
    result["shard_names"] = as_bytes(shards)
    result["speaker_names"] = as_bytes(speakers)
    result["split_names"] = as_bytes(splits)
    text_counts = np.diff(columns["text_offsets"].astype(np.int64))
    tokens = text_counts + columns["codes"]
    result["tokens"] = narrow(tokens)
    in_split = [columns["splits"] == number for number in range(len(splits))]
    for name, counts in zip(LENGTHS, (text_counts, columns["codes"], tokens)):
        size = int(counts.max(initial=0)) + 1
        rows = [np.bincount(counts[members], minlength=size) for members in in_split]
        result[f"{name}_histogram"] = np.array(rows, dtype=np.int64)  # (S, largest count + 1)
    # The rows of each split in order, and those of each speaker in it.
    of_both = columns["splits"].astype(np.int64) * len(speakers) + columns["speakers"]
    sizes = np.bincount(of_both, minlength=len(splits) * len(speakers))
    starts = np.concatenate([[0], sizes.cumsum()])
    result["members"] = narrow(np.argsort(columns["splits"], kind="stable"))
    result["member_starts"] = starts[:: len(speakers)].copy()  # (S + 1,)
    result["voices"] = narrow(np.lexsort((columns["speakers"], columns["splits"])))
    result["voice_starts"] = narrow(starts)  # (S P + 1,)
    result["references"] = middle_rows(columns, tokens, len(splits), len(speakers))
    result["corpus"] = as_bytes(corpus_digest(result))
    return result


def middle_rows(
    columns: dict[str, np.ndarray], tokens: np.ndarray, split_count: int, speaker_count: int
) -> np.ndarray:
    """Return each speaker's row of medium length in each split (S, P), -1 for none.

    It is the speaker's shortest row from the split's median length on, or else their shortest.
    """
    rows = np.full((split_count, speaker_count), -1, dtype=np.int64)
    for split in range(split_count):
        members = np.flatnonzero(columns["splits"] == split)
        order = members[np.argsort(tokens[members], kind="stable")]
        middle = len(order) // 2
        order = np.concatenate([order[middle:], order[:middle]])
        speakers, first = np.unique(columns["speakers"][order], return_index=True)
        rows[split, speakers] = order[first]
    return rows


def corpus_digest(columns: dict[str, np.ndarray]) -> str:
    """Return 8 hex digits that change with any id, split or length, and with their order."""
    sha = hashlib.sha256()
    for name in ("ids", "id_offsets", "splits", "split_names", "tokens"):
        sha.update(columns[name].tobytes())
    return sha.hexdigest()[:8]
