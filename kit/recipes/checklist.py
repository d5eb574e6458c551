"""The verdict on a run, as a list that ticks itself: what was checked, the figure, what to do.

Reads the run's record and preset; measures nothing.
"""

from collections.abc import Callable

from kit.base.config import build
from kit.base.formatting import format_gib
from kit.base.run import Run
from kit.dataset.data_report import ManifestConfig
from kit.inference.evaluate import Check, Scores
from kit.notebook.result import Result
from kit.recipes.evaluation_results import voice_checks

MISSING = "not yet"
LEAST_HOURS = 1.0  # from nothing, a model learns little from less speech


class Checklist:
    """All that should be so before a voice is used, in the order in which it is made.

    What nothing was recorded of is not passed: its row says which command measures it.
    """

    def __init__(self, run: Run):
        self.active_run = run
        self.report = run.report()

    def result(self) -> Result:
        """The list as a table, and the verdict as a line."""
        checks = self.checks()
        rows = [("", "checked", "found", "wanted", "what to do")]
        for check in checks:
            mark = "to do" if check.problem else "pass"
            rows.append((mark, check.what, check.found, check.wanted, check.problem))
        left = [check for check in checks if check.problem]
        if not left:
            return Result(line=f"All {len(checks)} checks pass: the voice is ready.", grid=rows)
        line = f"{len(checks) - len(left)} of {len(checks)} checks pass. Next: {left[0].problem}"
        return Result(line=line, grid=rows)

    def checks(self) -> list[Check]:
        """Every check, passed or not."""
        percent = build(ManifestConfig, self.active_run.section("manifest")).refuse_percent
        hours = f"{LEAST_HOURS:g} hour or more"
        share = f"at most {percent:g} % of the hours"
        whole = "no bytes, every text comes back"
        suits = "the one for its memory"
        return [
            self.check("enough recordings", hours, "prepare", self.recordings),
            self.check("little was refused", share, "prepare", self.refused),
            self.check("the tokenizer knows the letters", whole, "prepare", self.pieces),
            self.check("texts belong to their sound", "judged", "prepare", self.alignment),
            self.check("the preset suits the machine", suits, "setup", self.preset),
            self.check("a step fits into memory", "within the limit", "train", self.memory),
            self.check("training is finished", "to its end", "train", self.trained),
            *self.voice(),
        ]

    def check(
        self, what: str, wanted: str, command: str, look: Callable[[], tuple[str, str]]
    ) -> Check:
        """What `look()` found, and what is to do about it.

        It raises KeyError for a figure that is not in the record: `command` records it.
        """
        try:
            found, problem = look()
        except KeyError:
            found = MISSING
            problem = self.command(command)
        return Check(what=what, found=found, wanted=wanted, problem=problem)

    def recordings(self) -> tuple[str, str]:
        data = self.report["data"]
        few = "record more: from nothing, a model learns little from less than an hour"
        found = f"{data['hours']:.2f} hours, {data['utterances']:,} utterances"
        return found, few if data["hours"] < LEAST_HOURS else ""

    def refused(self) -> tuple[str, str]:
        data = self.report["data"]
        rules = build(ManifestConfig, self.active_run.section("manifest"))
        much = data["refused_percent"] > rules.refuse_percent
        found = f"{data['refused_percent']:.2f} %, {data['refused']:,} rows"
        return found, "ledger.jsonl names each row and its cure" if much else ""

    def pieces(self) -> tuple[str, str]:
        text = self.report["text"]
        whole = text["byte_rate"] == 0 and text["round_trip"] == 1
        found = f"{text['byte_rate']:.2%} bytes, {text['round_trip']:.1%} come back"
        return found, "" if whole else "look for stray letters in the texts (`uncovered` in text)"

    def alignment(self) -> tuple[str, str]:
        note = self.report["data"]["alignment"]
        listen = "listen to some clips: the recogniser could not judge them"
        return note, listen if note.startswith("not judged") else ""

    def preset(self) -> tuple[str, str]:
        suits = self.report["setup"]["preset for this machine"]
        own = self.active_run.preset_name
        if own == suits:
            return own, ""
        return (
            f"{own}; {suits} suits this machine",
            f"begin a new run with --preset {suits}, or keep `{own}` on purpose",
        )

    def memory(self) -> tuple[str, str]:
        sizes = self.report["train"]["longest_step_bytes"]
        needed = sizes.get("reserved") or sizes["measured"] or sizes["planned"]
        found = f"{format_gib(needed)} of {format_gib(sizes['limit'])}"
        smaller = "take --use low_memory, or the preset of a smaller tier"
        return found, smaller if needed > sizes["limit"] else ""

    def trained(self) -> tuple[str, str]:
        train = self.report["train"]
        goes_on = f"{self.command('train')} goes on where it stopped"
        return f"{train['steps']:,} steps", "" if train["finished"] else goes_on

    def voice(self) -> list[Check]:
        """What the gate asks of a voice, of the figures that evaluation has left."""
        found = self.report.get("eval", {})
        if "cer" not in found:
            problem = self.command("evaluate")
            what = "the voice is intelligible"
            return [Check(what=what, found=MISSING, wanted="the gate passed", problem=problem)]
        scores = Scores(
            cer=found["cer"],
            eos_rate=found["eos_rate"],
            duration_ratio=found["duration_ratio"],
            runaway_rate=found["runaway_rate"],
            sentences=found["sentences"],
        )
        return voice_checks(self.active_run, scores, found["cer_floor"])

    def command(self, name: str) -> str:
        return f"python -m kit {name} --run {self.active_run.name}"
