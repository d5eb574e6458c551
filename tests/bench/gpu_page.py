"""Write a GPU check into docs/measurements-archive.md: `python tests/bench/gpu_page.py FILE ...`.

A FILE is the gpu.json of `make check-gpu` or of gpu_session.sh; rows of a later one replace those
of the same parts. Each card has a section of its own, its goals first; running the command again
replaces that section.
"""

import argparse
import json
import re
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "measurements-archive.md"
END = "<!-- end of the GPU tables -->"  # new cards are put before it
GIB = 2**30


# The goals for a large card, what was calculated for it, and the row that answers: of several
# rows the best counts. (goal, asked, calculated, rows, field, whether more is better)
STEP = "a step of {} rows, bf16: {}"
KINDS = ("eager", "CUDA graph", "compiled", "compiled, CUDA graph")
EIGHT = [STEP.format(8, kind) for kind in KINDS]
MANY = [STEP.format(32, kind) for kind in KINDS]
BASELINE = "a step of 8 rows: fp32, explicit softmax, torch's default AdamW"
PLAIN = "32 rows in passes of 8: fp32, nothing on"
RECOMPUTED = "32 rows in passes of 8: bf16, every second layer recomputed"
SENTENCE = [f"30 x 1024, bf16, {kind}, batch 1" for kind in ("CUDA graphs", "compiled")]
GOALS = (
    ("8 rows a pass, MFU", 0.20, 0.26, EIGHT, "mfu", True),
    ("32 rows a pass, MFU", 0.40, 0.40, MANY, "mfu", True),
    ("8 rows a pass, ms a step", None, 39, EIGHT, "value", False),
    ("32 rows a pass, ms a step", None, 115, MANY, "value", False),
    ("8 rows, a CUDA graph without the compiler, ms a step", None, 47, EIGHT[1:2], "value", False),
    ("one sentence, codes/s", 1000, 950, SENTENCE, "value", True),
)


def goal_lines(rows: list[dict]) -> list[str]:
    """A table of the goals, each with what was asked, calculated and measured."""
    by_name = {row["row"]: row for row in rows if row["value"] is not None}
    lines = ["| goal | asked | calculated | measured |", "| --- | ---: | ---: | ---: |"]
    for goal, asked, calculated, names, field, more in GOALS:
        figures = [by_name[name][field] for name in names if by_name.get(name, {}).get(field)]
        best = (max if more else min)(figures) if figures else None
        cells = ("" if each is None else number(each) for each in (asked, calculated, best))
        lines.append(f"| {goal} | {' | '.join(cells)} |")
    eight = [by_name[name]["value"] for name in EIGHT if name in by_name]
    if BASELINE in by_name and eight:
        times = by_name[BASELINE]["value"] / min(eight)
        lines.append(
            f"| 8 rows beside the plain fp32 baseline, times as fast | 6 | | {times:.3g} |"
        )
    memory = [by_name.get(f"{name}: allocated") for name in (RECOMPUTED, PLAIN)]
    if all(memory):
        saved = memory[0]["value"] / memory[1]["value"] - 1
        lines.append(f"| memory, every second layer recomputed | -75 % | -75.2 % | {saved:.1%} |")
    return [*lines, ""]


def section(table: dict) -> str:
    """The section of one card, markers included."""
    machine = table["machine"]
    name = machine["name"]
    lines = [f"<!-- card: {name} -->", f"### {name}", "", describe(machine), ""]
    lines += goal_lines(table["rows"])
    for part, rows in groupby(table["rows"], key=lambda row: row["part"]):
        rows = list(rows)
        lines += [f"#### {part}", "", "| what | value | beside | ratio | spread | status |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
        lines += [row_line(row) for row in rows]
        lines += [""]
    return "\n".join([*lines, f"<!-- end of card: {name} -->"])


def describe(machine: dict) -> str:
    """The machine in a sentence, and the command."""
    parts = [
        f"{machine['memory_bytes'] / GIB:.0f} GiB",
        f"driver {machine['driver_version']}",
        f"power limit {machine['power.limit']}",
        f"clocks up to {machine['clocks.max.sm']} and {machine['clocks.max.mem']} (memory)",
        f"Python {machine['python']}",
        f"torch {machine['torch']}",
        f"CUDA {machine['cuda']}",
        f"cuDNN {machine['cudnn']}",
        f"Triton {machine['triton']}",
        f"transformers {machine['transformers']}",
        f"{machine['cores']} CPU cores",
    ]
    commit = machine["commit"] or "unknown"
    when = machine["date"][:10]
    return f"{', '.join(parts)}. Commit {commit}, {when}: `{machine['command']}`."


def row_line(row: dict) -> str:
    status = row.get("status") or "ok"
    if row["value"] is None:
        return f"| {cell(row['row'])} | | | | | {status}: {cell(row['note'])} |"
    peer = ""
    if row["peer_value"] is not None:
        peer = f"{number(row['peer_value'])} ({cell(row['peer'])})"
    elif row["peer"]:
        peer = cell(row["peer"])
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3g}x"
    spread = f"{row['spread']:.1%}" if row.get("spread") is not None else ""
    value = f"{number(row['value'])} {row['unit']}"
    extra = "; ".join(extras(row))
    note = f"{status}; {extra}" if extra else status
    return f"| {cell(row['row'])} | {value} | {peer} | {ratio} | {spread} | {note} |"


def extras(row: dict) -> list[str]:
    """Figures that belong to a row, as text."""
    words = []
    if row.get("mfu"):
        words.append(f"MFU {row['mfu']:.1%}")
    if row.get("tokens_per_s"):
        words.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if row.get("first_call_s"):
        words.append(f"first call {row['first_call_s']:.2f} s, warm {row['warm_call_s']:.2f} s")
    if row.get("weights_read_share"):
        words.append(f"{row['weights_read_share']:.0%} of the memory's speed")
    if row.get("ran"):
        words.append(cell(row["ran"]))
    return words


def number(value: float) -> str:
    return f"{value:,.4g}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def put(page: str, text: str, name: str) -> str:
    """`page` with the section of the card `name`, in the place of an earlier one."""
    begin, end = re.escape(f"<!-- card: {name} -->"), re.escape(f"<!-- end of card: {name} -->")
    known = re.compile(f"{begin}.*?{end}", re.DOTALL)
    if known.search(page):
        return known.sub(lambda _: text, page)
    return page.replace(END, f"{text}\n\n{END}")


def merged(tables: list[dict]) -> dict:
    """The tables of one card as one: of each part the last rows."""
    parts = {}
    for table in tables:
        for part, rows in groupby(table["rows"], key=lambda row: row["part"]):
            parts[part] = list(rows)
    return {"machine": tables[-1]["machine"], "rows": [r for rows in parts.values() for r in rows]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in options.files]
    names = {table["machine"]["name"] for table in tables}
    if len(names) > 1 or not all(table["machine"]["gpu"] for table in tables):
        raise SystemExit(f"These are not measurements of one GPU: {', '.join(sorted(names))}.")
    table = merged(tables)
    page = options.page.read_text(encoding="utf-8")
    if END not in page:
        raise SystemExit(f"{options.page} has no line {END!r}, before which cards are put.")
    text = put(page, section(table), table["machine"]["name"])
    options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
