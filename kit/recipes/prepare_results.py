"""What each step of a preparation shows: pictures first, then sounds, then tables."""

import dataclasses
from collections import Counter
from pathlib import Path

from kit.audio.clip import load_wave
from kit.audio.codec import Codec
from kit.audio.spectrogram import Mel
from kit.base.errors import DatasetError
from kit.batches.batching import EXTRA_TOKENS
from kit.batches.code_cache import CodeCache
from kit.batches.lengths import LengthReport
from kit.dataset.alignment import Alignment, worst
from kit.dataset.data_report import DataReport, Utterance, by_kind, findings_table
from kit.model.sequence import EffectiveBatch
from kit.notebook.plots import bars, curves, histogram, measures
from kit.notebook.result import Result, Sound
from kit.recipes.prepare_clips import Aligned
from kit.recipes.sounds import mel_picture, players_of
from kit.text.normalize import language_example, normalize, unicode_script
from kit.text.tokenizer import BaseTokenizer

WORST_DRAWN = 100  # clips in the picture of the alignment
WORST_HEARD = 3  # of them with a player
LOWEST_DRAWN = -5.0  # nats a character: a text that cannot be laid over its clip costs infinitely


def figures_of(ledger: DataReport) -> dict:
    """What the record says of the recordings."""
    return {
        "hours": ledger.kept_s / 3600,
        "utterances": len(ledger.kept),
        "refused": len(ledger.refused),
        "refused_percent": ledger.lost_percent,
    }


def of_ledger(ledger: DataReport, folder: Path, language: str) -> Result:
    """The recordings' lengths, noise and pace; the minutes refused or warned of; the refused."""
    speakers = len({row.speaker for row in ledger.kept})
    pictures = []
    if ledger.kept:
        pictures.append(_spread(ledger))
    kinds = by_kind(ledger.refused + ledger.warned)
    if kinds:
        minutes = [seconds / 60 for _, seconds in kinds.values()]
        pictures.append(bars(list(kinds), minutes, unit="minutes", title="Ledger"))
    lines = [
        f"recordings in {folder}: {ledger.layout}",
        f"{len(ledger.kept):,} utterances, {ledger.kept_s / 3600:.2f} hours, {speakers} speakers, "
        f"{ledger.lost_percent:.2f} % refused",
    ]
    if not kinds:
        lines.append("The ledger has nothing to tell: no row was refused, none is warned of.")
    lines += _other_script(ledger.kept, language)
    return Result(line="\n".join(lines), pictures=pictures, grid=findings_table(ledger.refused))


def _spread(ledger: DataReport):
    clips = [ledger.measures[row.audio] for row in ledger.kept]
    return histogram(
        {
            "duration (s)": [clip.seconds for clip in clips],
            "signal to noise (dB)": [clip.snr_db for clip in clips if clip.snr_db is not None],
            "characters per second": [len(row.text) / row.seconds for row in ledger.kept],
        }
    )


def _other_script(rows: list[Utterance], language: str) -> list[str]:
    """A warning where most letters are of a script that `language` is not written in."""
    scripts = Counter()
    for row in rows:
        scripts.update(unicode_script(letter) for letter in row.text[:20] if letter.isalpha())
    own = {unicode_script(letter) for letter in language_example(language) if letter.isalpha()}
    if not own or not scripts or max(scripts, key=scripts.get) in own:
        return []
    found = max(scripts, key=scripts.get).capitalize()
    return [
        f"Most letters of these texts are {found}; `{language}` is written in "
        f"{'/'.join(own).capitalize()}, and figures are read in it. For another language begin "
        "a new run with its code: LANGUAGE in 01_data_prep or of make voice, --language."
    ]


def of_tokenizer(
    tokenizer: BaseTokenizer,
    fitness: dict,
    advice: tuple[int, str],
    lines: list[str],
    language: str,
) -> Result:
    """How a text is spelt, how a line is cut into pieces, and whether the vocabulary fits."""
    text = language_example(language) or f"{lines[0]} 2017"
    return Result(
        line=f"{tokenizer.vocab_size} ids; vocabulary advice: {advice[0]}, {advice[1]}",
        grid=[
            ("text", "what becomes of it"),
            (text, normalize(text, language)),
            (lines[0], " | ".join(tokenizer.pieces(lines[0]))),
        ],
        figures=fitness,
    )


def of_spelling(reports: dict[str, dict]) -> Result:
    """What tokenizers make of the same held-out text, each by its name with its report."""
    lines = []
    for name, report in reports.items():
        lines.append(
            f"{name}: {report['tokens_per_character']:.2f} pieces a character, "
            f"{report['unknown_rate']:.1%} unknown, {report['byte_rate']:.1%} bare bytes, "
            f"{report['covered']:.1%} of the letters have a piece, "
            f"{report['round_trip']:.0%} of the texts come back as they were"
        )
    first = next(iter(reports.values()))
    if first["uncovered"]:
        lines.append(f"What it could not spell: {' '.join(first['uncovered'][:40])}")
    scripts = ", ".join(f"{name} {share:.0%}" for name, share in first["scripts"].items())
    lines.append(f"held-out letters: {scripts}")
    panels = {
        "pieces a character": {name: r["tokens_per_character"] for name, r in reports.items()},
        "% unknown, bytes": {
            name: 100 * (r["byte_rate"] + r["unknown_rate"]) for name, r in reports.items()
        },
        "% of letters it has": {name: 100 * r["covered"] for name, r in reports.items()},
        "% of texts come back": {name: 100 * r["round_trip"] for name, r in reports.items()},
    }
    return Result(line="\n".join(lines), pictures=(measures(panels),))


def of_growth(found: Result, before: dict, after: dict, told: str) -> Result:
    """`found`, with what the voice's own tokenizer made of the same held-out text."""
    spelling = of_spelling({"its own pieces": before, "with new ones": after})
    line = f"{told}\n{found.line}\n{spelling.line}"
    return dataclasses.replace(found, line=line, pictures=spelling.pictures)


def of_codec(codec: Codec, how: str, row: Utterance, front_end: Mel) -> Result:
    """A recording before and after the codec, to look at and to listen to."""
    wave = load_wave(row.audio, codec.sample_rate)
    again = codec.round_trips(wave)
    waves = {"recording": wave}
    waves.update(again)
    captions = {f"recording: {row.text}": wave}
    captions.update(again)
    return Result(
        line=f"{codec.vocab_size} codes, {codec.frame_rate:.1f} of them a second; {how}",
        pictures=[mel_picture(waves, codec.sample_rate, front_end)],
        sounds=players_of(captions, codec.sample_rate),
    )


def of_alignment(heard: Aligned, ledger: DataReport, rate_hz: int) -> Result:
    """How well the worst clips fit their texts, the limit, and the worst of all to listen to."""
    matched = heard.matched
    pairs = worst(heard.rows, heard.alignments, WORST_DRAWN)
    poor = [max(found.score, LOWEST_DRAWN) for _, found in pairs]
    drawn = {"the worst clips": (range(1, len(poor) + 1), poor)}
    for kind, lowest in matched.limits.items():
        drawn[f"limit, clips {kind}"] = ([1, len(poor)], [max(lowest, LOWEST_DRAWN)] * 2)
    sounds = [_player(row, found, rate_hz) for row, found in pairs[:WORST_HEARD]]
    lost = f"{ledger.lost_percent:.2f} % of the hours are refused"
    stay = f"{len(ledger.kept):,} utterances stay, {lost}"
    return Result(
        line=f"{matched.note}\n{stay}",
        pictures=[curves(drawn, "clip, the worst first", "fit (nats a character)")],
        sounds=[sound for sound in sounds if sound],
    )


def _player(row: Utterance, found: Alignment, rate_hz: int) -> Sound | None:
    """The clip, None for one that cannot be read: why, the ledger says."""
    try:
        wave = load_wave(row.audio, rate_hz)
    except DatasetError:
        return None
    caption = f"{found.score:.2f}, most at {found.worst_at_s:.1f} s | {row.text}"
    return Sound(caption=caption, wave=wave.numpy(), sample_rate_hz=rate_hz)


def of_lengths(report: LengthReport, cache: CodeCache) -> Result:
    """How long the rows of the training split are, the lengths they can be padded to, the limit."""
    some = cache.sample_of_split("train")
    fixed = report.fixed_lengths
    lengths = {
        "text pieces": cache.lengths(some, "texts").tolist(),
        "codes": cache.lengths(some, "codes").tolist(),
        "tokens": (cache.lengths(some) + EXTRA_TOKENS).tolist(),
    }
    return Result(
        line=f"limit {report.limit_codes} codes, {report.limit_tokens} tokens; "
        f"{len(report.beyond)} rows ({report.beyond_share:.2%}) lie beyond\n"
        f"fixed lengths for torch.compile: {', '.join(map(str, fixed))} tokens",
        pictures=[histogram(lengths, marks={"tokens": fixed})],
        figures=report.table(),
    )


def of_batches(first: EffectiveBatch, waste: dict[str, float], loading: str) -> Result:
    """The share of padding by the way batches are formed, and the first batch in numbers."""
    percent = [100 * share for share in waste.values()]
    grid = tuple(first.micro[0].tokens.shape)
    return Result(
        line=f"grid {grid} of which tokens {first.tokens}; position after it {first.position}\n"
        f"{loading}",
        pictures=[bars(list(waste), percent, unit="%", title="Padding in a batch")],
    )
