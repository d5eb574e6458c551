"""Which utterances of an epoch are planned together, without an order of all of them in memory.

An epoch of up to GROUP_ROWS utterances is one group. A larger one is cut into groups of like size,
each a random draw from the whole corpus: `drawn` says which, from a permutation that is computed
for the numbers asked and never written down. So the first group of thirty million utterances costs
what it costs of a hundred thousand, and so does any other. Knows numbers alone.
"""

import hashlib

import numpy as np

GROUP_ROWS = 2**17  # utterances; changing it changes the order of every larger corpus
ROUNDS = 8  # of the Feistel network


def group_count(rows: int) -> int:
    return max(1, -(-rows // GROUP_ROWS))


def group_bounds(count: int, group: int, groups: int) -> tuple[int, int]:
    """Of `count` things in `groups` parts of like size, the first of part `group` and its end."""
    return group * count // groups, (group + 1) * count // groups


def drawn(count: int, group: int, groups: int, key: str) -> np.ndarray:
    """The numbers of 0..count-1 that are in `group`: each in one group, for every `key` others."""
    first, end = group_bounds(count, group, groups)
    return permuted(np.arange(first, end, dtype=np.uint64), count, key)


def permuted(numbers: np.ndarray, count: int, key: str) -> np.ndarray:
    """Where a random permutation of 0..count-1, set by `key`, takes each of `numbers`.

    A Feistel network permutes 0..4^n-1, whatever its round function (Luby and Rackoff 1988,
    doi:10.1137/0217022). What lands at `count` or beyond walks on until it lands below (Black and
    Rogaway 2002, doi:10.1007/3-540-45760-7_9). Not meant to keep a secret.
    """
    half_bits = max(1, -(-(count - 1).bit_length() // 2))
    digest = hashlib.sha256(key.encode()).digest() + hashlib.sha256(b"2" + key.encode()).digest()
    round_keys = np.frombuffer(digest, dtype="<u8", count=ROUNDS).astype(np.uint64)
    found = feistel(numbers.astype(np.uint64), half_bits, round_keys)
    beyond = np.flatnonzero(found >= count)
    while len(beyond):
        found[beyond] = feistel(found[beyond], half_bits, round_keys)
        beyond = beyond[found[beyond] >= count]
    return found.astype(np.int64)


def feistel(numbers: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of 2 x `half_bits` bits."""
    bits = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left = numbers >> bits
    right = numbers & mask
    for key in round_keys:
        mixed = left ^ (scrambled(right + key) & mask)
        left = right
        right = mixed
    return (left << bits) | right


def scrambled(values: np.ndarray) -> np.ndarray:
    """64 bits that depend on all 64 of `values` (SplitMix64's last steps, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
