"""Write a GPU check into docs/measurements-archive.md: `python tests/bench/gpu_page.py FILE ...`.

A FILE is the gpu.json of `make check-gpu` or of gpu_session.sh; rows of a later one replace those
of the same parts. Each card has a section of its own; running the command again replaces that.
"""

import argparse
import json
import re
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "measurements-archive.md"
END = "<!-- end of the GPU tables -->"  # new cards are put before it
GIB = 2**30
MACHINE = (
    "driver {driver_version}, power limit {power.limit}, clocks up to {clocks.max.sm} and "
    "{clocks.max.mem} (memory), Python {python}, torch {torch}, CUDA {cuda}, cuDNN {cudnn}, "
    "Triton {triton}, transformers {transformers}, {cores} CPU cores. Commit {commit}, {date}: "
    "`{command}`."
)
# Figures that may belong to a row, as text.
EXTRAS = {
    "mfu": "MFU {:.1%}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "first_call_s": "first call {:.2f} s",
    "warm_call_s": "warm {:.2f} s",
    "weights_read_share": "{:.0%} of the memory's speed",
    "ran": "{}",
}


def section(table: dict) -> str:
    """The section of one card, markers included."""
    machine = table["machine"]
    name = machine["name"]
    words = re.sub(r"\{([\w.]+)\}", lambda match: str(machine.get(match[1])), MACHINE)
    words = f"{machine['memory_bytes'] / GIB:.0f} GiB, {words}"
    lines = [f"<!-- card: {name} -->", f"### {name}", "", words, ""]
    for part, rows in groupby(table["rows"], key=lambda row: row["part"]):
        lines += [f"#### {part}", "", "| what | value | beside | ratio | spread | status |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
        lines += [row_line(row) for row in rows]
        lines += [""]
    return "\n".join([*lines, f"<!-- end of card: {name} -->"])


def row_line(row: dict) -> str:
    value = beside = ratio = spread = ""
    note = row.get("status") or "ok"
    if row["value"] is None:
        note += f": {row['note']}"
    else:
        value = f"{row['value']:,.4g} {row['unit']}"
        beside = row["peer"]
        if row["peer_value"] is not None:
            beside = f"{row['peer_value']:,.4g} ({row['peer']})"
        if row["ratio"] is not None:
            ratio = f"{row['ratio']:.3g}x"
        if row.get("spread") is not None:
            spread = f"{row['spread']:.1%}"
        more = [text.format(row[name]) for name, text in EXTRAS.items() if row.get(name)]
        note = "; ".join([note, *more])
    cells = [row["row"], value, beside, ratio, spread, note]
    cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(cells)} |"


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
    page = options.page.read_text(encoding="utf-8")
    if END not in page:
        raise SystemExit(f"{options.page} has no line {END!r}, before which cards are put.")
    table = merged(tables)
    text = put(page, section(table), table["machine"]["name"])
    options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
