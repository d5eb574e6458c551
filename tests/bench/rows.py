"""Rows of a benchmark: what one measured, shown as a table and kept in a JSON file.

A ratio above 1 means that the kit is better than its peer; what failed has no figures, but a
"note".
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from kit.base.files import write_atomic
from kit.base.hardware import choose_precision, detect


def result(row: str, value, unit: str, peer: str, peer_value, ratio, **more) -> dict:
    keys = ("row", "value", "unit", "peer", "peer_value", "ratio")
    return dict(zip(keys, (row, value, unit, peer, peer_value, ratio))) | more


def native(names: Iterable[str]) -> list[str]:
    """Of formats, or rows that begin with one, those that this CPU has; says what it emulates."""
    precision = choose_precision(dataclasses.replace(detect(), device="cpu"))
    if precision.value == "bf16":
        return list(names)
    print(f"bf16 and fp16 are left out: {precision.reason}", flush=True)
    return [name for name in names if not name.startswith(("bf16", "fp16"))]


def table(rows: list[dict]) -> None:
    number = lambda x: "-" if x is None else f"{x:,.4g}"  # noqa: E731
    print(f"\n{'row':<76} {'kit':>8} {'peer':>8} {'ratio':>6}  unit, peer")
    for r in rows:
        figures = f"{number(r['value']):>8} {number(r['peer_value']):>8} {number(r['ratio']):>6.5}"
        print(f"{r['row']:<76} {figures}  {r.get('note') or r['unit'] + ', ' + r['peer']}")


def record(rows: list[dict], part: str, path: Path) -> None:
    """Put `rows` into the file, in the place of earlier ones of the same name, or a failed part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {(r["row"], r["peer"]) for r in rows}
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    kept = [r for r in known if (r["row"], r["peer"]) not in names and r["row"] != part]
    write_atomic(path, json.dumps(kept + rows, indent=1, ensure_ascii=False))
