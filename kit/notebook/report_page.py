"""`report.html`: the record of a run as one self-contained page. Knows no figure by name."""

import base64
import html
from pathlib import Path

from kit.notebook.tables import table_html


def page(report: dict, folder: Path) -> str:
    """The record as one self-contained page: figures as tables, samples as audio players."""
    parts = [f"<h1>{html.escape(str(folder.name))}</h1>", table_html(report)]
    players = [player(sample, folder) for sample in report.get("samples", [])]
    parts.append("<h2>Samples</h2>" + "".join(players) if any(players) else "")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
        "td{padding:.15rem .8rem;border-bottom:1px solid #ddd;vertical-align:top}"
        "audio{display:block;width:100%;margin:.2rem 0 1rem}"
    )
    head = f"<!doctype html><meta charset=utf-8><title>Run record</title><style>{style}</style>"
    return head + "".join(parts)


def player(sample: dict, folder: Path) -> str:
    """A sample as sound to play; "" where its file is gone, words where it may not be shown.

    Whoever is sent the page would get the file: none from outside the run's folder goes into it.
    """
    path = (folder / sample["wav"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        told = f"{sample['wav']} is left out: it does not lie in the run's folder."
        return f"<p>{html.escape(told)}</p>"
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(f"{sample['text']} ({sample['split']}, {Path(sample['wav']).stem})")
    return f"<p>{text}<audio controls src='data:audio/wav;base64,{data}'></audio></p>"
