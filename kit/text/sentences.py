"""Split long text into parts that a voice can speak, and join their audio.

A voice learns from clips of limited length, and babbles or skips text when there is more. So text
is split at sentence ends, then at commas, and only then between words. Shapes: L samples.
"""

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable

import torch
from torch import Tensor

from kit.base.errors import SpeechError
from kit.text.normalize import letters, normalize

SENTENCE_S = 0.30  # silence after a sentence, seconds
PARAGRAPH_S = 0.60  # after the last sentence of a line
CLAUSE_S = 0.15  # after a comma at which a long sentence was cut; between words there is none
FADE_S = 0.005  # at both edges of a wave: shorter clicks, longer swallows consonants

_CLOSING = r"[\"'”’»›)\]}]*"
_FIGURE = r"[\d፩-፼]"
# A sure stop needs no space after it; those of Latin script also occur in numbers, names, URLs.
_STOP = re.compile(
    rf"(?P<sure>(?:[።፧፨؟۔।॥。！？]|[፡:](?:\s*[፡:])+)+[.!?…]*{_CLOSING})"
    rf"|(?<![.!?…])[.!?…]+{_CLOSING}(?=\s)"
)
_LETTER_AFTER = re.compile(r"[\s\"'“„‘«‹(\[{]*([^\W\d_])")
_CLAUSE = re.compile(
    rf"(?<![,;:])[,;:]+{_CLOSING}(?=\s)|[፣፤፥፦،؛，、]+{_CLOSING}(?!{_FIGURE})|—+(?!\d)|–(?=\s)"
)
_GAP = re.compile(rf"(?:\s|(?<!{_FIGURE})፡|፡(?!{_FIGURE}))+")  # ፡ is a space, but in 3፡30
# J. and ዓ., then U.S. and e.g., then Mrs. and St.: a capital, and no vowel after it.
_SHORT_FORM = re.compile(
    r"\W*(?:[^\W\d_]\.|(?:[^\W\d_]{1,2}\.){2,}|[A-Z][b-df-hj-np-tv-xz]{1,3}\.)"
)
_LONGEST_SHORT_FORM = 30  # characters looked back at from a full stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpokenPart:
    text: str  # as typed, without space at its ends
    pause_s: float  # silence after it, seconds


def split(text: str, language: str, fits: Callable[[str], bool]) -> list[SpokenPart]:
    """`text` in parts that `fits` accepts, none of its letters lost, in time linear in its length.

    Every sentence is a part of its own; every line is a paragraph. Parts without anything to say
    are left out. Raises SpeechError where nothing is left, and for a word that does not fit.
    """
    say = functools.cache(functools.partial(normalize, language=language))
    parts: list[SpokenPart] = []
    for line in text.splitlines():
        sentences = [s for s in _slices(line, _stops(line, say)) if _has_words(s, say)]
        for sentence in sentences:
            *first, last = _shorten(sentence, say, fits)
            parts += [SpokenPart(text=t, pause_s=_pause(t)) for t in first]
            parts.append(SpokenPart(text=last, pause_s=SENTENCE_S))
        if sentences:
            parts[-1] = dataclasses.replace(parts[-1], pause_s=PARAGRAPH_S)
    if not parts:
        raise SpeechError(f"There is nothing to say in {text[:40]!r}: type at least one word.")
    parts[-1] = dataclasses.replace(parts[-1], pause_s=0.0)
    return parts


def _pause(text: str) -> float:
    """Silence after a part that ends within a sentence, by the mark at its end."""
    if re.search(rf"[.!?…]{_CLOSING}$", text):
        return SENTENCE_S
    return CLAUSE_S if re.search(rf"[,;:፣፤፥፦،؛，、—–]{_CLOSING}$", text) else 0.0


def _slices(text: str, ends: list[int]) -> list[str]:
    """`text` cut at `ends`; together the slices are the text, spaces included."""
    places = [0, *(end for end in ends if end < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def _has_words(text: str, say: Callable[[str], str]) -> bool:
    return any(c.isalnum() for c in say(text))


def _stops(text: str, say: Callable[[str], str], doubtful: bool = False) -> list[int]:
    """Return where sentences of `text` end; `doubtful` adds marks that seem to be inside them."""
    ends = [0]
    for match in _STOP.finditer(text):
        within = _continues(text, match) and not doubtful
        if not within and not _belongs(text, match, ends[-1], say):
            ends.append(match.end())
    return ends[1:]


def _continues(text: str, match: re.Match) -> bool:
    """Whether a sentence continues after its mark: "Why?" she asked. «ለምን፧» አለች።"""
    after = _LETTER_AFTER.match(text, match.end())
    if not after or after[1].isupper():
        return False
    return match[0][-1] in "\"'”’»›" or (after[1].islower() and not match["sure"])


def _belongs(text: str, match: re.Match, start: int, say: Callable[[str], str]) -> bool:
    """Whether a dot is part of the word before it, in a sentence that begins at `start`."""
    if match[0] != ".":
        return False
    nearest = max(start, match.start() - _LONGEST_SHORT_FORM)
    word = text[nearest : match.end()].split()[-1]
    if word[:-1].isdigit():  # the 1. of a list
        return text[start : match.start()].strip() == word[:-1]
    return _is_short_form(word, say)


def _is_short_form(word: str, say: Callable[[str], str]) -> bool:
    """Whether `word`, with its dot, looks like one, or is known to the language, which drops it."""
    return bool(_SHORT_FORM.fullmatch(word)) or (word.endswith(".") and "." not in say(f"{word} a"))


def _shorten(sentence: str, say: Callable[[str], str], fits: Callable[[str], bool]) -> list[str]:
    """A sentence in as few parts as `fits` allows, cut at clauses where it can be."""

    def short(part: str) -> bool:
        return not _has_words(part, say) or fits(part.strip())

    if short(sentence):
        return [sentence.strip()]
    marks = [match.end() for match in _CLAUSE.finditer(sentence)]
    units = []
    for clause in _slices(sentence, sorted({*marks, *_stops(sentence, say, doubtful=True)})):
        if short(clause):
            units.append(clause)
        else:
            units.extend(_evenly(_words(clause, say, short), say, short))
    parts = _evenly(units, say, short)
    return [part.strip() for part in parts if _has_words(part, say)]


def _words(text: str, say: Callable[[str], str], short: Callable[[str], bool]) -> list[str]:
    """The words of `text`, each with the space after it, those read as one together if `short`."""
    words = []
    before = ""
    for word in _slices(text, [match.end() for match in _GAP.finditer(text)]):
        if words and _read_as_one(before, word.strip(), say) and short(words[-1] + word):
            words[-1] += word
        else:
            words.append(word)
        before = word.strip()
    return words


def _read_as_one(a: str, b: str, say: Callable[[str], str]) -> bool:
    """Whether no reader would pause between two words: 5 %, 3:30 ሰዓት, 0911 23 45 67, Dr. Who."""
    if a.isalpha() and b.isalpha():
        return False
    if re.search(_FIGURE, a) or _is_short_form(a, say) or not _has_words(b, say):
        return True
    apart = f"{letters(say(a))} {letters(say(b))}"
    return letters(say(f"{a} {b}")).split() != apart.split()


def _evenly(units: list[str], say: Callable[[str], str], short: Callable[[str], bool]) -> list[str]:
    """`units` put together into few parts that are `short`, alike in length, by bisection."""
    lengths = [len(say(unit)) for unit in units]
    unit_ends = list(itertools.accumulate(lengths))
    middles = [end - length / 2 for end, length in zip(unit_ends, lengths)]

    def cut(count: int) -> list[str]:
        ends = [0]
        for i in range(1, count):
            wanted = bisect.bisect_left(middles, unit_ends[-1] * i / count)
            ends.append(min(max(wanted, ends[-1] + 1), len(units) - count + i))
        return ["".join(units[a:b]) for a, b in itertools.pairwise([*ends, len(units)])]

    def all_short(count: int) -> bool:
        return all(map(short, cut(count)))

    # The least count whose parts are all short; where there is none, every unit is a part.
    counts = range(1, len(units))
    parts = cut(1 + bisect.bisect_left(counts, True, key=all_short))
    for word in parts:
        if not short(word):
            word = word.strip()
            raise SpeechError(
                f"The word {word[:40]!r} ({len(word)} characters) is longer than what this voice "
                "can say in one piece: put spaces into it, or leave it out."
            )
    return parts


def join(waves: list[Tensor], pauses_s: list[float], sample_rate: int) -> Tensor:
    """`waves`, each (L_i,), faded at both edges and followed by its pause in seconds: (L,)."""
    pieces = [torch.zeros(0)] if not waves else []
    for wave, pause_s in zip(waves, pauses_s, strict=True):
        pieces += [fade(wave, sample_rate), wave.new_zeros(round(pause_s * sample_rate))]
    return torch.cat(pieces)


def fade(wave: Tensor, sample_rate: int, start: bool = True, end: bool = True) -> Tensor:
    """`wave` (L,) rising from 0 and falling to 0 by half a raised cosine: it does not click."""
    count = min(round(FADE_S * sample_rate), (len(wave) + 1) // 2)
    rise = 0.5 - 0.5 * torch.cos(torch.pi * torch.arange(count, device=wave.device) / count)
    gain = torch.ones_like(wave)
    if start:
        gain[:count] *= rise
    if end:
        gain[len(wave) - count :] *= rise.flip(0)
    return wave * gain
