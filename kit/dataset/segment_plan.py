"""Choose where to split an aligned recording into clips: in pauses, at sentence ends if possible.

Every second of the recording is in a clip or among the losses, with the reason. The choice is
optimal, by dynamic programming.
"""

import dataclasses
from collections.abc import Iterator

from kit.base.config import require, require_within
from kit.dataset.long_alignment import AlignedToken, Pause, Token, unmatched_tokens

EDGE_S = 0.1  # a boundary this near to an end of the recording needs no pause
NEAR_S = 0.4  # a pause further from a word has something else in between
LOSS_COST = 10.0  # of a second in no clip; a clip that ends within a sentence costs 1
JOIN_COST = 0.2  # of each further sentence in one clip
EXCERPT_WORDS = 12  # in the reason of a loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    min_s: float = 1.0  # shortest clip
    max_s: float = 14.0  # longest clip: what the model's code positions hold
    least_pause_s: float = 0.1  # no boundary in a shorter pause
    longest_pause_s: float = 1.0  # nor a longer stretch without text inside a clip
    margin_s: float = 0.15  # of silence left at both ends of a clip, at most

    def __post_init__(self):
        require(0 < self.min_s < self.max_s, self, "min_s", f"between 0 and max_s ({self.max_s}).")
        require(self.least_pause_s > 0, self, "least_pause_s", "must be positive.")
        require_within(self, 0, 3600, "max_s", "least_pause_s", "longest_pause_s", "margin_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of one recording: a clip with its text, or a loss with its reason."""

    start_s: float
    end_s: float
    text: str = ""
    reason: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """A place between two words (or beside one) where a clip may begin or end."""

    pause: Pause
    allowed: bool
    ends_sentence: bool

    def ending_s(self, margin_s: float) -> float:
        """Return where a clip before it ends: mid-pause, or `margin_s` into a long pause."""
        return min(self.pause.start_s + margin_s, (self.pause.start_s + self.pause.end_s) / 2)

    def beginning_s(self, margin_s: float) -> float:
        return max(self.pause.end_s - margin_s, (self.pause.start_s + self.pause.end_s) / 2)


def split_runs(
    aligned: list[AlignedToken], tokens: list[Token], config: SegmentConfig
) -> Iterator[list[AlignedToken]]:
    """Yield stretches of `aligned` with no unrecognised word and no long gap inside."""
    run: list[AlignedToken] = []
    for item in aligned:
        if run and (
            any(token.ids for token in tokens[run[-1].number + 1 : item.number])
            or item.start_s - run[-1].end_s > config.longest_pause_s
        ):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def boundaries(run: list[AlignedToken], total_s: float, config: SegmentConfig) -> list[Boundary]:
    """Return the len(run) + 1 boundaries of a run of words; clip (i, j) holds run[i:j]."""
    first, last = run[0], run[-1]
    pauses = [item.before for item in run] + [last.after]
    ends = [True] + [item.token.ends_sentence for item in run]
    allowed = [pause.seconds >= config.least_pause_s for pause in pauses]
    allowed[0] &= first.start_s - first.before.end_s <= NEAR_S
    allowed[0] |= first.start_s <= EDGE_S
    allowed[-1] &= last.after.start_s - last.end_s <= NEAR_S
    allowed[-1] |= last.end_s >= total_s - EDGE_S
    return [
        Boundary(pause=pause, allowed=ok, ends_sentence=end)
        for pause, ok, end in zip(pauses, allowed, ends)
    ]


def choose_clips(places: list[Boundary], config: SegmentConfig) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of boundaries that enclose clips.

    Minimises seconds lost, then sentences broken, then sentences joined.
    """
    best: list[tuple[float, int, bool]] = [(0.0, 0, False)]  # cost, previous boundary, is a clip
    for j in range(1, len(places)):
        lost_s = _seconds_between(places[j - 1], places[j], config)
        options = [(best[j - 1][0] + LOSS_COST * lost_s, j - 1, False)]
        joined = 0
        for i in range(j - 1, -1, -1):
            length_s = _seconds_between(places[i], places[j], config)
            if length_s > config.max_s:
                break
            if places[i].allowed and places[j].allowed and length_s >= config.min_s:
                cost = (not places[j].ends_sentence) + JOIN_COST * joined
                options.append((best[i][0] + cost, i, True))
            joined += places[i].ends_sentence
        best.append(min(options))
    clips = []
    j = len(places) - 1
    while j > 0:
        _, i, is_clip = best[j]
        if is_clip:
            clips.append((i, j))
        j = i
    return clips[::-1]


def _seconds_between(first: Boundary, last: Boundary, config: SegmentConfig) -> float:
    return last.ending_s(config.margin_s) - first.beginning_s(config.margin_s)


def plan_segments(
    aligned: list[AlignedToken], tokens: list[Token], total_s: float, config: SegmentConfig
) -> tuple[list[Span], list[Span]]:
    """Return clips and losses, which together cover `total_s` seconds exactly.

    Text that was not recognised is a loss, of 0 seconds where a clip covers its place.
    """
    clips = []
    used = set()
    for run in split_runs(aligned, tokens, config):
        places = boundaries(run, total_s, config)
        for i, j in choose_clips(places, config):
            numbers = range(run[i].number, run[j - 1].number + 1)
            used.update(numbers)
            previous_end_s = clips[-1].end_s if clips else 0.0
            clips.append(
                Span(
                    start_s=max(previous_end_s, places[i].beginning_s(config.margin_s)),
                    end_s=min(total_s, places[j].ending_s(config.margin_s)),
                    text=" ".join(tokens[n].text for n in numbers),
                )
            )
    reasons = [
        *_unrecognised_text(aligned, tokens, total_s),
        *_unused_words(aligned, tokens, used, config),
    ]
    return clips, _losses(clips, reasons, total_s)


def _losses(clips: list[Span], reasons: list[Span], total_s: float) -> list[Span]:
    """Return each stretch between clips with the `reasons` that overlap it."""
    losses = []
    edges = [0.0, *(edge for clip in clips for edge in (clip.start_s, clip.end_s)), total_s]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b - a > 1e-6]
    for start_s, end_s in gaps:
        own = [r for r in reasons if r.start_s < end_s and start_s < r.end_s]
        reasons = [r for r in reasons if r not in own]
        reason = "; ".join(r.reason for r in own) or "a pause, or sound the transcript lacks"
        losses.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    covered = [dataclasses.replace(r, end_s=r.start_s) for r in reasons]
    return sorted(losses + covered, key=lambda span: span.start_s)


def _unrecognised_text(
    aligned: list[AlignedToken], tokens: list[Token], total_s: float
) -> Iterator[Span]:
    ends_s = {item.number: item.end_s for item in aligned}
    starts_s = {item.number: item.start_s for item in aligned}
    for numbers in unmatched_tokens(tokens, aligned):
        before = max((n for n in ends_s if n < numbers.start), default=None)
        after = min((n for n in starts_s if n >= numbers.stop), default=None)
        yield Span(
            start_s=ends_s.get(before, 0.0),
            end_s=starts_s.get(after, total_s),
            reason=f"not recognised as written: {_excerpt(tokens, numbers)}",
        )


def _unused_words(
    aligned: list[AlignedToken], tokens: list[Token], used: set[int], config: SegmentConfig
) -> Iterator[Span]:
    """Yield runs of recognised words that are in no clip."""
    run: list[AlignedToken] = []
    for item in [*aligned, None]:
        if item and item.number not in used:
            run.append(item)
        elif run:
            words = _excerpt(tokens, range(run[0].number, run[-1].number + 1))
            limits = f"{config.min_s} to {config.max_s} s"
            yield Span(
                start_s=run[0].start_s,
                end_s=run[-1].end_s,
                reason=f"no pauses make a clip of {limits} with: {words}",
            )
            run = []


def _excerpt(tokens: list[Token], numbers: range) -> str:
    words = [tokens[n].text for n in numbers]
    return " ".join(words[:EXCERPT_WORDS]) + (" …" if len(words) > EXCERPT_WORDS else "")
