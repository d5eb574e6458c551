"""`python -m kit` as a person at a terminal has it: real processes, exit codes, Ctrl-C."""

import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT, Terminal

from kit.__main__ import main
from kit.notebook.result import Result
from kit.recipes import commands
from kit.recipes.commands import parser
from kit.tuning import checks

USED = "setup prepare train finetune evaluate speak benchmark checklist".split()
NO_INSTALL = ("-o", ".venv/.installed-pypi", "-o", ".venv/.installed-cpu")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory, processes) -> Terminal:
    """All commands of this file are given here; the run `mine` goes all the way."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "amharic").mkdir()
    (runs / "amharic" / "preset").write_text("tiny", encoding="utf-8")
    return Terminal(runs, processes)


@pytest.fixture
def runs(terminal) -> Path:
    return terminal.runs


def has_lines(runs: Path, files: str) -> Callable[[], bool]:
    """Whether there are three lines by now in the `files` of `runs`."""
    return lambda: sum(len(path.read_text().splitlines()) for path in runs.glob(files)) >= 3


def report(runs: Path, name: str) -> dict:
    return json.loads((runs / name / "report.json").read_text(encoding="utf-8"))


def test_help_tells_the_way_without_waiting_for_torch():
    code = (
        "import contextlib, sys\n"
        "from kit.__main__ import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules"
    )
    for words in (["--help"], ["train", "--help"]):
        called = [sys.executable, "-c", code, *words]
        found = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "python -m kit" in found.stdout
        if words == ["--help"]:
            assert all(f"python -m kit {name}" in found.stdout for name in USED)


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_the_options_of_a_command_are_the_parameters_of_its_recipe(command):
    name = commands.COMMANDS[command].recipe
    options = commands.options_of(name)
    parameters = inspect.signature(pkgutil.resolve_name(f"kit.{name}")).parameters
    assert [name for name, *_ in options] == list(parameters)[1:]
    for name, kind, help in options:
        assert kind in commands.TYPES and help, f"say beside {name} what it is"


@pytest.mark.parametrize(
    "words, reported",
    [
        (("setup", "--set", "trian.lr=1"), "`train`"),
        (("finetune", "--run", "unlicensed"), "Coqui Public Model License"),
        (("setup", "--run", "a/b"), "'a/b'"),
        (("train", "--run", "amharic"), "01_data_prep"),
        (("train", "--run", "amharik"), "Did you mean `amharic`?"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(words, reported, terminal, runs):
    code, _, err = terminal.run(*words)
    assert code == 2
    assert reported in err and len(err.splitlines()) == 1 and "Traceback" not in err
    assert not (runs / "amharik").exists(), "a misspelt name begins no run"


def make(*words: str) -> subprocess.CompletedProcess:
    """`make` with `words`, as from a terminal: maybe a `make test` runs this."""
    outer = {"MAKELEVEL", "MAKEFLAGS", "MFLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    called = ["make", *NO_INSTALL, *words]
    return subprocess.run(called, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_make_gives_commands_that_there_are_and_asks_for_recordings():
    words = ("DATA=my clips", "RUN=mine", "LANGUAGE=en", "ARGS=--use speed")
    printed = make("-n", "voice", *words).stdout
    parts = re.split(r"&&|;|\{|\n", printed.replace("\\\n", " "))
    given = [shlex.split(part)[1:] for part in parts if part.strip().startswith("$kit ")]
    assert [words[0] for words in given] == ["setup", "prepare", "train", "evaluate", "checklist"]
    options = [parser().parse_args(words) for words in given]
    assert {each.run for each in options} == {"mine"} and options[0].use == "speed"
    assert (options[1].data, options[1].language) == ("my clips", "en")
    for word in ("RUN=mine", "DATA=clips"):
        done = make("voice", word)
        assert done.returncode == 2 and "make voice DATA=folder RUN=name" in done.stderr


@pytest.mark.parametrize("failing", ["train", "evaluate"])
@pytest.mark.parametrize("code, checklist", [(0, True), (3, True), (2, False)])
def test_make_voice_fails_with_the_voice_but_prints_the_checklist(
    failing, code, checklist, tmp_path
):
    python = tmp_path / "python"  # stands in for the kit: the command `failing` ends with `code`
    python.write_text(f'#!/bin/sh\necho "ran $3"\n[ "$3" = {failing} ] && exit {code}\nexit 0\n')
    python.chmod(0o755)
    done = make("voice", f"BIN={tmp_path}", f"KIT_RUNS={tmp_path}", "DATA=clips", "RUN=mine")
    assert ("ran checklist" in done.stdout) == checklist
    assert done.returncode == (2 if code else 0)
    assert (f"Error {code}" in done.stderr) == bool(code)


@pytest.mark.long
def test_the_demo_says_on_the_terminal_what_its_cells_found(tmp_path):
    words = ("DEMO=00_setup", "PRESET=tiny", "RUN=setup", f"KIT_RUNS={tmp_path}")
    done = make("demo", *words, f"BIN={Path(sys.executable).parent}")
    assert done.returncode == 0, done.stderr
    assert "Training: " in done.stdout and "It fits." in done.stdout


def test_a_result_that_fails_is_exit_code_3_of_every_command(monkeypatch):
    def fail(*_given):
        yield Result(line="It has not learnt.", failed=True)

    monkeypatch.setattr("kit.recipes.commands.Command.results", fail)
    assert main(["speak", "--voice", "sample"]) == 3
    assert "3 it does not pass" in " ".join(parser().format_help().split())


def test_names_that_the_terminal_or_utf8_cannot_write_are_answered(capfd):
    assert main(["speak", "--text", "a", "--voice", os.fsdecode(b"caf\xe9")]) == 2
    assert "caf\\udce9" in capfd.readouterr().err


@pytest.mark.long
def test_setup_prints_lines_and_tables_and_prepare_leaves_the_data_once(terminal, runs):
    words = ("setup", "--run", "looked", "--use", "quality", "--tables")
    out = terminal.done(*words, afresh=True)
    assert out.splitlines()[0].startswith("run looked in ")
    assert "It fits." in out and "goal quality" in out
    assert out.splitlines()[-1] == f"Report: {runs / 'looked' / 'report.html'}"
    out = terminal.done("prepare", "--run", "mine", "--set", "train.lr=2e-3", "speed.ema=true")
    assert "codec step" in out and "Report: " in out.splitlines()[-1]
    assert report(runs, "mine")["data"]["utterances"] > 100
    again = terminal.done("prepare", "--run", "mine")
    assert "codec step" not in again and "recogniser step" not in again


@pytest.mark.long
def test_ctrl_c_stops_training_with_a_checkpoint_and_the_command_resumes(terminal, runs):
    words = ("train", "--run", "mine", "--max-steps", "3000")
    code, out, err = terminal.interrupt(has_lines(runs, "mine/train.jsonl"), *words, afresh=True)
    assert code == 130, err
    assert "checkpoint" in out and "Traceback" not in err
    rows = (runs / "mine" / "train.jsonl").read_text().splitlines()
    reached = json.loads(rows[-1])["step"]
    assert json.loads(rows[-1])["steps"] == 3000 and reached < 3000
    out = terminal.done("train", "--run", "mine", "--max-steps", str(reached + 4))
    assert f"resumed from step {reached}" in out
    assert report(runs, "mine")["train"]["steps"] == reached + 4
    assert report(runs, "mine")["settings"]["train"] == {"lr": 2e-3}


@pytest.mark.long
def test_evaluate_speak_and_checklist_follow(terminal, runs):
    code, out, err = terminal.run("evaluate", "--run", "mine", "--sentences", "2", "--tables")
    assert code == 3, err
    figures = report(runs, "mine")["eval"]
    assert figures["sentences"] == 2 and figures["gate"] != "passed"
    assert "CER" in out and "Not yet: " in out and checks.HEAD[-1] in out
    path = runs / "said.wav"
    out = terminal.done("speak", "--run", "mine", "--text", "ሰላም ለሁሉም", "--out", str(path))
    assert f"Written: {path}" in out and path.read_bytes()[:4] == b"RIFF"
