"""Finds every word of a transcript in an hour of audio, a window at a time.

Aligning an hour at once would need gigabytes; here each window of half a minute is laid against
the text that should come next, with a wildcard before, between and after the sentences that takes
whatever the transcript does not mention. The last sentence surely heard is the anchor at which the
next window begins. A sentence that is not said costs only itself; where nothing is recognised the
text further on is searched, and failing that the window is passed over. (CTC segmentation after
Kürzinger et al. 2020, the wildcard after Pratap et al. 2023.) Knows nothing of clips or files
written.

Shapes: S output frames of the recogniser, N characters.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kit.audio.recognizer import SpeechRecognizer
from kit.base.config import require, require_within
from kit.dataset.alignment import best_path, frames_needed
from kit.dataset.long_recordings.windows import Listener, Pause, Window
from kit.text.normalize import letters, normalize

SENTENCE_END = re.compile(r"[.!?።፧፨…][\"'»”’)\]]*$")
SEGMENT_WORDS = 12  # longer sentences are aligned in pieces, for a wildcard between them
EDGE_S = 2.0  # the end of a window is not trusted
ANCHOR_CHARACTERS = 12  # less text is found by chance
LEAP_CHARACTERS = 25  # so is this, when the whole text is searched
SLACK_S = 0.15  # a recogniser may hear a letter this much before or after it is said


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongAlignConfig:
    language: str = "am"
    window_s: float = 30.0  # of audio aligned at a time
    accept: float = -1.0  # lowest score (nats a character) of a sentence that counts as heard
    characters_per_s: float = 14.0  # first guess; measured from then on
    look_ahead: int = 200  # pieces of text searched where nothing is recognised

    def __post_init__(self):
        require(self.window_s >= 10, self, "window_s", "must be at least 10 seconds.")
        require_within(self, 10, 3600, "window_s")
        require_within(self, -1e6, 0, "accept")
        require_within(self, 0.1, 1000, "characters_per_s")
        require_within(self, 1, 1e6, "look_ahead")
        require(self.accept < 0, self, "accept", "must be negative: 0 is a perfect match.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """A word as written, and the characters the recogniser hears in it (none in a lone dash)."""

    text: str
    ids: tuple[int, ...]
    ends_sentence: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignedToken:
    """A token found in the recording, and the pauses on both sides of it."""

    token: Token
    number: int  # of the token in the transcript
    start_s: float
    end_s: float
    before: Pause
    after: Pause


def read_tokens(text: str, recognizer: SpeechRecognizer, language: str) -> list[Token]:
    """The words of a transcript. Where it has no full stops at all, a line is a sentence.

    An empty line always ends a sentence (a heading needs no full stop).
    """
    stops = any(SENTENCE_END.search(word) for word in text.split())
    ending = r"\n\s*\n" if stops else r"\n"
    tokens = []
    for part in re.split(ending, text):
        words = part.replace("|", " ").split()
        for number, word in enumerate(words, 1):
            ids = recognizer.encode(letters(normalize(word, language))).tolist()
            ends = number == len(words) or bool(SENTENCE_END.search(word))
            tokens.append(Token(text=word, ids=tuple(ids), ends_sentence=ends))
    return tokens


def segments_of(tokens: list[Token]) -> list[range]:
    """Token numbers of each sentence, long ones in pieces, runs without letters joined on."""
    segments = []
    start = 0
    for number, token in enumerate(tokens, 1):
        full = token.ends_sentence or number - start >= SEGMENT_WORDS
        if full and any(t.ids for t in tokens[start:number]):
            segments.append(range(start, number))
            start = number
    if start < len(tokens) and segments:  # nothing but dashes is left
        segments[-1] = range(segments[-1].start, len(tokens))
    return segments


class LongAligner:
    """Goes through one recording with its transcript. `heard` holds the tokens found, in order."""

    def __init__(self, listener: Listener, tokens: list[Token], config: LongAlignConfig):
        self.listener = listener
        self.tokens = tokens
        self.config = config
        self.segments = segments_of(tokens)
        self.space = listener.recognizer.alphabet.find(" ") + 1  # 0 where it hears none
        self.wildcard = len(listener.recognizer.alphabet) + 1
        self.pace = config.characters_per_s
        self.heard: list[AlignedToken] = []

    def run(self, progress: Callable = lambda *_: None) -> list[AlignedToken]:
        """Walk to the end; `progress(seconds done, seconds in all)` after each window."""
        at_s = 0.0
        segment = 0
        total_s = self.listener.total_s
        while segment < len(self.segments) and total_s - at_s > EDGE_S / 4:
            window = self.listener.window(at_s, self.config.window_s)
            found = self._found(window, segment)
            if found:
                segment = max(found) + 1
                at_s = self._keep(window, found)
            elif window.last:
                break
            else:
                at_s = window.end_s - self.config.window_s / 3
            progress(at_s, total_s)
        progress(total_s, total_s)
        return self.heard

    def _found(self, window: Window, first: int) -> dict[int, list]:
        """The segments heard in `window`: number -> (first frame, end, token) of each token."""
        whole = 0, len(window.log_probs)
        together = self._place(window, range(first, self._reach(window, first)), *whole)
        found = self._trusted(window, together, ANCHOR_CHARACTERS)
        if not found:
            further = range(first, min(first + self.config.look_ahead, len(self.segments)))
            alone = self._one_by_one(window, further, *whole, LEAP_CHARACTERS)
            found = self._trusted(window, alone, LEAP_CHARACTERS)
        start = 0
        edge = first
        for number in sorted(found):  # what was squeezed in between may yet be found by itself
            between = range(edge, number)
            stop = found[number][0][0]
            found |= self._one_by_one(window, between, start, stop, ANCHOR_CHARACTERS // 2)
            start = found[number][-1][1]
            edge = number + 1
        return found

    def _reach(self, window: Window, first: int) -> int:
        """The segment up to which the text fits into `window` at the pace measured so far."""
        room = (window.end_s - window.start_s) * self.pace
        stop = first
        while stop < len(self.segments) and (stop == first or room > 0):
            room -= self._characters(stop)
            stop += 1
        return stop

    def _characters(self, segment: int) -> int:
        return sum(len(self.tokens[i].ids) + 1 for i in self.segments[segment])

    def _place(self, window: Window, segments: range, start: int, stop: int) -> dict[int, list]:
        """`segments` in frames start..stop, wildcards between: those scoring well enough."""
        targets, owners = self._targets(segments)
        log_probs = window.log_probs[start:stop]
        if len(segments) == 0 or frames_needed(targets) > len(log_probs):
            return {}
        spans, costs = best_path(log_probs, targets)
        sums = np.concatenate(([0.0], costs.double().cumsum(0).numpy()))
        places: dict[int, dict[int, list]] = {}
        for span, owner in zip(spans, owners):
            if owner is not None:
                segment, token = owner
                places.setdefault(segment, {}).setdefault(token, []).append(span)
        found = {}
        for segment, by_token in places.items():
            edges = {t: (own[0].start, own[-1].end) for t, own in by_token.items()}
            (low, _) = edges[min(edges)]
            (_, high) = edges[max(edges)]
            if (sums[high] - sums[low]) / self._characters(segment) >= self.config.accept:
                found[segment] = [(start + a, start + b, t) for t, (a, b) in edges.items()]
        return found

    def _targets(self, segments: range) -> tuple[Tensor, list]:
        """Character ids of `segments`, and whose each is: (segment, token), None for the others."""
        ids = [self.wildcard]
        owners = [None]
        for segment in segments:
            for token in self.segments[segment]:
                own = self.tokens[token].ids
                if own and ids[-1] != self.wildcard and self.space:
                    ids = [*ids, self.space]
                    owners = [*owners, None]
                ids += own
                owners += [(segment, token)] * len(own)
            ids.append(self.wildcard)
            owners.append(None)
        return torch.tensor(ids), owners

    def _one_by_one(
        self, window: Window, segments: range, start: int, stop: int, least: int
    ) -> dict[int, list]:
        """Each of `segments` with at least `least` characters sought alone, one after the other."""
        found = {}
        for segment in segments:
            if self._characters(segment) >= least:
                alone = self._place(window, range(segment, segment + 1), start, stop)
                if alone:
                    found |= alone
                    start = alone[segment][-1][1]
        return found

    def _trusted(self, window: Window, found: dict[int, list], least: int) -> dict[int, list]:
        """`found` up to its last anchor: away from the window's untrusted end, and long enough,
        together with the pieces of text found just before it.
        """
        if window.last:
            return found
        edge = len(window.log_probs) - EDGE_S / window.frame_s
        anchor = -1
        together = 0
        for number in sorted(found):
            together = self._characters(number) + (together if number - 1 in found else 0)
            if together >= least and found[number][-1][1] <= edge:
                anchor = number
        return {number: places for number, places in found.items() if number <= anchor}

    def _keep(self, window: Window, found: dict[int, list]) -> float:
        """Note the tokens of `found`; where the last one ends, in seconds."""
        places = [place for number in sorted(found) for place in found[number]]
        second = round(1 / window.frame_s)  # no further away does a pause belong to a word
        slack = round(SLACK_S / window.frame_s)
        ends = [0]
        starts = [start for start, _, _ in places[1:]] + [len(window.log_probs)]
        for (start, end, number), following in zip(places, starts):
            self.heard.append(
                AlignedToken(
                    token=self.tokens[number],
                    number=number,
                    start_s=window.second(start),
                    end_s=window.second(end),
                    before=window.pause(
                        max(ends[-1] - slack, start - second), start + slack, near_end=True
                    ),
                    after=window.pause(
                        end - slack, min(following + slack, end + second), near_end=False
                    ),
                )
            )
            ends.append(end)
        spoken_s = (places[-1][1] - places[0][0]) * window.frame_s
        self.pace = 0.5 * self.pace + 0.5 * sum(map(self._characters, found)) / spoken_s
        return self.heard[-1].end_s


def unheard(tokens: list[Token], heard: list[AlignedToken]) -> Iterator[range]:
    """Runs of token numbers, with letters in them, that were not found in the recording."""
    start = 0
    for number in [*(h.number for h in heard), len(tokens)]:
        if any(token.ids for token in tokens[start:number]):
            yield range(start, number)
        start = number + 1
