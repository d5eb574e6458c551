"""The page `python -m kit scale --write FILE` leaves: every table, every number's source.

Knows the plan; reckons nothing of its own.
"""

import textwrap
from collections.abc import Sequence

from kit.base.config import ConfigError, build, load_preset
from kit.base.words import decimal_size, in_gib, rough_time
from kit.model.sequence import GPTConfig
from kit.tuning.memory_plan import parameter_count
from kit.tuning.model_flops import training_flops
from kit.tuning.preflight import FitError
from kit.tuning.scale_limits import Break
from kit.tuning.scale_parts import (
    CARDS,
    CPU_STEP,
    DISKS,
    ENCODED,
    GPUS_A_MACHINE,
    LINK_SHARE,
    NETWORKS,
    PARTS,
    Part,
)
from kit.tuning.scale_plan import (
    ScaleCase,
    ScalePlan,
    checkpoint_s,
    plan_scale,
    sharded_checkpoint_s,
)

WIDTH = 112  # characters of a line of text
CPU_ROW = {"text_ids": 60, "codes": 200, "reference_frames": 517}  # of CPU_STEP, which has two
TOP = """\
# From one GPU to many

What training on {hours:,g} hours of speech would take with {least} to {most} GPUs, and what breaks
first. **Nothing here was measured on a GPU.** The figures are reckoned from the parts at the end;
each says whether it was measured (on a CPU), stands in a data sheet, or is assumed. They are good
for what is large beside what, and for what to change first; not for a bill.

One command leaves this page, and with your own preset or run, card and hours one about those:

    python -m kit scale {command}
"""

TABLE = """\
## The table

The preset `{name}` on {card}: {parameters:,} parameters, {flops:.3g} TFLOP a row, forward and
backward. {gpus} GPUs a machine; between machines {network}; checkpoints on {disk}. A row is a
recording of {clip_s:g} s: {codes} codes and {text_ids} text ids. Each GPU has {how}: {memory} of
the {limit} it may use are planned, as the model's longest rows want it.

Of two lines with the same number of GPUs the first keeps the settings' batch, as the kit does
however many share it; in the second `data.effective_batch` gives each a full pass of {micro_batch}
rows. Tokens a second count what stops for checkpoints and the gate. Efficiency: those of a GPU
beside those of the first line's. Hours: for the corpus once; in brackets with the highest and the
lowest share of its peak that the card is assumed to reach.
"""

BREAKS = """\
## What breaks first

Each plan, for 1, 2, 4 ... {most} GPUs, beside what the settings and the code were made for.
"""

OTHERS = """\
## Other cards and networks

Tokens a second with the batch kept; with full passes; hours for the corpus, the quicker way. A card
without room for a pass of {micro_batch} rows takes smaller ones.
"""

CORPUS = """\
## The corpus on disk

{hours:,g} hours in {rows:,} recordings of {clip_s:g} s: {tokens:.3g} billion tokens.
"""

CHECKPOINTS = """\
## A checkpoint

{size}: weights, average and the optimizer's moments. The first process copies it, writes it, and
reads it again for its checksum while all others wait, however many they are. The last column is
what it would take were each to write its share, which the kit does not.
"""

PARTS_TOLD = """\
## Where the numbers come from

A step is its passes, the update and the sending. **Passes**: the model's operations, counted from
its sizes (a test compares the count with PyTorch's own), at the share of the card's peak that is
assumed; never quicker than their kernels can be launched. Counted so, the one step of this size
that was measured, {cpu_s:g} s on two threads of a CPU, makes {cpu_rate:.0f} GFLOP/s. **Sending**,
where each GPU has the whole model: a ring sends fp32 gradients 2 (N - 1) / N times, after the last
pass, as the kit does it, with nothing to hide behind. Where weights are spread: two gatherings and
one sum in every pass, (N - 1) / N of their bytes each, partly behind the passes. The slowest link
of the ring decides. **Memory** is the kit's memory plan, which is within 4 % of a CPU's allocator
(`docs/measurements.md`). All weights train, by
AdamW. Left out: validation, which all share; start-up; failures; waiting for the slowest.
"""


def scale_page(scaling) -> str:
    """The whole page of a `Scaling` as Markdown."""
    parts = [
        top_part(scaling),
        table_part(scaling),
        breaks_part(scaling),
        others_part(scaling),
        corpus_part(scaling),
        checkpoint_part(scaling),
        sources_part(),
        markdown(parts_grid()),
        markdown(cards_grid()),
        markdown(links_grid()),
    ]
    return "\n".join(wrapped(part) for part in parts)


def wrapped(part: str) -> str:
    """`part` with its paragraphs in lines of WIDTH; headings, tables and code as they are."""
    paragraphs = part.strip("\n").split("\n\n")
    lines = []
    for paragraph in paragraphs:
        plain = not paragraph.startswith(("#", "|", "    "))
        fill = textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append(fill if plain else paragraph)
    return "\n\n".join(lines) + "\n"


def top_part(scaling) -> str:
    return TOP.format(
        hours=scaling.hours,
        least=scaling.gpus[0],
        most=scaling.gpus[-1],
        command=" ".join(command_words(scaling)),
    )


def command_words(scaling) -> list[str]:
    """The options that make this page again."""
    wanted = scaling.wanted
    name, _ = scaling.preset
    words = [f"--run {wanted.run}" if wanted.run else f"--preset {name}"]
    if wanted.use:
        words.append(f"--use {wanted.use}")
    for section, values in wanted.settings.items():
        words += [f"--set {section}.{key}={value}" for key, value in values.items()]
    words.append(f"--hours {scaling.hours:.15g}")
    words.append(f"--gpus {' '.join(map(str, scaling.gpus))}")
    words += [f"--card {scaling.card}", f"--network {scaling.network}", f"--disk {scaling.disk}"]
    words += [f"--clip-s {scaling.clip_s:g}", f"--write {scaling.write}"]
    return words


def table_part(scaling) -> str:
    case = scaling.case
    name, _ = scaling.preset
    plan = scaling.plans[-1]
    text = TABLE.format(
        name=name,
        card=case.card.name,
        parameters=parameter_count(case.work.model),
        flops=case.row_flops / 1e12,
        gpus=GPUS_A_MACHINE,
        network=case.network.name,
        disk=case.disk.name,
        clip_s=case.corpus.clip_s,
        codes=case.corpus.codes,
        text_ids=case.corpus.text_ids,
        micro_batch=case.work.data.micro_batch,
        how={"ddp": "the whole model", "fsdp": "a share of the weights"}[plan.parallel],
        memory=in_gib(plan.memory_bytes),
        limit=in_gib(case.work.max_memory_fraction * case.card.memory_bytes),
    )
    return f"{text}\n{markdown(scaling.grid())}"


def breaks_part(scaling) -> str:
    rows = [("from", "what", "figures", "what to do")]
    rows += [break_cells(each, "any number of GPUs") for each in scaling.corpus_breaks]
    for each in scaling.breaks:
        where = f"{gpu_words(each.plan.gpus)}, {each.plan.batch_rows:,} rows"
        rows.append(break_cells(each, where))
    text = BREAKS.format(most=scaling.gpus[-1])
    first = "\n\n".join(scaling.first_broken())
    return f"{text}\n{first}\n\n{markdown(rows)}"


def break_cells(each: Break, where: str) -> tuple[str, ...]:
    return where, each.limit.what, each.told, each.limit.change


def others_part(scaling) -> str:
    counts = sorted({scaling.gpus[0], *(n for n in (8, 64) if n <= scaling.gpus[-1])})
    rows = [("card", "network", *map(gpu_words, counts))]
    for card, sheet in CARDS.items():
        for network, between in NETWORKS.items():
            case = scaling.case_of(card, network, scaling.disk)
            cells = [pair_cell(case, count) for count in counts]
            rows.append((sheet.name, between.name, *cells))
    text = OTHERS.format(micro_batch=scaling.case.work.data.micro_batch)
    return f"{text}\n{markdown(rows)}"


def pair_cell(case: ScaleCase, count: int) -> str:
    """Tokens a second in both ways, and the hours of the quicker one."""
    try:
        kept = plan_scale(case, count)
        full = plan_scale(case, count, full_passes=True)
    except (FitError, ConfigError):
        return "no room for one row"
    rates = rounded(kept.tokens_a_s)
    if full.batch_rows > kept.batch_rows:
        rates += f"; {rounded(full.tokens_a_s)}"
    return f"{rates}; {min(kept.hours, full.hours):,.3g} h"


def gpu_words(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def rounded(number: float) -> str:
    """Three digits: 81_827 -> "81,800"."""
    return f"{float(f'{number:.3g}'):,.0f}"


def corpus_part(scaling) -> str:
    corpus = scaling.case.corpus
    references = corpus.row_reference_bytes * corpus.rows
    index = corpus.cache_bytes - corpus.code_bytes - references
    rows = [
        ("what", "size", "from"),
        ("recordings, 16 bits", decimal_size(corpus.recording_bytes), "counted"),
        ("codes, four bytes each", decimal_size(corpus.code_bytes), "counted"),
        (
            f"references, {corpus.reference_frames} frames a recording in half precision",
            decimal_size(references),
            "counted",
        ),
        ("index, mapped in training", decimal_size(index), "a row measured"),
        ("memory while the index is written", decimal_size(corpus.writer_bytes), "a row measured"),
        (
            "encoding all, hours of one core",
            f"{corpus.encoding_core_hours:,.0f}",
            f"{ENCODED.value:,g} s of speech a second measured",
        ),
        (
            "the same on 64 cores",
            rough_time(3600 * corpus.encoding_core_hours / 64),
            "were they as quick, and the disk",
        ),
        reading_cells(scaling.plans[-1]),
    ]
    text = CORPUS.format(
        hours=corpus.hours,
        rows=corpus.rows,
        clip_s=corpus.clip_s,
        tokens=corpus.rows * corpus.row_tokens / 1e9,
    )
    return f"{text}\n{markdown(rows)}"


def reading_cells(plan: ScalePlan) -> tuple[str, ...]:
    """What the last plan of the table asks of disks and of the processes that read."""
    corpus = plan.case.corpus
    rows_a_s = plan.batch_rows / plan.gpus / plan.step_s
    row_bytes = corpus.cache_bytes / corpus.rows
    what = f"read for each of {gpu_words(plan.gpus)}, {plan.batch_rows:,} rows a step"
    rate = f"{rows_a_s:,.0f} rows, {decimal_size(rows_a_s * row_bytes)} a second"
    return what, rate, "reckoned"


def checkpoint_part(scaling) -> str:
    case = scaling.case
    most = scaling.gpus[-1]
    rows = [("where", "gathered by the first", f"each of {most} its share")]
    for name, disk in DISKS.items():
        other = scaling.case_of(scaling.card, scaling.network, name)
        whole = rough_time(checkpoint_s(other))
        rows.append((disk.name, whole, rough_time(sharded_checkpoint_s(other, most))))
    text = CHECKPOINTS.format(size=decimal_size(case.checkpoint_bytes))
    return f"{text}\n{markdown(rows)}"


def sources_part() -> str:
    released = build(GPTConfig, load_preset("xtts_v2")["model"])
    flops = 2 * training_flops(released, **CPU_ROW)
    return PARTS_TOLD.format(cpu_s=CPU_STEP.value, cpu_rate=flops / CPU_STEP.value / 1e9)


def parts_grid() -> list[tuple[str, ...]]:
    rows = [("what", "value", "how it is known", "from")]
    rows += [(part.name, value_words(part), part.how, part.source) for part in PARTS]
    return rows


def value_words(part: Part) -> str:
    """A part's value with its unit, as a person would write them."""
    if part.unit.startswith("bytes"):
        return decimal_size(part.value) + part.unit.removeprefix("bytes")
    if part.unit.startswith("share"):
        return f"{100 * part.value:.3g} %{part.unit.removeprefix('share')}"
    if part.unit == "s":
        return rough_time(part.value)
    return f"{part.value:,.10g} {part.unit}".strip()


def cards_grid() -> list[tuple[str, ...]]:
    rows = [("card", "data sheet", "share of its peak, assumed", "why")]
    for sheet in CARDS.values():
        share = f"{sheet.utilisation:.0%} ({sheet.least:.0%} to {sheet.most:.0%})"
        rows.append((sheet.name, sheet.source, share, sheet.reason))
    return rows


def links_grid() -> list[tuple[str, ...]]:
    """Networks and disks; of the first, what is reckoned with is LINK_SHARE of the rate."""
    rows = [("between machines; disk", "a second, assumed", "from")]
    for each in (*NETWORKS.values(), *DISKS.values()):
        reached = f", {LINK_SHARE.value:.0%} of it reached" if each in NETWORKS.values() else ""
        rows.append((each.name, f"{decimal_size(each.rate)}{reached}", each.source))
    return rows


def markdown(cells: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells, the headings first, as a Markdown table."""
    head, *rows = cells
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
