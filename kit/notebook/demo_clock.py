"""How long the demo has taken, however often it was interrupted.

`make demo` says in KIT_DEMO_STARTED when it was started.
"""

import os
import time
from pathlib import Path


def demo_times(report: dict, folder: Path) -> dict:
    """Figures for the `report` of the run in `folder`: `wall_s`, of all its starts together.

    {} outside a demo, and in one that was finished before: a second one finds its work done.
    """
    started = os.environ.get("KIT_DEMO_STARTED")
    if not started or (folder / "demo-finished").exists():
        return {}
    starts_s = with_start(report.get("demo_starts_s", {}), started, folder)
    return {
        "demo_starts_s": starts_s,
        "wall_s": round(sum(starts_s.values()), 1),
        "interruptions": len(starts_s) - 1,
    }


def with_start(starts_s: dict[str, float], started: str, folder: Path) -> dict[str, float]:
    """The seconds each start took, by its unix time, with the one that runs since `started`.

    An earlier one went on until the last file in `folder` was written before this one began.
    """
    starts_s = dict(starts_s)
    now_s = float(started)
    if starts_s and started not in starts_s:
        written = (path.stat().st_mtime for path in folder.rglob("*") if path.is_file())
        last = list(starts_s)[-1]
        until_s = max((s for s in written if s < now_s), default=0.0)
        starts_s[last] = max(starts_s[last], round(until_s - float(last), 1))
    starts_s[started] = round(time.time() - now_s, 1)
    return starts_s
