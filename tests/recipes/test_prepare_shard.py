"""A corpus prepared in shards: the files of one call, to the byte, also after a kill."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import corpus

from kit.base.errors import KitError
from kit.recipes.prepare import Preparation
from kit.recipes.prepare_shard import parse_shard
from kit.recipes.start import start

ROOT = Path(__file__).resolve().parent.parent.parent
# Files small enough that every shard has some of each; what is longer than 3 s is cut.
ASKED = (
    "--preset tiny --max-clip-seconds 3 --max-rejected-percent 100 --set align.batch=1 "
    "data.shard=5 codec.steps=8 codec.sharpen_steps=1 recognizer.steps=8"
)


def begin(runs: Path, *words: str) -> subprocess.Popen:
    """`kit prepare` with these options; what it says goes to a file named by them."""
    command = [sys.executable, "-m", "kit", "prepare", "--run", "mine", "--data", str(corpus())]
    runs.mkdir(exist_ok=True)
    own = dict(os.environ, KIT_RUNS=str(runs), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    with open(runs / ".said", "ab") as said:
        command += [*ASKED.split(), *words]
        return subprocess.Popen(command, cwd=ROOT, env=own, stdout=said, stderr=said)


def end(runs: Path, *processes: subprocess.Popen) -> str:
    """Wait until all have ended well; what they and those before have said."""
    codes = [process.wait(280) for process in processes]
    said = (runs / ".said").read_text(encoding="utf-8")
    assert codes == [0] * len(codes), said
    return said


def files(runs: Path) -> dict[str, bytes]:
    """The files of a preparation but its record, which holds times."""
    paths = [path for path in sorted(runs.rglob("*")) if path.is_file()]
    kept = [path for path in paths if path.name[0] != "." and path.stem != "report"]
    return {str(path.relative_to(runs)): path.read_bytes() for path in kept}


def recorded(runs: Path) -> dict:
    return json.loads((runs / "mine" / "report.json").read_bytes())["data"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("whole") / "runs"
    end(runs, begin(runs))
    return runs


@pytest.mark.long
def test_two_shards_and_a_last_call_leave_the_files_and_the_record_of_one(whole, tmp_path):
    runs = tmp_path / "runs"
    shards = [["--shard", f"{number}/2"] for number in (1, 2)]
    said = end(runs, *(begin(runs, *words) for words in shards))
    assert said.count("no codec yet") == 2 and "prepare --run mine --until fit_positions" in said
    assert sorted(path.name for path in (runs / "mine").glob("measures*")) == [
        "measures.1-of-2.jsonl",
        "measures.2-of-2.jsonl",
    ]
    said = end(runs, begin(runs, "--until", "fit_positions"))
    assert "checked: 74 of 74" in said and not (runs / "codes").exists()
    end(runs, *(begin(runs, *words) for words in shards))
    codes = list((runs / "codes").glob("codes-*"))
    assert len(codes) > 8
    inodes = {path: path.stat().st_ino for path in codes}
    end(runs, begin(runs))
    now = {path: path.stat().st_ino for path in codes}
    assert now == inodes, "nothing was encoded again"
    found, wanted = files(runs), files(whole)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert recorded(runs) == recorded(whole)


@pytest.mark.long
def test_a_killed_shard_that_is_run_again_changes_nothing(whole, tmp_path):
    runs = tmp_path / "runs"
    end(runs, begin(runs, "--until", "fit_positions"))
    killed = begin(runs, "--shard", "1/2")
    while not list((runs / "codes").glob("codes-*")):
        assert killed.poll() is None
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    end(runs, begin(runs, "--shard", "2/2"))
    end(runs, begin(runs, "--shard", "1/2"))
    end(runs, begin(runs))
    assert files(runs) == files(whole)


@pytest.mark.parametrize("text", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(KitError, match=f"--shard {text}: .* 1/16 to 16/16"):
        parse_shard(text)


def test_shards_have_every_item_once():
    items = list(range(50))
    parts = [items[parse_shard(f"{number}/16")] for number in range(1, 17)]
    assert sorted(item for part in parts for item in part) == items
    assert parts[2] == [2, 18, 34]


def test_a_step_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(KitError, match=r"--until codec: .*train_codec.*fit_positions"):
        Preparation(start("until"), until="codec")
