"""How well a tokenizer fits a text, and which vocabulary size the text can teach."""

import collections
from collections.abc import Iterable
from pathlib import Path

from kit.base.errors import SpeechError
from kit.base.files import digest
from kit.text.extract import Progress
from kit.text.normalize import unicode_script
from kit.text.tokenizer import BaseTokenizer

OFTEN = 100  # examples a piece should have (Gowda and May 2020, Findings of EMNLP)
_OFTEN_SHARE = 0.95  # of the learned pieces that should have them (same paper)
_SHORT_PIECES = 2  # characters; below this a piece is hardly more than a letter
_RARE = 5  # a character seen fewer times than this is hardly learned


def tokenizer_report(tokenizer: BaseTokenizer, texts: list[str]) -> dict:
    """Measure the fit on held-out `texts`, normalised as the training text was.

    `byte_rate` and `unknown_rate` are shares of pieces, `round_trip` of texts that decode
    unchanged, `scripts` the share of letters by Unicode script, `rare` the characters seen fewer
    than five times, `uncovered` those without a piece and `covered` the share of the text's letters
    and marks that have one. Raises SpeechError when `texts` has no word.
    """
    texts = [tokenizer.spell(t) for t in texts]
    ids = [tokenizer.tokenize(t) for t in texts]
    pieces = sum(map(len, ids))
    characters = collections.Counter("".join(texts))
    words = sum(len(t.split()) for t in texts)
    if not words:
        raise SpeechError("There is no text to report on: give some held-out sentences.")
    uncovered = tokenizer.uncovered("".join(characters))
    seen = characters.total() - characters[" "]
    return {
        "vocab_size": tokenizer.vocab_size,
        "characters_per_token": characters.total() / pieces,
        "tokens_per_character": pieces / characters.total(),
        "tokens_per_word": pieces / words,
        "byte_rate": sum(tokenizer.is_byte(i) for row in ids for i in row) / pieces,
        "unknown_rate": sum(tokenizer.is_unknown(i) for row in ids for i in row) / pieces,
        "round_trip": sum(tokenizer.decode(i) == t for i, t in zip(ids, texts)) / len(texts),
        "scripts": script_shares(characters),
        "rare": sorted(c for c, n in characters.items() if n < _RARE and c != " "),
        "uncovered": uncovered,
        "covered": 1 - sum(characters[c] for c in uncovered) / seen,
    }


def script_shares(characters: collections.Counter) -> dict[str, float]:
    """Share of letters by script, largest first."""
    scripts = collections.Counter()
    for char, count in characters.items():
        if char.isalpha():
            scripts[(unicode_script(char) or "unnamed").capitalize()] += count
    return {script: count / scripts.total() for script, count in scripts.most_common()}


def count_tokens(
    tokenizer: BaseTokenizer, lines: Iterable[str], mark: Path, key: str = ""
) -> collections.Counter:
    """How often each piece id occurs in `lines` (normalised, streamed).

    Progress is saved in the file `mark` every 10 000 lines, so a killed count resumes, and deleted
    at the end. `key` should change when the lines do; a changed tokenizer starts again by itself.
    """
    model = digest(tokenizer.file_bytes().hex())
    progress = Progress(mark, digest(key, model))
    pieces = collections.Counter({int(i): n for i, n in progress.state.get("pieces", {}).items()})
    for line in progress.follow(lines, lambda: {"pieces": pieces}):
        pieces.update(tokenizer.encode(line))
    progress.remove()
    return pieces


def vocabulary_advice(tokenizer: BaseTokenizer, pieces: dict[int, int]) -> tuple[int, str]:
    """A `vocab_size` to try next for the text that gave these counts, and the reason.

    The rule is Gowda and May's (2020): as many pieces as possible while 95 % have 100 examples.
    Single characters and bytes, which any size needs, do not count; nor do the parts of frequent
    pieces, which a BPE needs for its merges and hardly uses otherwise.
    """
    size = tokenizer.piece_count
    learned = {
        i: tokenizer.piece(i)
        for i in range(size)
        if len(tokenizer.piece(i)) > 1 and not tokenizer.is_fixed(i)
    }
    known = [text for i, text in learned.items() if pieces.get(i, 0) >= OFTEN]
    often = len(known)
    parts = substrings(known)
    rare = sum(pieces.get(i, 0) < OFTEN and text not in parts for i, text in learned.items())
    if rare > (1 - _OFTEN_SHARE) * len(learned):
        return size - len(learned) + often, (
            f"Too large for this text: {rare} of {len(learned)} pieces longer than a character "
            f"occur fewer than {OFTEN} times, too few to learn how they sound."
        )
    length = _mean_length(tokenizer, pieces)
    if length < _SHORT_PIECES:
        return size + max(len(learned), size // 4), (
            f"Rather small: a piece holds {length:.1f} characters on average, so sequences are "
            f"long, and all but {len(learned) - often} of {len(learned)} longer pieces occur "
            f"{OFTEN} times or more: there is room for more of them."
        )
    return size, f"Fits: {often} of {len(learned)} longer pieces occur {OFTEN} times or more."


def substrings(texts: list[str]) -> set[str]:
    """Every stretch of characters of each text."""
    return {
        text[start:end]
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    }


def _mean_length(tokenizer: BaseTokenizer, pieces: dict[int, int]) -> float:
    """Characters in an average piece of the text, the mark of a word's start included."""
    kept = {i: n for i, n in pieces.items() if not tokenizer.is_fixed(i)}
    characters = sum(len(tokenizer.piece(i)) * n for i, n in kept.items())
    return characters / max(1, sum(kept.values()))
