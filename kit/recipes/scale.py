"""What a run or a preset would take on many GPUs that are not here, and what breaks first.

Reckoned, not measured: `kit/tuning/scale_parts.py` has what is measured and what is assumed. Starts
no run and needs no GPU. `write` leaves the whole of it as a page.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit.audio.codec_kinds import codec_config, make_codec
from kit.audio.front_ends import front_end_config
from kit.base.config import ConfigError, build, load_preset, merge
from kit.base.files import write_atomic
from kit.base.hardware import choose_precision, choose_preset
from kit.base.words import decimal_size, rough_time
from kit.batches.batching import DataConfig
from kit.model.sequence import GPTConfig
from kit.notebook.open_run import find_run, run_folder
from kit.notebook.result import Result
from kit.notebook.tables import text_grid
from kit.recipes.scale_page import gpu_words, rounded, scale_page
from kit.recipes.settings import check_settings
from kit.training.settings import TrainConfig
from kit.training.switches import SpeedConfig
from kit.tuning.preflight import FitError, Workload
from kit.tuning.recommend import overlay
from kit.tuning.scale_limits import OF_THE_CORPUS, OF_THE_TIME, Break, first_breaks
from kit.tuning.scale_parts import CARDS, CLIP, DISKS, NETWORKS, entry_of
from kit.tuning.scale_plan import ScaleCase, ScalePlan, SpeechCorpus, plan_scale, planned_gpu

HEADINGS = (
    *("GPUs", "rows a step", "a step", "sent by each", "sending", "tokens a second", "efficiency"),
    *("the corpus once", "a checkpoint", "stopped"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which settings are to be planned: those of a run, or of a preset."""

    run: str = ""  # its name; "": none, a preset alone
    preset: str = ""  # "": the run's, KIT_PRESET, or what suits the card
    use: str = ""
    settings: dict = dataclasses.field(default_factory=dict)

    def sections(self, suits: str) -> tuple[str, dict]:
        """The preset's name and what is in force; `suits` where none is named. Writes nothing.

        Raises ConfigError for a run, a preset or a setting that there is not.
        """
        if self.run:
            return self._of_run()
        name = self.preset or os.environ.get("KIT_PRESET") or suits
        laid = load_preset(name)
        if self.use:
            laid = merge(laid, overlay(self.use).sections)
        check_settings(self.settings, laid)
        return name, merge(laid, self.settings)

    def _of_run(self) -> tuple[str, dict]:
        if not run_folder(self.run).is_dir():
            raise ConfigError(
                f"There is no run `{self.run}` yet: begin it with python -m kit setup "
                f"--run {self.run}, or give a --preset and no --run."
            )
        run = find_run(self.preset, self.use, self.run)
        check_settings(self.settings, run.preset)
        return run.preset_name, merge(run.preset, self.settings)


class Scaling:
    """A table of `gpus`, and its page where `write` names a file.

    `hours` of speech in recordings of `clip_s` seconds; `card`, `network` and `disk` are names in
    `kit/tuning/scale_parts.py`. Raises ConfigError for what there is not.
    """

    def __init__(
        self,
        wanted: Wanted,
        hours: float = 100_000,
        gpus: Sequence[int] = (1, 8, 64),
        card: str = "h100",
        network: str = "ib400",
        disk: str = "nvme",
        clip_s: float = CLIP.value,
        write: Path | None = None,
    ):
        self.wanted = wanted
        self.hours = hours
        self.clip_s = clip_s
        self.gpus = sorted(set(gpus))
        self.card = card
        self.network = network
        self.disk = disk
        self.write = write

    def run(self) -> Iterator[Result]:
        """The plan; then the page, where one is wanted."""
        yield Result(line="\n".join([self.headline(), text_grid(self.grid()), *self.broken()]))
        if self.write:
            write_atomic(self.write, scale_page(self))
            yield Result(line=f"Written: {self.write}")

    @functools.cached_property
    def preset(self) -> tuple[str, dict]:
        """The preset's name, and the settings that are in force."""
        sheet = entry_of("card", self.card, CARDS)
        return self.wanted.sections(choose_preset(planned_gpu(sheet)).value)

    @functools.cached_property
    def case(self) -> ScaleCase:
        return self.case_of(self.card, self.network, self.disk)

    def case_of(self, card: str, network: str, disk: str) -> ScaleCase:
        """The same run and corpus on other machines."""
        sheet = entry_of("card", card, CARDS)
        _, sections = self.preset
        data = build(DataConfig, sections["data"])
        return ScaleCase(
            work=workload_on(planned_gpu(sheet), sections, data),
            corpus=corpus_of(sections, data, self.hours, self.clip_s),
            card=sheet,
            network=entry_of("network", network, NETWORKS),
            disk=entry_of("disk", disk, DISKS),
            max_cache_bytes=data.max_cache_gib * 2**30,
        )

    @functools.cached_property
    def plans(self) -> list[ScalePlan]:
        """For each number of GPUs the batch kept; where that leaves less than a pass, full ones.

        Raises FitError where the model fits on none of them.
        """
        plans = both_ways(self.case, self.gpus)
        return plans or [plan_scale(self.case, self.gpus[-1])]

    @functools.cached_property
    def breaks(self) -> list[Break]:
        """What breaks as GPUs become more, up to the most that are asked for."""
        doubled = [2**power for power in range(17) if 2**power <= self.gpus[-1]]
        return first_breaks(both_ways(self.case, doubled), OF_THE_TIME)

    @functools.cached_property
    def corpus_breaks(self) -> list[Break]:
        """What breaks by the hours of speech, however many GPUs."""
        return first_breaks(self.plans[:1], OF_THE_CORPUS)

    def headline(self) -> str:
        """What is planned, in two lines."""
        case = self.case
        name, _ = self.preset
        sizes = f"{case.corpus.rows:,} recordings of {self.clip_s:g} s"
        return (
            f"Preset {name} on {case.card.name}, {case.network.name}, checkpoints on "
            f"{case.disk.name}; {self.hours:,g} hours of speech: {sizes}.\n"
            "Reckoned from data sheets and assumptions (--write leaves them all); nothing was "
            "measured on a GPU."
        )

    def grid(self) -> list[tuple[str, ...]]:
        """The table; "stopped" is the share of the time for the gate and for checkpoints."""
        rows = [HEADINGS]
        for count in self.gpus:
            of_count = [plan for plan in self.plans if plan.gpus == count]
            rows += [plan_cells(plan, self.plans[0]) for plan in of_count]
            if not of_count:
                rows.append((f"{count}", "no room for one", *[""] * (len(HEADINGS) - 2)))
        return rows

    def first_broken(self) -> list[str]:
        """What breaks first by the hours of speech, and by the number of GPUs, in a sentence each.

        At the same number of GPUs the worst is first.
        """
        lines = [f"At any number of GPUs: {told(each)}." for each in self.corpus_breaks[:1]]
        lines += [f"{with_gpus(each)}: {told(each)}." for each in self.breaks[:1]]
        return lines or ["Nothing that is looked at."]

    def broken(self) -> list[str]:
        """The same, and how many more there are."""
        more = len(self.corpus_breaks) + len(self.breaks) - 2
        rest = [f"And {more} more: --write FILE lists them."] if more > 0 else []
        return ["What breaks first.", *self.first_broken(), *rest]


def workload_on(hw, sections: dict, data: DataConfig) -> Workload:
    """A step at the longest lengths the model has positions for, on a GPU that is not here."""
    model = dict(sections["model"])
    model.setdefault("text_vocab", sections["text"]["vocab_size"])
    codes = make_codec(codec_config(sections["codec"])).vocab_size
    model.setdefault("code_vocab", codes + 2)  # START and STOP
    return Workload(
        model=build(GPTConfig, model),
        train=build(TrainConfig, sections["train"]),
        speed=build(SpeedConfig, sections["speed"]),
        data=data,
        hw=hw,
        precision=choose_precision(hw).value,
        **sections["memory"],
    )


def corpus_of(sections: dict, data: DataConfig, hours: float, clip_s: float) -> SpeechCorpus:
    """So many hours as this run's codec and front end would keep them."""
    front_end = front_end_config(sections["front_end"])
    return SpeechCorpus(
        hours=hours,
        clip_s=clip_s,
        frame_rate=codec_config(sections["codec"]).frame_rate,
        reference_frames=data.reference_frames,
        n_mels=front_end.n_mels,
        sample_rate_hz=front_end.sample_rate,
    )


def both_ways(case: ScaleCase, gpus: Sequence[int]) -> list[ScalePlan]:
    """For each of `gpus` the batch kept, and full passes where those make it larger.

    Left out are numbers of GPUs on which not one row fits.
    """
    plans = []
    for count in gpus:
        try:
            kept = plan_scale(case, count)
        except FitError:
            continue
        full = plan_scale(case, count, full_passes=True)
        plans.append(kept)
        if full.batch_rows > kept.batch_rows:
            plans.append(full)
    return plans


def plan_cells(plan: ScalePlan, first: ScalePlan) -> tuple[str, ...]:
    """A row of the table; `first` is what efficiency is measured by."""
    each = plan.tokens_a_s / plan.gpus
    efficiency = each / (first.tokens_a_s / first.gpus)
    return (
        f"{plan.gpus}",
        f"{plan.batch_rows:,}",
        rough_time(plan.step_s),
        decimal_size(plan.sent_bytes) if plan.sent_bytes else "none",
        rough_time(plan.wire_s) if plan.sent_bytes else "none",
        rounded(plan.tokens_a_s),
        f"{efficiency:.0%}",
        hours_between(plan),
        rough_time(plan.checkpoint_s),
        f"{1 - plan.step_s / plan.all_s:.0%}",
    )


def hours_between(plan: ScalePlan) -> str:
    """Hours for the corpus, with those at the highest and the lowest share of the GPU's peak."""
    full = plan.batch_rows > plan.case.work.data.effective_batch
    card = plan.case.card
    few, many = (
        plan_scale(plan.case, plan.gpus, full, share).hours for share in (card.most, card.least)
    )
    return f"{plan.hours:,.3g} h ({few:,.3g} to {many:,.3g})"


def with_gpus(each: Break) -> str:
    """From how many GPUs on, and in which of the two ways."""
    return f"With {gpu_words(each.plan.gpus)} and {each.plan.batch_rows:,} rows a step"


def told(each: Break) -> str:
    """A limit that is reached, with its figures and what to do."""
    return f"{each.limit.what} ({each.told}). To do: {each.limit.change}"
