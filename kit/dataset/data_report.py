"""The data report: rows that can be trained on, and for each other row the place, reason and fix.

No row is dropped silently: each is an `Utterance` (manifest.jsonl) or a `Finding` (ledger.jsonl).
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

from kit.audio.clip import ClipMeasure
from kit.base.errors import DatasetError
from kit.base.formatting import join_names, shorten
from kit.dataset.manifest import Utterance, write_lines, write_manifest
from kit.settings import ManifestConfig
from kit.text.normalize import text_changes

# How to fix each kind of finding, refusals first.
FIXES = {
    "row": "correct this line of the table",
    "missing": "put the recording there, or take the line out",
    "unreadable": "copy or export the recording again",
    "too short": "join it with its neighbour, or leave it out",
    "too long": "01_data_prep splits it at its pauses where it can; else split it there yourself",
    "long text": "split the recording and its text at a pause",
    "silent": "check the microphone and the edit; export it again",
    "clipped": "record it again at a lower level: clipped peaks cannot be restored",
    "too loud": "export it again with its peak at full scale, which in float audio is 1.0",
    "dc offset": "high-pass it at 20 Hz and export it again",
    "pace": "listen: the text belongs to another recording, or part of one of them is missing",
    "mismatch": "listen: correct the text, or trim the recording to it",
    "same recording": "keep the line whose text is spoken, take the others out",
    "sample rate": "check its header: audio at a wrong rate plays too fast or too slow",
    "alphabet": "spell these letters in the script of the other texts, as they are spoken",
    "repeated text": "vary the sentences: what is repeated too often is memorised",
    "edge silence": "nothing: all but 0.1 s of it is trimmed. Is a part of the sentence missing?",
    "gap": "listen: is a part of the recording missing? A long pause may also be cut shorter",
    "two channels": 'keep the channel of one person: ffmpeg -i IN -af "pan=mono|c0=c0" OUT',
    "opposite phase": "nothing; or invert one of its channels and export it again",
    "also in training": "remove it from one of the two: it flatters the held-out figures",
}

MAX_LISTED = 8  # speakers or splits in a line
MAX_KINDS = 3  # reasons in a summary
MAX_ROWS = 20  # of the table of findings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of ledger.jsonl or warnings.jsonl: a row refused, or kept with a warning."""

    file: str  # its table
    line: int  # from 1
    id: str
    kind: str  # a key of FIXES
    reason: str
    seconds: float = 0.0  # of audio, where it could be measured
    cure: str  # how to fix it
    audio: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataReport:
    """Every row of a dataset, kept or refused."""

    layout: str  # description of its layout and tables
    kept: list[Utterance]
    refused: list[Finding]
    warned: list[Finding]  # about rows that are kept
    measures: dict[str, ClipMeasure] = dataclasses.field(default_factory=dict)  # by path

    @property
    def kept_s(self) -> float:
        return sum(row.seconds for row in self.kept)

    @property
    def lost_s(self) -> float:
        """Seconds refused; a clip that could not be measured counts as one of average length."""
        average_s = self.kept_s / len(self.kept) if self.kept else 0.0
        return sum(finding.seconds or average_s for finding in self.refused)

    @property
    def lost_percent(self) -> float:
        """Share of all seconds; 100 where nothing was kept."""
        total_s = self.lost_s + self.kept_s
        return 100 * self.lost_s / total_s if self.kept and total_s else 100.0

    def summary(self) -> list[str]:
        """Return lines: hours kept and lost, then the commonest reasons, each with an example."""
        lines = [
            f"{self.kept_s / 3600:.2f} hours kept in {len(self.kept):,} utterances, "
            f"{self.lost_s / 3600:.2f} hours ({self.lost_percent:.2f} %) lost in "
            f"{len(self.refused):,} clips"
        ]
        for kind, (example, *more) in list(by_kind(self.refused).items())[:MAX_KINDS]:
            lines.append(
                f"  {1 + len(more):,} clips, {kind}: for example {example.file}:{example.line} "
                f"{example.id[:40]}: {shorten(example.reason, 160)}; {example.cure}"
            )
        return lines

    def changed_texts(self, language: str) -> tuple[str, list[str]]:
        """Return how many texts normalising changed in which way, and an example of each."""
        counts = collections.Counter()
        examples = []
        for row in self.kept:
            changes = text_changes(row.written, row.text, language) if row.written else []
            if any(change not in counts for change in changes):
                examples.append(f"{shorten(row.written, 80)!r} -> {shorten(row.text, 80)!r}")
            counts.update(changes)
        summary = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
        return summary, examples

    def without(self, findings: list[Finding]) -> "DataReport":
        """Return the report with the rows of `findings` refused as well."""
        ids = {finding.id for finding in findings}
        kept = [row for row in self.kept if row.id not in ids]
        return dataclasses.replace(self, kept=kept, refused=self.refused + findings)

    def digests(self, rows: list[Utterance]) -> list[str | None]:
        """Return the digest of each row's measured audio; None for a clip split off since."""
        return [self.measures[r.audio].digest if r.audio in self.measures else None for r in rows]

    @property
    def too_long(self) -> list[Finding]:
        """Findings refused for their length alone, which may be split at pauses."""
        return [finding for finding in self.refused if finding.kind == "too long"]

    def before_segmentation(self) -> "DataReport":
        """Return the report without too long clips, which are split once there is a recogniser.

        If no other clip is kept to train one on, the report is returned unchanged.
        """
        if not self.kept:
            return self
        refused = [finding for finding in self.refused if finding.kind != "too long"]
        return dataclasses.replace(self, refused=refused)

    def with_clips(self, clips: list[Utterance]) -> "DataReport":
        """Return the report after refused recordings were split into `clips`.

        A clip has the table line of its recording, of which only the seconds in no clip are lost.
        """
        clips_s = collections.Counter()
        for clip in clips:
            clips_s[clip.file, clip.line] += clip.seconds
        refused = []
        for finding in self.refused:
            used_s = clips_s[finding.file, finding.line]
            left_s = finding.seconds - used_s
            if not used_s:
                refused.append(finding)
            elif left_s > 0:
                reason = f"{finding.reason}; {used_s:.1f} s of it are kept, split at pauses"
                refused.append(dataclasses.replace(finding, seconds=left_s, reason=reason))
        return dataclasses.replace(self, kept=[*self.kept, *clips], refused=refused)

    def require_usable(self, config: ManifestConfig, where: Path) -> None:
        """Raise DatasetError when too much was refused; `where` is the file with the findings."""
        lines = "\n".join(self.summary())
        if not any(row.split == "train" for row in self.kept):
            raise DatasetError(f"No utterance can be trained on. {lines}\nAll of them: {where}.")
        if self.lost_percent > config.max_rejected_percent:
            raise DatasetError(
                f"{self.lost_percent:.1f} % of the hours was refused (limit "
                f"{config.max_rejected_percent:g} %). {lines}\nAll of them: {where}. Fix them, or "
                'continue without them: raise MAX_REJECTED_PERCENT in "More settings" of the '
                "notebook, or on the command line --set "
                f"manifest.max_rejected_percent={math.ceil(self.lost_percent)} (of make "
                "voice: ARGS='--set ...')."
            )


def refuse(row: Utterance, kind: str, reason: str, seconds: float = 0.0) -> Finding:
    place = {"file": row.file, "line": row.line, "id": row.id, "audio": row.audio}
    return Finding(kind=kind, reason=reason, seconds=seconds, cure=FIXES[kind], **place)


def by_kind(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Return the findings of each kind, the commonest first."""
    kinds = collections.defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def hours_of(rows: Iterable[Utterance], field: str) -> str:
    """Say how many hours each speaker, or split, has: "anna 1.20 h, ben 0.35 h"."""
    seconds = collections.Counter()
    for row in rows:
        seconds[getattr(row, field)] += row.seconds
    parts = [f"{name} {total_s / 3600:.2f} h" for name, total_s in seconds.most_common()]
    return join_names(parts, MAX_LISTED)


def findings_table(findings: list[Finding]) -> list[tuple[str, ...]]:
    """Return table rows, the headings first, then the longest clips; [] for no findings."""
    rows = [("where", "id", "seconds", "reason", "fix")]
    for finding in sorted(findings, key=lambda f: -f.seconds)[:MAX_ROWS]:
        seconds = f"{finding.seconds:.1f}" if finding.seconds else "?"
        where = f"{finding.file}:{finding.line}"
        rows.append((where, finding.id, seconds, finding.reason, finding.cure))
    if len(findings) > MAX_ROWS:
        rows.append((f"and {len(findings) - MAX_ROWS:,} more", "", "", "", ""))
    return rows if findings else []


def write_data_report(report: DataReport, into: Path) -> None:
    write_manifest(report.kept, into)
    write_lines(Path(into) / "ledger.jsonl", map(vars, report.refused))
    write_lines(Path(into) / "warnings.jsonl", map(vars, report.warned))


def rows_in_split(rows: Iterable[Utterance], split: str) -> list[Utterance]:
    return [row for row in rows if row.split == split]
