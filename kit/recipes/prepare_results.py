"""What the steps of 01_data_prep show: lines, pictures and players."""

from collections import Counter
from pathlib import Path

from kit.audio.clip import load_wave, read_clip
from kit.dataset import data_report
from kit.dataset.alignment import Alignment
from kit.dataset.checks import Match
from kit.dataset.data_report import DataReport
from kit.dataset.layouts import EVALUATION
from kit.dataset.manifest import Utterance
from kit.notebook.plots import bars, curves, histogram
from kit.notebook.result import Result, Sound, players_of
from kit.recipes.base_model import too_few_hours
from kit.recipes.open_run import ActiveRun, RunSource
from kit.text.normalize import language_example, unicode_script

WORST_DRAWN = 100  # clips in the picture of the alignment
WORST_PLAYED = 3  # of them with a player
LOWEST_DRAWN = -5.0  # nats a character: a text that cannot be aligned scores minus infinity


def check_result(
    run: ActiveRun, source: RunSource, source_line: str, folder: Path, report: DataReport
) -> Result:
    """The data report of the recordings in `folder`; `source_line` says where they are from."""
    kept = report.kept
    # Clips that are too long count: they are cut later.
    too_long_s = sum(finding.seconds for finding in report.too_long)
    speakers = data_report.hours_of(kept, "speaker")
    splits = data_report.hours_of(kept, "split")
    changed, examples = report.changed_texts(source.language)
    run.record(data={"changed_texts": changed, "changed_examples": examples})
    of_evaluation = sum(row.id.startswith(EVALUATION) for row in kept)
    spotless = not (report.refused or report.warned)
    lines = [
        source_line,
        f"recordings in {folder}: {report.layout}",
        *report.summary(),
        f"speakers: {speakers}; splits: {splits}; language: {source.language}",
        f"Texts changed before training: {changed}" if changed else "",
        *(f"  {example}" for example in examples),
        f"evaluation data: {of_evaluation:,} recordings of {source.eval_data}, all held out"
        if source.eval_data
        else "",
        "No clip was refused, and there are no warnings." if spotless else "",
        script_warning(kept, source.language),
        too_few_hours(run, (report.kept_s + too_long_s) / 3600),
    ]
    sounds = []
    for row in kept[:1]:
        wave, rate_hz = read_clip(row.audio)
        sounds.append(Sound(caption=row.text, wave=wave, sample_rate_hz=rate_hz))
    return Result(
        line="\n".join(filter(None, lines)),
        pictures=draw_data_report(report),
        sounds=sounds,
        grid=data_report.findings_table(report.refused),
    )


def alignment_result(
    rows: list[Utterance],
    alignments: list[Alignment],
    matched: Match,
    aligned: DataReport,
    sample_rate: int,
) -> Result:
    """The fit of the worst of `rows` and the limit; players for the worst of all."""
    pairs = sorted(zip(rows, alignments), key=lambda pair: pair[1].score)[:WORST_DRAWN]
    scores = [max(alignment.score, LOWEST_DRAWN) for _, alignment in pairs]
    lines = {"the worst clips": (range(1, len(scores) + 1), scores)}
    for kind, lowest in matched.limits.items():
        lines[f"limit, clips {kind}"] = ([1, len(scores)], [max(lowest, LOWEST_DRAWN)] * 2)
    sounds = []
    for row, alignment in pairs[:WORST_PLAYED]:
        wave = load_wave(row.audio, sample_rate)
        caption = f"{alignment.score:.2f}, most at {alignment.worst_at_s:.1f} s | {row.text}"
        sounds += players_of({caption: wave}, sample_rate)
    return Result(
        line=f"{matched.note}\n{len(aligned.kept):,} clips are kept, "
        f"{aligned.lost_percent:.2f} % of the hours are rejected",
        pictures=[curves(lines, "clip, the worst first", "fit (nats a character)")],
        sounds=sounds,
    )


def draw_data_report(report: DataReport) -> list:
    """Draw histograms of the kept clips, and the minutes of each kind of finding."""
    pictures = []
    if report.kept:
        noises = (report.measures[row.audio].snr_db for row in report.kept)
        panels = {
            "duration (s)": [row.seconds for row in report.kept],
            "signal to noise (dB)": [snr for snr in noises if snr is not None],
            "characters per second": [len(row.text) / row.seconds for row in report.kept],
        }
        pictures.append(histogram(panels))
    kinds = data_report.by_kind(report.refused + report.warned)
    if kinds:
        minutes = [sum(finding.seconds for finding in own) / 60 for own in kinds.values()]
        pictures.append(bars(list(kinds), minutes, unit="minutes", title="Data report"))
    return pictures


def script_warning(rows: list[Utterance], language: str) -> str:
    """A warning when most letters are in a script that `language` is not written in, else ""."""
    beginnings = "".join(row.text[:20] for row in rows)
    scripts = Counter(unicode_script(letter) for letter in beginnings if letter.isalpha())
    expected = {unicode_script(letter) for letter in language_example(language) if letter.isalpha()}
    commonest = max(scripts, key=scripts.get, default=None)
    if not expected or commonest is None or commonest in expected:
        return ""
    return (
        f"Most letters of these texts are {commonest.capitalize()}; `{language}` is written in "
        f"{'/'.join(expected).capitalize()}, and numbers are spelt out in it. For another language "
        "begin a new run with its code: LANGUAGE in 01_data_prep or of make voice, --language."
    )
