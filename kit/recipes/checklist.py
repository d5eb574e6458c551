"""The verdict on a run, as a list that ticks itself: what was checked, the figure, what to do.

Reads the run's record and preset; measures nothing.
"""

from kit.base.config import build
from kit.base.words import in_gib
from kit.dataset.ledger import ManifestConfig
from kit.inference.evaluate import Check, Scores, gate_checks
from kit.notebook.result import Result
from kit.notebook.run_record import Run

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
        return [
            self.recordings(),
            self.refused(),
            self.pieces(),
            self.alignment(),
            self.preset(),
            self.memory(),
            self.trained(),
            *self.voice(),
        ]

    def recordings(self) -> Check:
        what = "enough recordings"
        wanted = f"{LEAST_HOURS:g} hour or more"
        data = self.report.get("data", {})
        if "hours" not in data:
            return self.missing(what, wanted, "prepare")
        few = "record more: from nothing, a model learns little from less than an hour"
        return Check(
            what=what,
            found=f"{data['hours']:.2f} hours, {data['utterances']:,} utterances",
            wanted=wanted,
            problem=few if data["hours"] < LEAST_HOURS else "",
        )

    def refused(self) -> Check:
        rules = build(ManifestConfig, self.active_run.section("manifest"))
        what = "little was refused"
        wanted = f"at most {rules.refuse_percent:g} % of the hours"
        data = self.report.get("data", {})
        if "refused_percent" not in data:
            return self.missing(what, wanted, "prepare")
        much = data["refused_percent"] > rules.refuse_percent
        return Check(
            what=what,
            found=f"{data['refused_percent']:.2f} %, {data['refused']:,} rows",
            wanted=wanted,
            problem="ledger.jsonl names each row and its cure" if much else "",
        )

    def pieces(self) -> Check:
        what = "the tokenizer knows the letters"
        wanted = "no bytes, every text comes back"
        text = self.report.get("text", {})
        if "byte_rate" not in text:
            return self.missing(what, wanted, "prepare")
        whole = text["byte_rate"] == 0 and text["round_trip"] == 1
        return Check(
            what=what,
            found=f"{text['byte_rate']:.2%} bytes, {text['round_trip']:.1%} come back",
            wanted=wanted,
            problem="" if whole else "look for stray letters in the texts (`uncovered` in text)",
        )

    def alignment(self) -> Check:
        what = "texts belong to their sound"
        wanted = "judged"
        note = self.report.get("data", {}).get("alignment")
        if note is None:
            return self.missing(what, wanted, "prepare")
        unjudged = note.startswith("not judged")
        listen = "listen to some clips: the recogniser could not judge them"
        return Check(what=what, found=note, wanted=wanted, problem=listen if unjudged else "")

    def preset(self) -> Check:
        what = "the preset suits the machine"
        suits = self.report.get("setup", {}).get("preset for this machine")
        if suits is None:
            return self.missing(what, "that of its memory", "setup")
        own = self.active_run.preset_name
        other = f"begin a new run with --preset {suits}, or keep `{own}` on purpose"
        return Check(what=what, found=own, wanted=suits, problem="" if own == suits else other)

    def memory(self) -> Check:
        what = "a step fits into memory"
        sizes = self.report.get("train", {}).get("longest_step_bytes")
        if sizes is None:
            return self.missing(what, "within the limit", "train")
        needed = sizes["measured"] or sizes["planned"]
        fits = needed <= sizes["limit"]
        return Check(
            what=what,
            found=in_gib(needed),
            wanted=f"at most {in_gib(sizes['limit'])}",
            problem="" if fits else "take --use low_memory, or the preset of a smaller tier",
        )

    def trained(self) -> Check:
        what = "training is finished"
        wanted = "to its end"
        train = self.report.get("train", {})
        if "finished" not in train:
            return self.missing(what, wanted, "train")
        on = "" if train["finished"] else self.command("train") + " goes on where it stopped"
        return Check(what=what, found=f"{train['steps']:,} steps", wanted=wanted, problem=on)

    def voice(self) -> list[Check]:
        """What the gate asks of a voice, of the figures that evaluation has left."""
        found = self.report.get("eval", {})
        if "cer" not in found:
            return [self.missing("the voice is intelligible", "the gate passed", "evaluate")]
        scores = Scores(
            cer=found["cer"],
            eos_rate=found["eos_rate"],
            duration_ratio=found["duration_ratio"],
            runaway_rate=found["runaway_rate"],
            sentences=found["sentences"],
        )
        worst_cer = self.active_run.section("evaluate")["worst_cer"]
        return gate_checks(scores, found["cer_floor"], worst_cer)

    def missing(self, what: str, wanted: str, command: str) -> Check:
        """A check that nothing was recorded for yet."""
        return Check(what=what, found="not yet", wanted=wanted, problem=self.command(command))

    def command(self, name: str) -> str:
        return f"python -m kit {name} --run {self.active_run.name}"
