"""Random runs of a recording's words: many short rows from a few long recordings.

Half an hour of a person is some 200 recordings of ten seconds. A model has memorised them before
it learns to follow a text of 130 letters. So a row may be a run of a recording's words, another one
in each epoch: short ones first, later longer ones and whole recordings. Where words begin in text
ids and codes is looked up once (find_words.py); codes are neither made again nor stored twice.
"""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kit.base.files import digest
from kit.batches.code_cache import open_arrays

WORDS = "words.safetensors"  # in a run's folder
FIRST_WORDS = 4  # of the longest run at first ...
LAST_WORDS = 10  # ... and in the end, when some rows are ...
WHOLE_SHARE = 0.1  # ... whole recordings
LEAST_S = 0.6  # of the shortest run: the shortest words alone teach noise


class Cut(NamedTuple):
    """The part of a row that is learnt."""

    texts: slice  # of its text ids
    codes: slice
    speed: int = 0  # number of the speed at which it is played; 0: as it was recorded

    @property
    def tokens(self) -> int:
        """Text ids and codes."""
        return self.texts.stop - self.texts.start + self.codes.stop - self.codes.start

    def at_speed(self, number: int, texts: int, codes: int, faster: int) -> "Cut":
        """The same part of a row of `texts` ids and `codes` codes, of `faster` codes at a speed."""
        start, stop, _ = self.codes.indices(codes)
        part = slice(round(start * faster / codes), round(stop * faster / codes))
        return Cut(slice(*self.texts.indices(texts)[:2]), part, number)


WHOLE = Cut(slice(None), slice(None))


class WordSpans:
    """Where the words of each row of an index lie; made by `find_words`.

    `seed` and an epoch decide every run. After `rows` rows the longest runs have LAST_WORDS words.
    Raises DamagedFileError for a missing or damaged file.
    """

    def __init__(self, path: Path, rows: int, least_codes: int, seed: int):
        arrays = open_arrays(path, ("counts", "texts", "codes"))
        self.starts = np.concatenate([[0], arrays["counts"].cumsum()])
        self.texts = arrays["texts"]
        self.codes = arrays["codes"]
        self.rows = rows
        self.least_codes = least_codes
        self.seed = seed
        self.mark = digest(*(array.tobytes() for array in arrays.values()), rows, least_codes)

    def edges(self, i: int) -> tuple[list[int], list[int]]:
        """Where words of row i begin in its text ids and codes, and the last ends; or [], []."""
        own = slice(*self.starts[i : i + 2])
        return self.texts[own].tolist(), self.codes[own].tolist()

    def cut(self, i: int, epoch: int, share: float) -> Cut:
        """The run of words of row i in `epoch`, `share` (0..1) of the way to the longest runs."""
        texts, codes = self.edges(i)
        words = len(texts) - 1
        if words < 2:
            return WHOLE
        chance = random.Random(f"{self.seed} {epoch} {i} words")
        if chance.random() < share * WHOLE_SHARE:
            return WHOLE
        longest = FIRST_WORDS + share * (LAST_WORDS - FIRST_WORDS)
        count = min(words, 1 + int(chance.random() * longest))
        first = int(chance.random() * (words - count + 1))
        end = first + count
        while codes[end] - codes[first] < self.least_codes and (first > 0 or end < words):
            if end < words:
                end += 1
            else:
                first -= 1
        return Cut(slice(texts[first], texts[end]), slice(codes[first], codes[end]))
