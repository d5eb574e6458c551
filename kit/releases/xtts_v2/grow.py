"""Extend an XTTS vocabulary with tokens learned from new text; all old ids stay.

Byte-pair encoding is continued (Sennrich et al. 2016, arXiv:1508.07909): the text is tokenized with
the old vocabulary, and the most frequent pair of neighbours is merged, repeatedly. New merges
follow the old ones, so the old merges are still applied first; new ids follow the highest old one,
so embedding rows, gaps, START and STOP keep their ids.
"""

import copy
import json
import unicodedata
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from kit.base.errors import SpeechError
from kit.base.files import write_atomic
from kit.releases.xtts_v2.tokenizer import TAG, XTTSTokenizer, read_ids
from kit.text.tokenizer import BaseTokenizer
from kit.text.train_tokenizer import OFTEN

PIECES = 2000  # users found about this number best, 5,000 worse
Pair = tuple[str, str]


def grow_xtts(
    base: XTTSTokenizer, lines: list[str], path: Path, pieces: int = PIECES
) -> XTTSTokenizer:
    """Write the vocabulary of `base`, extended by the tokens of `lines` (normalised), to `path`.

    New are the language tag, all characters that it lacks, and up to `pieces` longer tokens, seen
    100 times. Raises SpeechError without text, or for letters that the release romanises.
    """
    lines = [base.spell(line) for line in lines if line.strip()]
    if not lines:
        raise SpeechError("There is no text to learn pieces from: every line was empty.")
    described = json.loads(base.file_bytes())
    for entry in described.get("added_tokens") or []:
        # The id of one that is only here depends on the vocabulary size, which changes.
        described["model"]["vocab"][entry["content"]] = entry["id"]
    _add_tag(described, base.tag)
    _add_pieces(described, base.uncovered("".join(lines)))
    with TemporaryDirectory(prefix="pieces-") as folder:
        spelling_all = _saved(described, Path(folder) / "vocab.json", base)
        words = _words(spelling_all, lines)
    merges = learned_merges(words, pieces, set(described["model"]["vocab"]))
    _add_pieces(described, ["".join(pair) for pair in merges])
    _add_merges(described, merges)
    grown = _saved(described, path, base)
    old = base.vocabulary.ids
    assert all(grown.vocabulary.ids[piece] == number for piece, number in old.items())
    return grown


def describe_growth(base: XTTSTokenizer, grown: XTTSTokenizer, pieces: int = PIECES) -> str:
    new = [grown.piece(number) for number in range(base.vocab_size, grown.vocab_size)]
    tags = [piece for piece in new if TAG.fullmatch(piece)]
    letters = [piece for piece in new if len(piece) == 1]
    longer = len(new) - len(tags) - len(letters)
    line = f"{base.vocab_size} ids stay; new are {len(letters)} characters, {longer} longer pieces"
    if tags:
        line += f" and the tag {tags[0]}"
    if longer < pieces:
        line += (
            f". {pieces} longer ones were requested, but further ones would occur fewer than "
            f"{OFTEN} times in this text, too few to learn how they sound"
        )
    return f"{line}."


def xtts_spellings(base: XTTSTokenizer, grown: XTTSTokenizer) -> dict[int, list[int]]:
    """For each id of `grown` that `base` has not: the ids in which `base` spells its piece.

    A letter that `base` lacks is spelt by its name in Unicode (ETHIOPIC SYLLABLE BA), a tag by all
    tags that `base` has.
    """
    new = range(base.vocab_size, grown.vocab_size)
    return {number: _spelling(base, grown.piece(number)) for number in new}


def _spelling(base: XTTSTokenizer, piece: str) -> list[int]:
    if TAG.fullmatch(piece):
        tags = [base.vocabulary.ids[f"[{tag}]"] for tag in base.tags()]
        return tags or [base.start]
    unknown = base.uncovered(piece)
    return base.tokenize("".join(sounds(base, c) if c in unknown else c for c in piece))


def sounds(base: BaseTokenizer, char: str) -> str:
    """Spell a letter that `base` lacks without its accent, or by its name; else return it."""
    plain = unicodedata.normalize("NFD", char)[0]
    name = unicodedata.name(char, "").partition(" WITH ")[0]
    named = ""
    if "LETTER" in name or "SYLLABLE" in name:
        named = name.split()[-1].lower()
    for spelling in (plain, named, named.upper()):
        if spelling and not base.uncovered(spelling):
            return spelling
    return char


def learned_merges(words: Counter, most: int, known: set[str]) -> list[Pair]:
    """Return the next merges for `words` {pieces of a word: times}, each of a pair seen 100 times.

    No merge makes a piece that is in `known`. Ties are broken by the pieces.
    """
    known = set(known)
    cut = [list(word) for word in words]
    times = list(words.values())
    pairs = Counter()
    places = defaultdict(set)  # of a pair: the numbers of the words that have it, or had it
    for number, word in enumerate(cut):
        for pair in zip(word, word[1:]):
            pairs[pair] += times[number]
            places[pair].add(number)
    frequent = {pair: found for pair, found in places.items() if pairs[pair] >= OFTEN}
    merges = []
    while frequent and len(merges) < most:
        best, count = max(((pair, pairs[pair]) for pair in frequent), key=itemgetter(1, 0))
        if count < OFTEN:
            break
        numbers = frequent.pop(best)
        made = "".join(best)
        if made in known:  # put together otherwise already
            continue
        known.add(made)
        merges.append(best)
        places = defaultdict(set)
        for number in numbers:
            before = cut[number]
            cut[number] = _merged(before, best)
            for pair in zip(before, before[1:]):
                pairs[pair] -= times[number]
            for pair in zip(cut[number], cut[number][1:]):
                pairs[pair] += times[number]
                if made in pair:  # only such a pair can have become frequent
                    places[pair].add(number)
        frequent.update({pair: found for pair, found in places.items() if pairs[pair] >= OFTEN})
    return merges


def _merged(word: list[str], pair: Pair) -> list[str]:
    pieces = []
    for piece in word:
        if pieces and (pieces[-1], piece) == pair:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def _words(tokenizer: XTTSTokenizer, lines: list[str]) -> Counter:
    """How often each word occurs, by its pieces; no merge reaches across words."""
    split = tokenizer.model.pre_tokenizer
    texts = Counter(word for line in lines for word in line.split())
    words = Counter()
    for text, count in texts.items():
        parts = [part for part, _ in split.pre_tokenize_str(text)] if split else [text]
        for part in parts:
            words[tuple(map(tokenizer.piece, tokenizer.tokenize(part)))] += count
    return words


def _add_tag(described: dict, tag: str) -> None:
    piece = f"[{tag}]"
    if piece in described["model"]["vocab"]:
        return
    _add_pieces(described, [piece])
    entry = copy.deepcopy(described["added_tokens"][0])  # how this file has its other marks
    entry["content"] = piece
    entry["id"] = described["model"]["vocab"][piece]
    described["added_tokens"].append(entry)


def _add_pieces(described: dict, pieces: list[str]) -> None:
    vocabulary = described["model"]["vocab"]
    following = max(vocabulary.values()) + 1
    for number, piece in enumerate(pieces, following):
        vocabulary[piece] = number


def _add_merges(described: dict, merges: list[Pair]) -> None:
    old = described["model"]["merges"]
    as_lists = bool(old) and isinstance(old[0], list)
    for pair in merges:
        old.append(list(pair) if as_lists else " ".join(pair))


def _saved(described: dict, path: Path, base: XTTSTokenizer) -> XTTSTokenizer:
    read_ids(described)  # raises for ids that tokenizers would reject, before anything is written
    words = json.dumps(described, ensure_ascii=False, indent=2)
    write_atomic(Path(path), words)
    return XTTSTokenizer(path, base.language, base.tag)
