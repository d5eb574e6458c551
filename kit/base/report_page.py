"""report.html, the page of a run: verdict, figures, loss curve, players; the rest is folded."""

import base64
import html
import math
import shlex
from pathlib import Path

from kit.base.formatting import clock, format_gib, grid_html, table_html

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{margin:0} .verdict{font-size:1.25rem} figure{margin:2rem 0}
svg{width:100%;height:13rem;border:solid #8c8c8c;border-width:0 0 1px 1px;overflow:visible}
polyline{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}
.line0{color:#8c8c8c} .line1{color:#d97700} .line2{color:#1998ef}
table{border-collapse:collapse;width:100%} audio{width:100%;min-width:7rem}
.players{table-layout:fixed}
td,th{padding:.3rem .6rem .3rem 0;border-bottom:1px solid #8886;text-align:left}
details{margin:1rem 0;overflow-x:auto} summary{cursor:pointer;font-weight:600}
"""
FIGURES = (  # of the record: name, section, key, and how it is written
    ("hours of speech", "data", "hours", "{:.2f}".format),
    ("steps", "train", "steps", "{:,}".format),
    ("time of training", "train", "seconds", clock),
    ("steps/s", "train", "steps_per_s", "{:.3g}".format),
    ("peak memory", "train", "peak_memory_bytes", format_gib),
    ("training loss", "train", "loss", "{:.3f}".format),
    ("held-out loss", "train", "val_loss", "{:.3f}".format),
    ("held-out loss, EMA", "train", "ema_val_loss", "{:.3f}".format),
    ("CER", "eval", "cer", "{:.2%}".format),
    ("CER of the recordings", "eval", "cer_floor", "{:.2%}".format),
    ("sentences that end", "eval", "eos_rate", "{:.1%}".format),
    ("real-time factor", "infer", "real_time_factor", "{:.3f}".format),
)
HELD_OUT = "held_out"  # the split whose samples are in sight
SPLITS = {  # the others, which are folded
    "unseen": "words never seen in training",
    "long": "long sentences",
    "free_order": "known words in any order",
    "typed": "number formats",
}
MARKS = {True: "✓", False: "✗", None: "–"}  # of checks
KINDS = {"raw": "last weights (raw)", "ema": "averaged (EMA)", "best": "best of several"}


def report_page(report: dict, name: str, folder: Path) -> str:
    """Return the record of the run `name` in `folder` as one self-contained HTML page."""
    title = html.escape(name)
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{title}</title><style>{STYLE}</style>"
    by_split = {}
    for sample in report.get("samples", []):
        by_split.setdefault(sample["split"], []).append(sample)
    figures = {}
    for label, section, key, written in FIGURES:
        value = report.get(section, {}).get(key)
        if value is not None:
            figures[label] = written(value)
    parts = [
        f"<!doctype html><html lang=en>{head}<h1>{title}</h1>",
        f"<p class=verdict>{html.escape(verdict(report, name))}</p>",
        table_html(figures),
        loss_curve(report.get("train", {}).get("curve", {})),
        players_table(by_split.pop(HELD_OUT, []), folder),
    ]
    folded = {}
    for split, samples in by_split.items():
        folded[f"Listen: {SPLITS.get(split, split)}"] = players_table(samples, folder)
    for section, content in report.items():
        rows = content.get("checks") if isinstance(content, dict) else None
        if rows:
            cells = [tuple(MARKS.get(cell, str(cell)) for cell in row.values()) for row in rows]
            folded[f"Checks: {section}"] = grid_html([tuple(rows[0]), *cells])
    folded["All figures"] = table_html(report)
    for summary, content in folded.items():
        parts.append(f"<details><summary>{html.escape(summary)}</summary>{content}</details>")
    return "".join(parts)


def verdict(report: dict, name: str) -> str:
    """Return in one sentence whether the voice is good, or what comes next."""
    failed = report.get("verify", {}).get("failed")
    if failed:
        return f"Do not trust this training: {', '.join(failed)} failed in `verify`."
    gate = report.get("eval", {}).get("gate")
    if gate == "passed":
        return "The voice passes."
    if gate:
        more = f" ({len(gate) - 1} more under All figures, eval.gate)" if len(gate) > 1 else ""
        return f"Not yet: {gate[0]}{more}."
    command = "prepare"
    if "codes" in report.get("data", {}):
        command = "evaluate" if report.get("train", {}).get("finished") else "train"
    return f"Not judged yet. Next: python -m kit {command} --run {shlex.quote(name)}"


def loss_curve(curve: dict[str, list]) -> str:
    """Return lines by name, each (steps, losses), as a picture in the colours of the page."""
    lines = {}
    for name, line in curve.items():
        points = [(step, loss) for step, loss in zip(*line) if loss is not None]
        if points:
            lines[name] = points
    if not lines:
        return ""
    every = [point for points in lines.values() for point in points]
    last_step = max(step for step, _ in every)
    top = max(1, math.ceil(max(loss for _, loss in every)))
    names = []
    drawn = ""
    for number, (name, points) in enumerate(lines.items()):
        names.append(f"<b class=line{number}>{html.escape(name)} {points[-1][1]:.3f}</b>")
        places = (f"{100 * x / last_step:.2f},{100 - 100 * y / top:.2f}" for x, y in points)
        drawn += f"<polyline class=line{number} points='{' '.join(places)}'/>"
    caption = f"Loss (nats per target), 0 to {top}, of steps 0 to {last_step:,}: {', '.join(names)}"
    svg = f"<svg viewBox='0 0 100 100' preserveAspectRatio=none>{drawn}</svg>"
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def players_table(samples: list[dict], folder: Path) -> str:
    """Return a row for each text of `samples`, a split's, with a player for each kind of it."""
    players = {}  # by text, then by kind
    for sample in samples:
        kind = Path(sample["wav"]).stem.removeprefix(f"{sample['split']}-").partition("-")[2]
        players.setdefault(sample["text"], {})[KINDS.get(kind, kind)] = player(sample, folder)
    kinds = dict.fromkeys(kind for row in players.values() for kind in row)
    if not kinds:
        return ""
    table = "<thead><tr><th>" + "".join(f"<th>{html.escape(kind)}" for kind in kinds) + "</thead>"
    for text, row in players.items():
        table += f"<tr><td>{html.escape(text)}"
        table += "".join(f"<td>{row.get(kind, '')}" for kind in kinds)
    return f"<table class=players>{table}</table>"


def player(sample: dict, folder: Path) -> str:
    """Return a sample as an audio player; "" if its file is gone."""
    path = (folder / sample["wav"]).resolve()
    # The page may be sent to others: no file from outside the run's folder goes into it.
    if not path.is_relative_to(folder.resolve()):
        return html.escape(f"{sample['wav']} is left out: it is not in the run's folder.")
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<audio controls src='data:audio/wav;base64,{data}'></audio>"
