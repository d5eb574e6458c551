"""Write a GPU check into docs/measurements-archive.md: `python tests/bench/gpu_page.py FILE`.

FILE is the gpu.json of `make check-gpu` or of gpu_session.sh. Each card has a section of its own;
running the command again replaces that section.
"""

import argparse
import json
import re
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "measurements-archive.md"
END = "<!-- end of the GPU tables -->"  # new cards are put before it
GIB = 2**30


def section(table: dict) -> str:
    """The section of one card, markers included."""
    machine = table["machine"]
    name = machine["name"]
    lines = [f"<!-- card: {name} -->", f"### {name}", "", describe(machine), ""]
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
    if row.get("tokens_per_s"):
        words.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    if row.get("tflops"):
        words.append(f"{row['tflops']:.3g} TFLOP/s")
    if row.get("loss_change") is not None:
        words.append(f"loss {row['loss_change']:+.2%}")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    table = json.loads(options.file.read_text(encoding="utf-8"))
    if not table["machine"]["gpu"]:
        raise SystemExit(f"{options.file} was made without a GPU: it is no measurement.")
    page = options.page.read_text(encoding="utf-8")
    if END not in page:
        raise SystemExit(f"{options.page} has no line {END!r}, before which cards are put.")
    text = put(page, section(table), table["machine"]["name"])
    options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
