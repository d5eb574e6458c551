"""What each step of an evaluation shows: bars and tables of its figures."""

from kit.base.config import build
from kit.base.run import Run
from kit.inference.evaluate import Check, NoiseFloor, Scores, gate_checks, suggest_fix
from kit.inference.settings import EvaluateConfig
from kit.inference.speaker_conditioning import SpeakerLoss
from kit.inference.word_alignment import WordPair, count_kinds, word_stats
from kit.notebook.plots import Figure, bars, grouped_bars
from kit.training.config import TrainConfig

WORST_WORDS = 12  # in the table


def error_rates(scores: dict[str, Scores]) -> str:
    """Character error rates of `scores` by name, in words."""
    return ", ".join(f"{name} {found.cer:.2%}" for name, found in scores.items())


def error_bars(floor: NoiseFloor, scores: dict[str, Scores], sentences: int) -> Figure:
    """Character error rates of the recordings, of the codec's copies, and of `scores` by name."""
    percent = {"recordings": 100 * floor.cer, "codec": 100 * floor.cer_codec}
    for name, found in scores.items():
        percent[name] = 100 * found.cer
    title = f"Character error rate, {sentences} held-out sentences"
    return bars(list(percent), percent.values(), "%", title)


def split_bars(floors: dict[str, NoiseFloor], scores: dict[str, Scores]) -> Figure:
    """Character error rates of the splits: the voice's beside their floors."""
    groups = {
        "the voice": [100 * found.cer for found in scores.values()],
        "codec": [100 * floors[split].cer_codec for split in scores],
        "recordings": [100 * floors[split].cer for split in scores],
    }
    return grouped_bars(list(scores), groups, "%", "Character error rate by kind of sentence")


def whose_voice(costs: dict[str, SpeakerLoss]) -> str:
    """What a code costs by speaker, in words."""
    told = [f"{name} {each.own:.3f} ({each.other:.3f})" for name, each in costs.items()]
    return f"nats a code told the own reference (another's): {', '.join(told)}"


def whose_voice_checks(run: Run) -> list[Check]:
    """What is asked of a voice with several speakers, of the costs in its record; else nothing."""
    recorded = run.report().get("eval", {}).get("whose_voice", {})
    if not recorded:
        return []
    train = build(TrainConfig, run.section("train"))
    deaf = [name for name, cost in recorded.items() if not SpeakerLoss(**cost).uses_reference]
    problem = (
        f"{', '.join(deaf)}: it does not hear who is to speak, so they may sound alike; train "
        "longer, or with a lower train.conditioner_lr "
        f"(it was {train.conditioner_lr or train.lr:g})"
    )
    check = Check(
        what="hears who is to speak",
        found=f"{len(recorded) - len(deaf)} of {len(recorded)} speakers",
        wanted="all of them",
        problem=problem if deaf else "",
    )
    return [check]


def voice_checks(run: Run, scores: Scores, floor_cer: float) -> list[Check]:
    """All that the voice of `run` is asked for before it is used.

    `scores` are its own, `floor_cer` is the recogniser's on the recordings.
    """
    worst_cer = build(EvaluateConfig, run.section("evaluate")).worst_cer
    train = run.report().get("train", {})
    cure = suggest_fix(train.get("loss"), train.get("val_loss"))
    return gate_checks(scores, floor_cer, worst_cer, cure) + whose_voice_checks(run)


def whose_voice_bars(costs: dict[str, SpeakerLoss]) -> Figure:
    groups = {
        "told the own reference": [found.own for found in costs.values()],
        "told another's": [found.other for found in costs.values()],
    }
    return grouped_bars(list(costs), groups, "nats a code", "Does it hear who is to speak?")


def kind_bars(pairs: list[WordPair], on_codec: list[WordPair]) -> Figure:
    """How often each kind of word error was heard of the voice, and of the codec's copies."""
    own = count_kinds(pairs)
    groups = {"the voice": own.values(), "codec": count_kinds(on_codec).values()}
    words = sum(len(pair.words) for pair in pairs)
    return grouped_bars(list(own), groups, "errors", f"Word errors among {words:,} words")


def scores_table(scores: dict[str, Scores]) -> list[tuple[str, ...]]:
    """Scores by name as rows of a table, the headings first."""
    grid = [("", "CER", "ended by themselves", "length", "ran away", "sentences")]
    for name, found in scores.items():
        row = (
            f"{found.cer:.2%}",
            f"{found.eos_rate:.1%}",
            f"{found.duration_ratio:.2f} x",
            f"{found.runaway_rate:.1%}",
            str(found.sentences),
        )
        grid.append((name, *row))
    return grid


def judges_table(heard: dict[str, dict]) -> list[tuple[str, ...]]:
    """What judges nobody here trained found, by what was heard, the headings first."""
    grid = [("", "Whisper CER", "DNSMOS, 1 to 5", "same voice, at most 1", "clips")]
    for name, found in heard.items():
        row = (f"{found['cer']:.1%}", f"{found['dnsmos']:.2f}", f"{found['similarity']:.3f}")
        grid.append((name, *row, str(found["clips"])))
    return grid


def worst_words_table(pairs: list[WordPair], on_codec: list[WordPair]) -> list[tuple[str, ...]]:
    """The words that went wrong most often, the headings first."""
    wrong_on_codec = {record.word: record.wrong for record in word_stats(on_codec)}
    grid = [("word", "in the texts", "wrong", "wrong on the codec", "how", "heard as")]
    for record in word_stats(pairs)[:WORST_WORDS]:
        if record.wrong:
            numbers = (record.count, record.wrong, wrong_on_codec[record.word])
            heard = [words or "nothing" for words in record.heard[:3]]
            how = (", ".join(record.kinds), " | ".join(heard))
            grid.append((record.word, *map(str, numbers), *how))
    return grid


def checks_table(checks: list[Check]) -> list[tuple[str, ...]]:
    """The gate's checks, ticked or crossed, the headings first."""
    grid = [("", "asked of a voice", "found", "wanted")]
    for check in checks:
        mark = "✗" if check.problem else "✓"
        grid.append((mark, check.what, check.found, check.wanted))
    return grid
