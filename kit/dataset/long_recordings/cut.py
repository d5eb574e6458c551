"""Where to cut a long recording whose words have been found: in pauses, at sentence ends if it can.

Every second of the recording ends up in a clip or among the losses, with its reason: together they
cover it exactly. The choice of cuts is exact, by dynamic programming. Knows nothing of files, nor
of how the words were found.
"""

import dataclasses
from collections.abc import Iterator

from kit.base.config import require, require_within
from kit.dataset.long_alignment import AlignedToken, Token, unheard
from kit.dataset.long_recordings.windows import Pause

EDGE_S = 0.1  # a cut this near to an end of the recording needs no pause
NEAR_S = 0.4  # a pause further from a word has something else in between
LOST_COST = 10.0  # of a second in no clip; a clip that ends within a sentence costs 1
JOINED_COST = 0.2  # of each further sentence in one clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    min_s: float = 1.0  # shortest clip
    max_s: float = 14.0  # longest clip: what the model's code positions hold
    least_pause_s: float = 0.1  # no cut in a shorter pause
    longest_pause_s: float = 1.0  # no longer one inside a clip, nor anything else without text
    margin_s: float = 0.15  # of silence left at both ends of a clip, at most

    def __post_init__(self):
        require(0 < self.min_s < self.max_s, self, "min_s", f"between 0 and max_s ({self.max_s}).")
        require(self.least_pause_s > 0, self, "least_pause_s", "must be positive.")
        require(self.margin_s >= 0, self, "margin_s", "must not be negative.")
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
        """Where a clip before it ends: in the middle of a short pause, early in a long one."""
        return min(self.pause.start_s + margin_s, (self.pause.start_s + self.pause.end_s) / 2)

    def beginning_s(self, margin_s: float) -> float:
        return max(self.pause.end_s - margin_s, (self.pause.start_s + self.pause.end_s) / 2)


def runs_of(
    heard: list[AlignedToken], tokens: list[Token], config: SegmentConfig
) -> Iterator[list[AlignedToken]]:
    """Stretches of `heard` with no unheard word and no long gap inside."""
    run: list[AlignedToken] = []
    for item in heard:
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
    """The len(run) + 1 boundaries of a run of words; clip (i, j) holds run[i:j]."""
    first = run[0]
    last = run[-1]
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


def choose_cuts(places: list[Boundary], config: SegmentConfig) -> list[tuple[int, int]]:
    """The pairs (i, j) of boundaries between which clips lie: fewest seconds lost, then fewest
    sentences broken, then fewest joined. Exact, by dynamic programming.
    """
    best: list[tuple[float, int, bool]] = [(0.0, 0, False)]  # cost, previous boundary, is a clip
    for j in range(1, len(places)):
        options = [(best[j - 1][0] + LOST_COST * _apart_s(places, j - 1, j, config), j - 1, False)]
        joined = 0
        for i in range(j - 1, -1, -1):
            length_s = _apart_s(places, i, j, config)
            if length_s > config.max_s:
                break
            if places[i].allowed and places[j].allowed and length_s >= config.min_s:
                cost = (not places[j].ends_sentence) + JOINED_COST * joined
                options.append((best[i][0] + cost, i, True))
            joined += places[i].ends_sentence
        best.append(min(options))
    return list(_walk_back(best))[::-1]


def _apart_s(places: list[Boundary], i: int, j: int, config: SegmentConfig) -> float:
    return places[j].ending_s(config.margin_s) - places[i].beginning_s(config.margin_s)


def _walk_back(best: list[tuple[float, int, bool]]) -> Iterator[tuple[int, int]]:
    j = len(best) - 1
    while j > 0:
        _, i, is_clip = best[j]
        if is_clip:
            yield i, j
        j = i


def plan_cuts(
    heard: list[AlignedToken], tokens: list[Token], total_s: float, config: SegmentConfig
) -> tuple[list[Span], list[Span]]:
    """Clips, and the rest of `total_s` seconds with reasons; together they cover it exactly.

    Text heard nowhere stands among the losses, with 0 seconds where a clip fills its place.
    """
    clips = []
    taken = set()
    for run in runs_of(heard, tokens, config):
        places = boundaries(run, total_s, config)
        for i, j in choose_cuts(places, config):
            span = range(run[i].number, run[j - 1].number + 1)
            taken.update(span)
            last_s = clips[-1].end_s if clips else 0.0
            clips.append(
                Span(
                    start_s=max(last_s, places[i].beginning_s(config.margin_s)),
                    end_s=min(total_s, places[j].ending_s(config.margin_s)),
                    text=" ".join(tokens[n].text for n in span),
                )
            )
    return clips, _losses(clips, heard, tokens, taken, total_s, config)


def _losses(
    clips: list[Span],
    heard: list[AlignedToken],
    tokens: list[Token],
    taken: set[int],
    total_s: float,
    config: SegmentConfig,
) -> list[Span]:
    """What is in no clip: each stretch between clips with the most serious thing said of it."""
    losses = []
    claims = list(_claims(heard, tokens, taken, total_s, config))
    edges = [0.0, *(edge for clip in clips for edge in (clip.start_s, clip.end_s)), total_s]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if b - a > 1e-6]
    for start_s, end_s in gaps:
        own = [c for c in claims if c.start_s < end_s and start_s < c.end_s]
        claims = [c for c in claims if c not in own]
        reason = "; ".join(c.reason for c in own) or "a pause, or sound the transcript lacks"
        losses.append(Span(start_s=start_s, end_s=end_s, reason=reason))
    nowhere = [dataclasses.replace(c, end_s=c.start_s) for c in claims]
    return sorted(losses + nowhere, key=lambda span: span.start_s)


def _claims(
    heard: list[AlignedToken],
    tokens: list[Token],
    taken: set[int],
    total_s: float,
    config: SegmentConfig,
) -> Iterator[Span]:
    """Why audio is in no clip: words not heard between two that were, words that no pause frees."""
    ends_s = {item.number: item.end_s for item in heard}
    starts_s = {item.number: item.start_s for item in heard}
    for span in unheard(tokens, heard):
        before = max((n for n in ends_s if n < span.start), default=None)
        after = min((n for n in starts_s if n >= span.stop), default=None)
        yield Span(
            start_s=ends_s.get(before, 0.0),
            end_s=starts_s.get(after, total_s),
            reason=f"not heard as written: {_excerpt(tokens, span)}",
        )
    left: list[AlignedToken] = []
    for item in [*heard, None]:
        if item and item.number not in taken:
            left.append(item)
        elif left:
            words = _excerpt(tokens, range(left[0].number, left[-1].number + 1))
            limits = f"{config.min_s} to {config.max_s} s"
            yield Span(
                start_s=left[0].start_s,
                end_s=left[-1].end_s,
                reason=f"no pauses make a clip of {limits} with: {words}",
            )
            left = []


def _excerpt(tokens: list[Token], span: range, most: int = 12) -> str:
    words = [tokens[n].text for n in span]
    return " ".join(words) if len(words) <= most else f"{' '.join(words[:most])} …"
