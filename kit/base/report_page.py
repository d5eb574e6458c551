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
h1{margin:0} .verdict{font-size:1.25rem;margin:.3rem 0 1.5rem} small{opacity:.75}
dl{display:flex;flex-wrap:wrap;gap:1rem 2rem} dl div{flex:1 1 9rem} dd{margin:0}
dd b{font-size:1.6rem} dd small{display:block}
figure{margin:2rem 0} .plot{position:relative;height:13rem;margin:.7rem 0 0 2rem}
svg{width:100%;height:100%;border:solid #8c8c8c;border-width:0 0 1px 1px;overflow:visible}
.plot small{position:absolute;left:-2rem;transform:translateY(50%)}
.steps{display:flex;justify-content:space-between;margin-left:2rem}
polyline{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke}
.line0{color:#8c8c8c} .line1{color:#d97700} .line2{color:#1998ef}
figcaption b{margin-right:1rem;display:inline-block}
table{border-collapse:collapse;width:100%} audio{display:block;width:100%;min-width:7rem}
td,th{padding:.3rem .6rem .3rem 0;border-bottom:1px solid #8886;text-align:left;
vertical-align:top} td+td{overflow-wrap:anywhere} .players{table-layout:fixed}
.players td{vertical-align:middle}
details{margin:1rem 0;overflow-x:auto} summary{cursor:pointer;font-weight:600}
@media(max-width:40rem){details table:not(.players){min-width:40rem}
.players thead{display:none} .players tr{display:grid;
grid-template-columns:1fr 1fr} .players td:first-child{grid-column:1/-1}
.players td{border:0} .players td::before{content:attr(data-kind);font-size:.8rem}}
"""
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
    parts = [
        f"<!doctype html><html lang=en>{head}<h1>{title}</h1>",
        f"<p class=verdict>{html.escape(verdict(report, name))}</p>",
        headline_figures(report),
        loss_curve(report.get("train", {}).get("curve", {})),
        players_table(by_split.pop(HELD_OUT, []), folder),
    ]
    folded = {}
    for split, samples in by_split.items():
        folded[f"Listen: {SPLITS.get(split, split)}"] = players_table(samples, folder)
    for section, figures in report.items():
        rows = figures.get("checks") if isinstance(figures, dict) else None
        if rows:
            cells = [tuple(MARKS.get(cell, str(cell)) for cell in row.values()) for row in rows]
            folded[f"Checks: {section}"] = grid_html([tuple(rows[0]), *cells])
    folded["All figures"] = table_html(report)
    for summary, content in folded.items():
        parts.append(f"<details><summary>{html.escape(summary)}</summary>{content}</details>")
    return "".join(parts)


def verdict(report: dict, name: str) -> str:
    """Return in one sentence whether the voice is good, or what comes next."""
    data, train, judged = (report.get(section, {}) for section in ("data", "train", "eval"))
    failed = report.get("verify", {}).get("failed")
    if failed:
        return f"Do not trust this training: {', '.join(failed)} failed in `verify`."
    gate = judged.get("gate")
    if gate == "passed" and {"cer", "cer_floor"} <= judged.keys():
        cer, floor = judged["cer"], judged["cer_floor"]
        return f"The voice passes: {cer:.1%} of its letters are misheard (recordings: {floor:.1%})."
    if gate == "passed":
        return "The voice passes."
    if gate:
        more = f" ({len(gate) - 1} more under All figures, eval.gate)" if len(gate) > 1 else ""
        return f"Not yet: {gate[0]}{more}."
    done = {"prepare": "codes" in data, "train": train.get("finished"), "evaluate": False}
    command = next(command for command in done if not done[command])
    return f"Not judged yet. Next: python -m kit {command} --run {shlex.quote(name)}"


def headline_figures(report: dict) -> str:
    """Return those of the five most telling figures that were measured, each with a comparison."""
    train, judged, infer = (report.get(section, {}) for section in ("train", "eval", "infer"))
    figures = []
    if judged.get("cer") is not None:
        floor = judged.get("cer_floor")
        beside = "" if floor is None else f"recordings: {floor:.1%} (the noise floor)"
        figures.append(("Character error rate", f"{judged['cer']:.1%}", beside))
    loss, averaged = train.get("val_loss"), train.get("ema_val_loss")
    if None not in (loss, averaged):
        beside = f"averaged weights; the last ones: {loss:.3f}"
        figures.append(("Held-out loss", f"{averaged:.3f}", beside))
    elif loss is not None:
        figures.append(("Held-out loss", f"{loss:.3f}", "nats per target"))
    if train.get("seconds"):
        figures.append(("Training time", clock(train["seconds"]), f"{train['steps']:,} steps"))
    if train.get("peak_memory_bytes"):
        peak = format_gib(train["peak_memory_bytes"])
        figures.append(("Peak memory", peak, f"of training, {report.get('device', '')}"))
    if infer.get("real_time_factor"):
        factor = f"{infer['real_time_factor']:.2f}"
        figures.append(("Real-time factor", factor, "seconds of work for a second of speech"))
    cells = [tuple(map(html.escape, figure)) for figure in figures]
    rows = (f"<div><dt>{n}<dd><b>{f}</b><small>{b}</small></div>" for n, f, b in cells)
    return f"<dl>{''.join(rows)}</dl>"


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
    names, drawn = "", ""
    for number, (name, points) in enumerate(lines.items()):
        names += f"<b class=line{number}>{html.escape(name)} {points[-1][1]:.3f}</b>"
        places = (f"{100 * x / last_step:.2f},{100 - 100 * y / top:.2f}" for x, y in points)
        drawn += f"<polyline class=line{number} points='{' '.join(places)}'/>"
    ticks = range(0, top + 1, math.ceil(top / 4))
    marks = "".join(f"<small style='bottom:{100 * y / top:.0f}%'>{y}</small>" for y in ticks)
    svg = f"<svg viewBox='0 0 100 100' preserveAspectRatio=none>{drawn}</svg>"
    steps = f"<div class=steps><small>step 0</small><small>{last_step:,}</small></div>"
    caption = f"<figcaption>Loss, nats per target: {names}</figcaption>"
    return f"<figure>{caption}<div class=plot>{svg}{marks}</div>{steps}</figure>"


def players_table(samples: list[dict], folder: Path) -> str:
    """Return a row for each text of `samples`, a split's, with a player for each kind of it."""
    players = {}  # by text, then by kind
    for sample in samples:
        kind = Path(sample["wav"]).stem.removeprefix(f"{sample['split']}-").partition("-")[2]
        players.setdefault(sample["text"], {})[KINDS.get(kind, kind)] = player(sample, folder)
    kinds = dict.fromkeys(kind for row in players.values() for kind in row)
    if not kinds:
        return ""
    table = "<thead><tr><th>"
    table += "".join(f"<th>{html.escape(kind)}" for kind in kinds) + "</thead>"
    for text, row in players.items():
        table += f"<tr><td>{html.escape(text)}"
        for kind in kinds:
            table += f"<td data-kind='{html.escape(kind)}'>{row.get(kind, '')}"
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
