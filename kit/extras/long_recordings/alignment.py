"""Forced alignment of a long recording with its transcript, word by word.

Each window of half a minute is aligned with the text that should come next, with
wildcards before, between and after the phrases for whatever the transcript does not mention, so
memory is bounded. The next window begins after the last phrase that was surely recognised. Where
nothing is recognised, the text further on is searched; failing that, the window is skipped. (CTC
segmentation after Kürzinger et al. 2020, the wildcard after Pratap et al. 2023.)

Shapes: S output frames of the recogniser, A alphabet + blank, L samples.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import Tensor

from kit.audio.clip import resampled, to_mono
from kit.audio.container import MAX_S, open_audio
from kit.audio.recognizer import SpeechRecognizer
from kit.base.errors import DatasetError
from kit.dataset.alignment import best_path, frames_needed, quiet_frames
from kit.text.normalize import letters, normalize

SENTENCE_END = re.compile(r"[.!?።፧፨…][\"'»”’)\]]*$")
PHRASE_WORDS = 12  # longer sentences are aligned in parts, with a wildcard between them
UNTRUSTED_S = 2.0  # at the end of a window
ANCHOR_CHARACTERS = 12  # shorter text is matched by chance
SEARCH_CHARACTERS = 25  # the same, when the whole text is searched
SLACK_S = 0.15  # a recogniser may be this early or late with a letter
CONTEXT_S = 0.5  # audio before a window that the recogniser's convolutions see
MIN_PAUSE_S = 0.1  # shorter silences belong to the letters: the closure of a t or a k
WINDOW_S = 30.0  # of audio aligned at a time
ACCEPTED_SCORE = -1.0  # lowest (nats a character) of a phrase that counts as recognised
FIRST_PACE = 14.0  # characters a second, measured from the first match on
LOOK_AHEAD = 200  # phrases searched where nothing is recognised
WILDCARD_COST = 0.1  # nats a frame, so that text is preferred where it fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a recording: a pause, a clip with its text, or a loss with its reason.

    A pause has 0 seconds where words run together, a loss where text was not recognised.
    """

    file: str = ""  # of a loss
    start_s: float
    end_s: float
    text: str = ""
    reason: str = ""  # of a loss

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def as_loss(self) -> dict:
        """Return its line of losses.jsonl, or of one recording's, without a file."""
        names = ("file", "start_s", "end_s", "reason")
        return {name: getattr(self, name) for name in names if getattr(self, name) != ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    text: str
    ids: tuple[int, ...]  # in the recogniser's alphabet; none in a lone dash
    ends_sentence: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlignedToken:
    token: Token
    number: int  # of the token in the transcript
    start_s: float
    end_s: float
    before: Span
    after: Span


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    start_s: float
    log_probs: Tensor  # (S, A + 1), the last column the wildcard
    quiet: np.ndarray  # (S,) which frames are pauses
    frame_s: float
    last: bool  # whether the recording ends with it

    def second(self, frame: int) -> float:
        return self.start_s + int(frame) * self.frame_s

    def pause(self, start: int, end: int, near_end: bool) -> Span:
        """Return the quiet stretch in frames start..end nearest to one end, a long one if any."""
        start = max(0, start)
        end = min(end, len(self.quiet))
        runs = np.flatnonzero(np.diff(self.quiet[start:end], prepend=False, append=False))
        runs = runs.reshape(-1, 2)
        if len(runs) == 0:
            edge_s = self.second(end if near_end else start)
            return Span(start_s=edge_s, end_s=edge_s)
        lengths = np.diff(runs)[:, 0]
        long = runs[lengths * self.frame_s >= MIN_PAUSE_S]
        if len(long):
            first, stop = long[-1 if near_end else 0]
        else:
            first, stop = runs[np.argmax(lengths)]
        return Span(start_s=self.second(start + first), end_s=self.second(start + stop))


class WindowReader(contextlib.ExitStack):
    """Reads a recording and recognises it, one window at a time; open until its block ends."""

    def __init__(self, path: Path, recognizer: SpeechRecognizer):
        super().__init__()
        self.recognizer = recognizer
        self.sound, self.total_s = self.enter_context(open_audio(path))
        self.rate = self.sound.samplerate  # Hz
        if self.total_s > MAX_S:
            raise DatasetError(f"{path} is longer than {MAX_S / 3600:.0f} hours: split it")

    def samples_of(self, start_s: float, end_s: float) -> np.ndarray:
        """Return mono samples (L,) at the recording's own rate."""
        first = round(start_s * self.rate)
        stop = min(round(end_s * self.rate), self.sound.frames)
        try:
            self.sound.seek(first)
            wave = self.sound.read(stop - first, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise DatasetError(f"damaged after {start_s:.1f} s: {error.error_string}") from error
        if not np.isfinite(wave).all():
            raise DatasetError(f"samples that are not finite numbers after {start_s:.1f} s")
        return to_mono(wave)

    def window(self, start_s: float, length_s: float) -> Window:
        """Recognise `length_s` seconds from `start_s` on, or up to the end."""
        read_from_s = max(0.0, start_s - CONTEXT_S)
        end_s = min(start_s + length_s, self.total_s)
        samples = self.samples_of(read_from_s, end_s).clip(-1, 1)
        sample_rate = self.recognizer.input_sample_rate
        wave = resampled(torch.from_numpy(samples), self.rate, sample_rate)
        output = self.recognizer.recognize([wave], sample_rate)[0]
        frame_s = self.recognizer.frame_s
        context = round((start_s - read_from_s) / frame_s)
        log_probs = output.log_probs[context:]
        wildcard = log_probs.amax(-1, keepdim=True) - WILDCARD_COST
        return Window(
            start_s=read_from_s + context * frame_s,
            log_probs=torch.cat((log_probs, wildcard), dim=-1),
            quiet=quiet_frames(output.loudness[context:]).numpy(),
            frame_s=frame_s,
            last=end_s >= self.total_s,
        )


def read_tokens(
    text: str, recognizer: SpeechRecognizer, language: str, respell: bool = True
) -> list[Token]:
    """Split a transcript into words; in one without full stops, every line is a sentence."""
    has_stops = any(SENTENCE_END.search(word) for word in text.split())
    tokens = []
    # An empty line always ends a sentence, as after a heading.
    for part in re.split(r"\n\s*\n" if has_stops else r"\n", text):
        words = part.replace("|", " ").split()
        for number, word in enumerate(words, 1):
            ids = recognizer.encode(letters(normalize(word, language, respell))).tolist()
            ends = number == len(words) or bool(SENTENCE_END.search(word))
            tokens.append(Token(text=word, ids=tuple(ids), ends_sentence=ends))
    return tokens


def split_phrases(tokens: list[Token]) -> list[range]:
    """Return the token numbers of each phrase: a sentence, or a part of a long one."""
    phrases = []
    start = 0
    for number, token in enumerate(tokens, 1):
        full = token.ends_sentence or number - start >= PHRASE_WORDS
        # Tokens without letters are joined to a neighbour.
        if full and any(t.ids for t in tokens[start:number]):
            phrases.append(range(start, number))
            start = number
    if start < len(tokens) and phrases:  # nothing but dashes is left
        phrases[-1] = range(phrases[-1].start, len(tokens))
    return phrases


class LongAligner:
    """Aligns one recording with its transcript; `aligned` holds the recognised tokens in order.

    A match of a phrase is a list of (first frame, end frame, token number), one a token.
    """

    def __init__(self, reader: WindowReader, tokens: list[Token]):
        self.reader = reader
        self.tokens = tokens
        self.phrases = split_phrases(tokens)
        self.space = reader.recognizer.alphabet.find(" ") + 1  # 0 where it has none
        self.wildcard = len(reader.recognizer.alphabet) + 1
        self.pace = FIRST_PACE
        self.aligned: list[AlignedToken] = []

    def run(self, progress: Callable = lambda *_: None) -> list[AlignedToken]:
        """Align the whole recording; call `progress(seconds done)` after each window."""
        now_s = 0.0
        phrase = 0  # the next to align
        total_s = self.reader.total_s
        while phrase < len(self.phrases) and total_s - now_s > UNTRUSTED_S / 4:
            window = self.reader.window(now_s, WINDOW_S)
            matches = self._match_window(window, phrase)
            if matches:
                phrase = max(matches) + 1
                now_s = self._append(window, matches)
            elif window.last:
                break
            else:
                now_s = window.second(len(window.log_probs)) - WINDOW_S / 3
            progress(now_s)
        return self.aligned

    def _match_window(self, window: Window, first: int) -> dict[int, list]:
        """Return the matches, by phrase number, of phrases from `first` on in `window`."""
        frames = len(window.log_probs)
        room = frames * window.frame_s * self.pace  # characters that fit at the current pace
        stop = first
        while stop < len(self.phrases) and (stop == first or room > 0):
            room -= self._characters(stop)
            stop += 1
        matches = self._align(window, range(first, stop), 0, frames)
        matches = self._trusted(window, matches, ANCHOR_CHARACTERS)
        if not matches:
            further = range(first, min(first + LOOK_AHEAD, len(self.phrases)))
            matches = self._align_separately(window, further, 0, frames, SEARCH_CHARACTERS)
            matches = self._trusted(window, matches, SEARCH_CHARACTERS)
        start = 0
        edge = first
        for number in sorted(matches):  # try phrases between two matches by themselves
            between = range(edge, number)
            stop = matches[number][0][0]
            matches |= self._align_separately(window, between, start, stop, ANCHOR_CHARACTERS // 2)
            start = matches[number][-1][1]
            edge = number + 1
        return matches

    def _characters(self, phrase: int) -> int:
        return sum(len(self.tokens[i].ids) + 1 for i in self.phrases[phrase])

    def _align(self, window: Window, phrases: range, start: int, stop: int) -> dict[int, list]:
        """Align `phrases` with frames start..stop; return the matches that score well enough."""
        ids = [self.wildcard]
        places = {phrase: [] for phrase in phrases}  # (first id, last id, token) of each token
        for phrase in phrases:
            for token in self.phrases[phrase]:
                token_ids = self.tokens[token].ids
                if token_ids and ids[-1] != self.wildcard and self.space:
                    ids.append(self.space)
                if token_ids:
                    places[phrase].append((len(ids), len(ids) + len(token_ids) - 1, token))
                ids += token_ids
            ids.append(self.wildcard)
        targets = torch.tensor(ids)
        log_probs = window.log_probs[start:stop]
        if len(phrases) == 0 or frames_needed(targets) > len(log_probs):
            return {}
        spans, costs = best_path(log_probs, targets)  # a span for each id
        cost_before = np.concatenate(([0.0], costs.double().cumsum(0).numpy()))
        matches = {}
        for phrase, own in places.items():
            edges = [(spans[first].start, spans[last].end, token) for first, last, token in own]
            cost = cost_before[edges[-1][1]] - cost_before[edges[0][0]]
            if cost / self._characters(phrase) >= ACCEPTED_SCORE:
                matches[phrase] = [(start + a, start + b, token) for a, b, token in edges]
        return matches

    def _align_separately(
        self, window: Window, phrases: range, start: int, stop: int, min_characters: int
    ) -> dict[int, list]:
        """Align each long enough phrase by itself, one after the other."""
        matches = {}
        for phrase in (p for p in phrases if self._characters(p) >= min_characters):
            match = self._align(window, range(phrase, phrase + 1), start, stop)
            if match:
                matches |= match
                start = match[phrase][-1][1]
        return matches

    def _trusted(self, window: Window, matches: dict, min_characters: int) -> dict[int, list]:
        """Return `matches` up to the last anchor.

        An anchor ends before the untrusted end of the window and, with the matches directly before
        it, has at least `min_characters`.
        """
        if window.last:
            return matches
        edge = len(window.log_probs) - UNTRUSTED_S / window.frame_s
        anchor = -1
        characters = 0
        for number in sorted(matches):
            previous = characters if number - 1 in matches else 0
            characters = self._characters(number) + previous
            if characters >= min_characters and matches[number][-1][1] <= edge:
                anchor = number
        return {number: match for number, match in matches.items() if number <= anchor}

    def _append(self, window: Window, matches: dict[int, list]) -> float:
        """Add the tokens of `matches` to `aligned`; return where the last one ends, in seconds."""
        places = [place for number in sorted(matches) for place in matches[number]]
        second = round(1 / window.frame_s)  # a pause further away does not belong to the word
        slack = round(SLACK_S / window.frame_s)
        previous_end = 0
        next_starts = [start for start, _, _ in places[1:]] + [len(window.log_probs)]
        for (start, end, number), next_start in zip(places, next_starts):
            earliest = max(previous_end - slack, start - second)
            latest = min(next_start + slack, end + second)
            before = window.pause(earliest, start + slack, near_end=True)
            after = window.pause(end - slack, latest, near_end=False)
            self.aligned.append(
                AlignedToken(
                    token=self.tokens[number],
                    number=number,
                    start_s=window.second(start),
                    end_s=window.second(end),
                    before=before,
                    after=after,
                )
            )
            previous_end = end
        spoken_s = (places[-1][1] - places[0][0]) * window.frame_s
        self.pace = 0.5 * self.pace + 0.5 * sum(map(self._characters, matches)) / spoken_s
        return self.aligned[-1].end_s
