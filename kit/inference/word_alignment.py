"""Where a transcript differs from its text, word by word: left out, doubled, merged, replaced.

The cheapest way from one to the other (Levenshtein's, over words), in which two words may also
become one, and one two. Knows words alone.
"""

import collections
import dataclasses
import functools
import itertools
import math

from kit.audio.recognizer import edit_distance
from kit.text.normalize import letters

# Kinds of error, and what each means.
KINDS = {
    "left out": "a word that was not heard",
    "doubled": "a word that was heard twice",
    "added": "a word that the text does not have",
    "merged": "two words that were heard as one",
    "split": "one word that was heard as two",
    "replaced": "another word was heard",
    "misspelt": "a letter or a few are others: often the recogniser's mistake",
}
MERGE_COST = 0.5  # what it costs that two words become one, or one two: less than a word left out
MISSPELT = 0.5  # share of letters that may differ in a word that is still the same
CACHE_SIZE = 50_000  # pairs of words whose difference is not counted anew
STEPS = ((1, 1), (1, 0), (0, 1), (2, 1), (1, 2))  # words of the text, words heard


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordPair:
    """A word or two of a text, and what was heard in their place."""

    words: tuple[str, ...]  # of the text; none for one that was added
    heard: tuple[str, ...]  # none for one that was left out
    kind: str  # one of KINDS; "" where both are the same


def align_words(text: str, heard: str) -> list[WordPair]:
    """The words of `text` beside those of `heard`, in order; punctuation does not count."""
    words = letters(text).split()
    said = letters(heard).split()
    if words == said:
        return [WordPair(words=(word,), heard=(word,), kind="") for word in words]
    best = {(0, 0): (0.0, None)}  # (words read, words heard): what it cost, and the last pair
    for i, j in itertools.product(range(len(words) + 1), range(len(said) + 1)):
        ways = []
        for di, dj in STEPS:
            if (i - di, j - dj) in best:
                mine = tuple(words[i - di : i])
                theirs = tuple(said[j - dj : j])
                cost, kind = word_cost(mine, theirs)
                pair = WordPair(words=mine, heard=theirs, kind=kind)
                ways.append((best[i - di, j - dj][0] + cost, pair))
        if ways:
            best[i, j] = min(ways, key=lambda way: way[0])
    pairs = []
    i = len(words)
    j = len(said)
    while i or j:
        pair = best[i, j][1]
        pairs.append(pair)
        i -= len(pair.words)
        j -= len(pair.heard)
    return pairs[::-1]


@functools.lru_cache(CACHE_SIZE)
def word_cost(words: tuple[str, ...], heard: tuple[str, ...]) -> tuple[float, str]:
    """What it costs to hear `heard` for `words`, and the kind of error; infinite where it is none.

    One word or none on either side, or two on one of them.
    """
    if not heard:
        return 1.0, "left out"
    if not words:
        return 1.0, "added"
    if len(words) == 2:
        return _joint(words, heard[0], "merged")
    if len(heard) == 2:
        doubled = max(difference(word, words[0]) for word in heard)
        if doubled <= MISSPELT:
            return MERGE_COST + doubled, "doubled"
        return _joint(heard, words[0], "split")
    off = difference(words[0], heard[0])
    if off == 0:
        return 0.0, ""
    return off, "misspelt" if off <= MISSPELT else "replaced"


def _joint(two: tuple[str, ...], one: str, kind: str) -> tuple[float, str]:
    """The cost of `one` for both words of `two`: it has to be nearer to both than to either."""
    both = "".join(two)
    if abs(len(both) - len(one)) > MISSPELT * max(len(both), len(one)):
        return math.inf, kind  # told by the lengths alone, which is much quicker
    off = difference(both, one)
    nearer = off < min(difference(word, one) for word in two)
    return (MERGE_COST + off if nearer and off <= MISSPELT else math.inf), kind


@functools.lru_cache(CACHE_SIZE)
def difference(word: str, other: str) -> float:
    """Share of letters that differ, 0 to 1."""
    return edit_distance(word, other) / max(len(word), len(other))


def count_kinds(pairs: list[WordPair]) -> dict[str, int]:
    """How often each of KINDS occurs."""
    found = collections.Counter(pair.kind for pair in pairs)
    return {kind: found[kind] for kind in KINDS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordStats:
    """How often one word of the texts was there, and how often it was heard wrong."""

    word: str
    count: int
    wrong: int
    kinds: tuple[str, ...]  # of its errors, the commonest first
    heard: tuple[str, ...]  # in its place, the commonest first


def word_stats(pairs: list[WordPair]) -> list[WordStats]:
    """Every word of the texts, those that were wrong most often first."""
    by_word = collections.defaultdict(list)
    for pair in pairs:
        for word in pair.words:
            by_word[word].append(pair)
    records = []
    for word, mine in by_word.items():
        wrong = [pair for pair in mine if pair.kind]
        kinds = collections.Counter(pair.kind for pair in wrong)
        heard = collections.Counter(" ".join(pair.heard) for pair in wrong)
        record = WordStats(
            word=word,
            count=len(mine),
            wrong=len(wrong),
            kinds=tuple(kind for kind, _ in kinds.most_common()),
            heard=tuple(said for said, _ in heard.most_common()),
        )
        records.append(record)
    return sorted(records, key=lambda r: (-r.wrong, r.wrong / r.count, r.word))
