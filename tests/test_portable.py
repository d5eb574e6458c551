"""The kit runs on Linux, macOS and Windows: nothing it uses is of one system alone, unasked.

What a system lacks is read from the sources, and tried: a process in which the kit finds a machine
without `resource`, `fcntl`, `os.sched_getaffinity`, without /proc, that starts processes afresh.
"""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import TRAIN, tiny_session, train_in
from paths import ROOT, python_path
from test_notebooks import NOTEBOOKS, code_cells, parse

from kit.inference.voice import Habits
from kit.inference.voice_files import load_references, save_references
from kit.training import checkpoint

ROOMS = sorted((ROOT / "kit").rglob("*.py"))

# What Windows has not (macOS lacks sched_getaffinity and what begins with posix_fa), from the
# standard library's documentation ("Availability: Unix").
POSIX_MODULES = set(
    "crypt curses fcntl grp nis posix pty pwd readline resource spwd syslog termios tty".split()
)
POSIX_NAMES = {
    "os": "chown chroot fchmod fchown fork forkpty geteuid getgid getgroups getloadavg getpgid "
    "getpgrp getresuid getsid getuid initgroups killpg lchown lockf mkfifo mknod nice openpty "
    "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_yield sendfile setgid "
    "setpgid setpriority setsid setuid statvfs sync sysconf ttyname uname wait wait3 wait4 WNOHANG "
    "O_CLOEXEC O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC".split(),
    "signal": "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 "
    "alarm pause pthread_kill pthread_sigmask setitimer sigpending sigwait siginterrupt".split(),
    "time": ["pthread_getcpuclockid", "tzset"],
    "socket": ["AF_UNIX", "socketpair"],
}


class Uses(ast.NodeVisitor):
    """What a file uses of POSIX systems alone, where no `hasattr` and no `try` stands around it."""

    def __init__(self):
        self.asked, self.tried, self.found = [], 0, []

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.asked.append(ast.dump(node.test))
        self.generic_visit(node)
        self.asked.pop()

    visit_IfExp = visit_If

    def visit_Try(self, node: ast.Try) -> None:
        names = {name.id for h in node.handlers for name in ast.walk(h) if hasattr(name, "id")}
        guarded = bool(names & {"ImportError", "ModuleNotFoundError", "AttributeError"})
        self.tried += guarded
        self.generic_visit(node)
        self.tried -= guarded

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function that returns early where the system is another has asked, too."""
        before = list(self.asked)
        for statement in node.body:
            self.visit(statement)
            leaves = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return)
            self.asked += [ast.dump(statement.test)] if leaves else []
        self.asked = before

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.note(alias.name in POSIX_MODULES, alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.note(node.module in POSIX_MODULES, str(node.module), node.lineno)
        for alias in node.names:
            named = alias.name in POSIX_NAMES.get(str(node.module), ())
            self.note(named, f"{node.module}.{alias.name}", node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        self.note(node.attr in POSIX_NAMES.get(of, ()), f"{of}.{node.attr}", node.lineno)
        self.generic_visit(node)

    def note(self, posix: bool, name: str, line: int) -> None:
        asked = any("hasattr" in test or "platform" in test for test in self.asked)
        if posix and not asked and not self.tried:
            self.found.append(f"line {line}: {name}")


def posix_uses(text: str) -> list[str]:
    uses = Uses()
    uses.visit(ast.parse(text))
    return uses.found


def test_the_readers_of_sources_find_what_they_look_for():
    text = "import os, fcntl\ndef f():\n    os.sched_getaffinity(0)\n"
    assert posix_uses(text) == ["line 1: fcntl", "line 3: os.sched_getaffinity"]
    text = "import os\nx = os.fork() if hasattr(os, 'fork') else 0\n"
    assert posix_uses(text + "try:\n    import fcntl\nexcept ImportError:\n    pass\n") == []
    text = "open('a')\nopen('a', 'rb')\np.read_text()\np.write_text(x, encoding='utf-8')\n"
    found = text_calls(ast.parse(text + "subprocess.run(['x'], text=True)\n"))
    assert [line.partition(":")[0] for line in found] == ["line 1", "line 3", "line 5"]


def text_calls(tree: ast.Module) -> list[str]:
    """Calls that read or write text in whatever encoding the system prefers."""
    found = []
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        text = name in ("read_text", "write_text")
        if name == "open" and isinstance(node.func, ast.Name):
            mode = node.args[1] if len(node.args) > 1 else given.get("mode")
            text = mode is None or "b" not in getattr(mode, "value", "b")
        text = text or getattr(given.get("text"), "value", None) is True
        if text and "encoding" not in given:
            found.append(f"line {node.lineno}: {ast.unparse(node)[:60]}")
    return found


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_what_only_posix_has_is_checked_first_and_text_files_name_their_encoding(path):
    """On Windows the default is cp1252, which has no Ethiopic."""
    text = path.read_text(encoding="utf-8")
    assert not posix_uses(text), "ask with hasattr(...), or sys.platform, before using these"
    assert text_calls(ast.parse(text)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_name_their_encoding(path):
    assert [call for cell in code_cells(path) for call in text_calls(parse(cell))] == []


def test_what_was_read_keeps_no_file_open(tmp_path):
    """Windows neither removes nor replaces a file that a tensor is still mapped from."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("what a process has mapped is read from /proc")
    train_in(str(tmp_path))
    session = tiny_session(tmp_path, dataclasses.replace(TRAIN, max_steps=TRAIN.max_steps + 1))
    list(session.run({"ema": True}))
    assert session.state.step == TRAIN.max_steps + 1
    references = tmp_path / "references.safetensors"
    save_references({"a": torch.randn(8, 20)}, references, Habits())
    mels = load_references(references).mels
    assert mels["a"].shape == (8, 20)
    assert str(tmp_path) not in maps.read_text(encoding="utf-8")


def test_a_checkpoint_that_somebody_reads_goes_another_time(tmp_path, monkeypatch):
    """Windows refuses to remove it; the run continues, and its checksum stays with it."""
    for step in (1, 2):
        checkpoint.save({"w": torch.zeros(2)}, tmp_path, step, keep=1)
        monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.undo()
    assert len(checkpoint.checkpoints(tmp_path)) == 2
    assert checkpoint.load(checkpoint.of_step(tmp_path, 1))["w"].shape == (2,)
    checkpoint.save({"w": torch.zeros(2)}, tmp_path, 3, keep=1)
    assert len(checkpoint.checkpoints(tmp_path)) == 1


def refuse(path: Path, **_) -> None:
    if path.name.startswith("step-"):
        raise PermissionError(13, "it is used by another process", str(path))


WINDOWS = """
import builtins, multiprocessing, os, sys, types
from pathlib import Path
HIDDEN = {"os": ("sched_getaffinity", "fork", "uname"), "signal": ("SIGPIPE", "SIGKILL", "SIGHUP")}
POSIX = {"resource", "fcntl", "pwd", "grp", "termios"}
plain_import = builtins.__import__
class Without(types.ModuleType):
    def __init__(self, module, names):
        super().__init__(module.__name__)
        self.__dict__.update({k: v for k, v in vars(module).items() if k not in names})
def windows_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    module = plain_import(name, globals, locals, fromlist, level)
    if importer.startswith("kit."):
        if name in POSIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in HIDDEN:
            return Without(module, HIDDEN[name])
    return module
builtins.__import__ = windows_import
multiprocessing.get_all_start_methods = lambda: ["spawn"]
def no_proc(path, *args, _exists=Path.exists, **more):
    return not str(path).startswith("/proc") and _exists(path, *args, **more)
Path.exists = no_proc
import psutil
plain_info = psutil.Process.memory_info
def windows_info(process):
    rss = plain_info(process).rss
    return types.SimpleNamespace(rss=rss, peak_wset=rss)
psutil.Process.memory_info = windows_info
"""

USES = """
import importlib, multiprocessing, pkgutil, shutil
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    import kit
    for found in pkgutil.walk_packages(kit.__path__, "kit."):
        importlib.import_module(found.name)
    assert not hasattr(sys.modules["kit.base.hardware"].os, "sched_getaffinity")
    import torch
    from kit.base import hardware
    from kit.dataset import clip_stats as measures
    from kit.streams import formats
    from kit.training import logs
    from kit.settings import TrialConfig
    from kit.tuning import monitor, trials
    from kit.dataset.archive import ArchiveConfig, unpack
    from kit.streams.stream import StreamConfig
    from helpers import CPU, DATA, GPT, TRAIN, dataset, speech, train_in
    assert hardware.detect().cores >= 1 and hardware.cpu_name()
    assert hardware.peak_memory_bytes("cpu") > 2**20
    clips = dataset(folder / "clips", "", {f"c{i}": speech(0.2) for i in range(3)})
    paths = sorted(map(str, clips.glob("wavs/*.wav")))
    found = measures.measure_clips(paths, folder / "cache.jsonl", processes=1)
    assert {type(m).__name__ for m in found.values()} == {"ClipMeasure"}
    packed = shutil.make_archive(str(folder / "packed"), "zip", clips)
    assert (unpack(packed, folder / "out", ArchiveConfig()) / "metadata.csv").is_file()
    text = folder / "lines.txt"
    text.write_bytes(b"".join(b"line %d\\n" % i for i in range(100)) + b"\\xff\\xfe bad\\n")
    multiprocessing.set_start_method("spawn", force=True)  # starting processes has set one
    bad = []
    stream = formats.TextLines(text, StreamConfig(shuffle=True), on_bad_record=bad.append)
    assert sorted(stream) == sorted(f"line {i}" for i in range(100))
    assert len(bad) == 1
    assert len(train_in(str(folder / "run"))) == TRAIN.max_steps
    rows = logs.read_log(folder / "run" / "train.jsonl")
    assert min(row["memory_bytes"] for row in rows) > 2**20
    rows = trials.some_rows((4, 10), (8, 20), 16)
    task = trials.Task(model=GPT, train=TRAIN, data=DATA, rows=rows, hw=CPU, threads=1)
    short = TrialConfig(steps=1, warmup_steps=1, rounds=1)
    figures = trials.measure_variant(task, short, ("sdpa",))
    assert figures.get("steps") == 1, figures
    print("all of it ran")
"""


def test_a_machine_like_windows_uses_every_room(tmp_path):
    """The kit alone does not see them: torch and the standard library keep what they need."""
    script = tmp_path / "windows.py"
    script.write_text(WINDOWS + USES, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path)]
    env = dict(os.environ, PYTHONPATH=python_path(__file__))
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env)
    assert "all of it ran" in done.stdout, done.stderr[-3000:]
