"""Clips and their texts: those that do not belong together leave, what is too long is cut.

Both ask the recogniser that was trained on these recordings.
"""

import dataclasses
from pathlib import Path

from kit.audio.recognizer import SpeechRecognizer
from kit.base.config import build
from kit.base.hardware import on_device
from kit.dataset.alignment import AlignConfig, Alignment, Match, align_clips_cached, match
from kit.dataset.data_report import DataReport, ManifestConfig, Utterance
from kit.dataset.layouts import read_dataset
from kit.dataset.long_alignment import LongAlignConfig
from kit.dataset.long_recordings.cut import SegmentConfig
from kit.dataset.segmentation import Segmenter
from kit.notebook.progress_line import Ticker
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_ranks import listening_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aligned:
    """What a recogniser made of clips and their texts."""

    rows: list[Utterance]  # those that were heard
    alignments: list[Alignment]  # of each
    matched: Match


def align_texts(run: ActiveRun, ledger: DataReport, recognizer: SpeechRecognizer) -> Aligned:
    """Lay the texts of the clips that `ledger` keeps over their sound, those not heard before."""
    config = build(AlignConfig, run.section("align"))
    rows = config.draw(ledger.kept)
    with on_device(run.hw.device, recognizer):
        alignments = align_clips_cached(
            rows,
            ledger.digests(rows),
            recognizer,
            config,
            run.path("aligned.json"),
            Ticker("aligned"),
            listening_group(run),
        )
    return Aligned(rows=rows, alignments=alignments, matched=match(rows, alignments, config))


def cut_too_long(
    run: ActiveRun, ledger: DataReport, folder: Path, rules: ManifestConfig, cutter: Segmenter
) -> tuple[list[Utterance], int]:
    """Clips of the recordings in `folder` that were refused as too long, and how many those are."""
    gone = {finding.id for finding in ledger.too_long}
    whole = []
    if gone:
        whole = [row for row in read_dataset(folder, rules).rows if row.id in gone]
    into = run.path("long")
    with on_device(run.hw.device, cutter.recognizer):
        clips = cutter.segment_rows(whole, into, Ticker("seconds heard"), listening_group(run))
    return clips, len(gone)


def cutter_for(rules: ManifestConfig, recognizer: SpeechRecognizer) -> Segmenter:
    """Cuts clips that are no longer than `rules` allow, of speech in their language."""
    return Segmenter(
        recognizer=recognizer,
        cuts=SegmentConfig(max_s=rules.longest_s),
        walk=LongAlignConfig(language=rules.language),
    )
