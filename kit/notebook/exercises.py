"""Score the exercises of the notebooks: a function for each, a point for every check."""

import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor

from kit.base.errors import KitError
from kit.base.formatting import format_memory
from kit.notebook.result import Result
from kit.tuning.choose import Trial
from kit.tuning.memory_plan import Workload

Distance = Callable[[str, str], float]
Draw = Callable[[Iterator, int], list]
DRAWS = 2000  # of each chance that is measured


def score(*checks: tuple[bool, str, str]) -> Result:
    """Draw a point for each check that passed: (passed, what is asked, what was got)."""
    points = sum(passed for passed, _, _ in checks)
    lines = [f"Exercise: {points} of {len(checks)} points"]
    for passed, asked, got in checks:
        lines.append(f"{'✓' if passed else '✗ missing:'} {asked} (yours: {got})")
    return Result(line="\n".join(lines), figures={"points": points, "of": len(checks)}, shown=False)


def memory(work: Workload, micro_batch: int, recompute: bool) -> Result:
    """Notebook 00: half the memory of one pass, with the largest micro-batch that allows it."""
    batch = work.data.effective_batch

    def planned_bytes(rows: int, recompute: bool) -> int:
        speed = dataclasses.replace(work.speed, gradient_checkpointing=recompute)
        return dataclasses.replace(work, speed=speed).with_rows(rows).planned_bytes

    target = planned_bytes(batch, False) // 2
    planned = planned_bytes(micro_batch, recompute)
    divisors = [rows for rows in range(1, batch + 1) if batch % rows == 0]
    largest = max((n for n in divisors if planned_bytes(n, recompute) <= target), default=1)
    return score(
        (planned <= target, f"at most {format_memory(target)}", format_memory(planned)),
        (micro_batch == largest, "the largest micro-batch that fits", f"{micro_batch}"),
    )


def padding(share: float, most: float, shapes: Collection[int], window: int, rows: int) -> Result:
    """Notebook 01: little padding, few lengths, and batches that change from epoch to epoch."""
    return score(
        (share <= most, f"padding of at most {most:.1%}", f"{share:.1%}"),
        (len(shapes) <= 8, "at most 8 distinct lengths", f"{len(shapes)}"),
        (window <= rows / 2, f"a window of at most half of {rows} examples", f"{window}"),
    )


def warm_up(losses: Sequence[float], guess: float) -> Result:
    """Notebook 02: the last of `losses` is well below guessing, and none is far above it."""
    low, high = guess - 0.3, guess + 0.3
    return score(
        (losses[-1] < low, f"a last loss below {low:.2f}", f"{losses[-1]:.2f}"),
        (max(losses) < high, f"no loss above {high:.2f}", f"{max(losses):.2f}"),
    )


def error_rate(rate: Distance, spoken: list[tuple[str, str]], edit_distance: Distance) -> Result:
    """Notebook 03: `rate(text, transcript)` is the share of letters to correct."""
    letters = [("voice", "oice"), ("voice", "vvoice"), ("voice", "voices")]
    empty = [("", ""), ("voice", ""), ("", "oh")]
    kinds = {
        "the run's transcripts": spoken,
        "an added or missing letter": letters,
        "empty strings": empty,
    }
    checks = []
    for kind, pairs in kinds.items():
        got = f"all {len(pairs)} right"
        for text, transcript in pairs:
            wanted = edit_distance(transcript, text) / max(1, len(text))
            if not abs(rate(text, transcript) - wanted) < 1e-6:  # NaN is wrong, too
                got = f"wrong for {text!r} and {transcript!r}: {wanted:.2f} is right"
        checks.append((got.startswith("all"), kind, got))
    return score(*checks)


def top_k(draw: Callable[[Tensor, int], int], logits: Tensor, k: int) -> Result:
    """Notebook 04: `draw(logits, k)` follows the probabilities of the best `k` of logits (V,)."""
    best, codes = logits.topk(k)
    wanted = dict(zip(codes.tolist(), best.softmax(-1).tolist()))
    drawn = Counter(int(draw(logits, k)) for _ in range(DRAWS))
    others = sum(count for code, count in drawn.items() if code not in wanted)
    apart = sum(abs(drawn[code] / DRAWS - p) for code, p in wanted.items()) + others / DRAWS
    return score(
        (others == 0, f"only the best {k} codes", f"{others} of {DRAWS} draws are others"),
        (apart / 2 < 0.05, "their probabilities, within 5 %", f"{apart / 2:.0%} differ"),
    )


def switches(label: str, trials: Sequence[Trial]) -> Result:
    """Notebook 05: the least memory at nine tenths of the best speed, with the same loss."""
    ran = {row.label: row for row in trials if row.loss is not None}
    if label not in ran:
        raise KitError(f"{label!r} was not measured; choose one of {', '.join(ran)}.")
    mine = ran[label]
    same = [each for each in ran.values() if each.parity is not False]
    least = 0.9 * max(each.steps_per_s for each in same)
    size = min(each.peak_memory_bytes for each in same if each.steps_per_s >= least)
    own = mine.peak_memory_bytes
    return score(
        (mine.parity is not False, "the baseline's loss", f"{mine.loss_change or 0:+.2%}"),
        (mine.steps_per_s >= least, f"{least:.3g} steps/s or more", f"{mine.steps_per_s:.3g}"),
        (own <= size, f"at most {format_memory(size)}", format_memory(own)),
    )


def fair_sample(draw: Draw) -> Result:
    """Notebook 06: `draw(records, count)` takes records of a stream, all with the same chance."""
    count, total = 5, 20
    drawn = [draw(iter(range(total)), count) for _ in range(DRAWS)]
    short = sum(len(set(each)) != count or len(each) != count for each in drawn)
    times = Counter(record for each in drawn for record in each)
    wanted = DRAWS * count / total  # times a record
    deviation = math.sqrt(wanted * (1 - count / total))
    rarest, most = min(times[n] for n in range(total)), max(times.values(), default=0)
    fair = max(wanted - rarest, most - wanted) < 6 * deviation
    held = most_held(draw, count)
    return score(
        (short == 0, f"{count} records in each of {DRAWS} draws", f"{short} draws are wrong"),
        (fair, f"each record about {wanted:.0f} times", f"{rarest} to {most}"),
        (held <= count + 2, f"at most {count + 2} records held at once", f"{held}"),
    )


class Record:
    """A record that can be counted while something holds it."""


def most_held(draw: Draw, count: int) -> int:
    """The most records of a stream of 500 that exist at once while `draw` reads it."""
    held = weakref.WeakSet()
    counts = [0]

    def records() -> Iterator[Record]:
        for _ in range(500):
            record = Record()
            held.add(record)
            counts.append(len(held))
            yield record

    draw(records(), count)
    return max(counts)


def new_tokens(picked: Collection[int], saved: dict[int, int]) -> Result:
    """Notebook 07: at most 10 of the new tokens, that save 90 % of what 10 can save at most."""
    few = len(picked) == len({*picked} & saved.keys()) <= 10
    total = sum(saved.get(token, 0) for token in picked)
    wanted = 0.9 * sum(sorted(saved.values())[-10:])
    return score(
        (few, "at most 10 new tokens, each once", f"{len(picked)}"),
        (total >= wanted, f"{wanted:.0f} tokens saved", f"{total}"),
    )
