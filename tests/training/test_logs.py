"""The one log: written through kills and full disks, read back, and shown to TensorBoard."""

import importlib.util
import io
import json
import math
import sys

import numpy as np
import PIL.Image
import pytest
import soundfile

from kit.base.errors import DiskError
from kit.training import logs
from kit.training.config import StepEvent
from kit.training.logs import SpokenSample, jsonl_log, read_log, tensorboard_log

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def event(step: int, **more) -> StepEvent:
    fixed = {"steps": 10, "loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100}
    fixed |= {"step_s": 0.01, "unix_s": 1e9 + step / 4, "memory_bytes": 2**30}
    return StepEvent(step=step, **(fixed | more))


def row(step: int, **more) -> dict:
    return {"step": step, "steps": 1000, "loss": 8 / step, "lr": 1e-3, "note": ""} | more


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail, encoding="utf-8")
    return path


# Writing.


def test_events_come_back_as_rows_with_the_wall_time_between_them(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    log = jsonl_log(path)
    for step in (1, 2, 3):
        log(event(step, note="café" if step == 2 else ""))
        assert len(read_log(path)) == step, "each line is there at once"
    rows = read_log(path)
    assert [r["loss"] for r in rows] == [5.0, 2.5, 5 / 3]
    assert rows[1]["note"] == "café"
    assert [r["wall_s"] for r in rows] == [None, 0.25, 0.25]
    jsonl_log(path)(event(4))  # a new start, perhaps hours later
    assert read_log(path)[3]["wall_s"] is None


def test_what_is_not_finite_is_null_in_strict_json(tmp_path):
    path = tmp_path / "log.jsonl"
    gate = {"cer": math.nan, "eos_rate": 1.0}
    jsonl_log(path)(event(1, loss=math.nan, grad_norm=math.inf, gate=gate))
    strict = {"parse_constant": lambda name: pytest.fail(f"{name} is no JSON")}
    wanted = {"loss": None, "grad_norm": None, "gate": {"cer": None, "eos_rate": 1.0}}
    assert json.loads(path.read_text(), **strict).items() >= wanted.items()


def test_the_part_of_a_line_that_a_kill_left_is_passed_over_and_removed_by_a_new_start(tmp_path):
    assert read_log(tmp_path / "none.jsonl") == []
    path = write(tmp_path / "log.jsonl", [row(1), row(2)], '{"step": 3, "lo')
    assert [r["step"] for r in read_log(path)] == [1, 2]
    with pytest.warns(UserWarning, match=r"log\.jsonl.*last line.*dropped"):
        jsonl_log(path)(event(3))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3]


def test_half_a_line_on_a_full_disk_is_an_error_not_a_line(tmp_path):
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "log.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = jsonl_log(path)
    log(event(1))
    signal = pytest.importorskip("signal")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(DiskError, match="could not write"):
            log(event(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [r["step"] for r in read_log(path)] == [1]
    log(event(2))
    assert [r["step"] for r in read_log(path)] == [1, 2]


# Reading.


@pytest.mark.parametrize("line", ['{"step": 3}', "7", "\0\0\0\0", '{"step": 3, "loss": 1e'])
def test_a_line_that_is_no_event_is_left_out_and_said(tmp_path, line):
    path = write(tmp_path / "log.jsonl", [row(1), row(2)], f"{line}\n")
    with pytest.warns(UserWarning, match=r"log\.jsonl: 1 unreadable lines"):
        assert [r["step"] for r in read_log(path)] == [1, 2]


def test_when_steps_go_back_later_lines_win_and_stale_ones_go(tmp_path):
    first = [row(s, loss=1.0) for s in range(1, 11)]
    again = [row(s, loss=2.0) for s in (6, 7)]
    rows = read_log(write(tmp_path / "log.jsonl", first + again))
    assert [(r["step"], r["loss"]) for r in rows[4:]] == [(5, 1.0), (6, 2.0), (7, 2.0)]


# TensorBoard, trackio and W&B.


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def points(folder, name: str) -> list[tuple[int, float]]:
    return [(p.step, pytest.approx(p.value)) for p in accumulated(folder).Scalars(name)]


def spoken_sample(step: int) -> SpokenSample:
    draw = np.random.default_rng(0)
    wave = draw.uniform(-0.5, 0.5, 800).astype(np.float32)
    picture = draw.integers(0, 255, (20, 30, 3), dtype=np.uint8)
    sound = {"wave": wave, "sample_rate_hz": 8000}
    return SpokenSample(step=step, text="a text", **sound, spectrogram=picture)


@needs_tensorboard
def test_tensorboard_shows_what_the_log_holds_and_what_is_spoken(tmp_path):
    sample = spoken_sample(step=2)
    board, reason = tensorboard_log(tmp_path, newest_sample=lambda: sample)
    for step in (1, 2):
        board(event(step))
    board(event(10, val_loss=2.0, loss=math.nan, note="skipped", gate={"cer": 0.1}))
    assert str(tmp_path) in reason and points(tmp_path, "loss") == [(1, 5.0), (2, 2.5)]
    assert points(tmp_path, "gate/cer") == [(10, 0.1)] and points(tmp_path, "val_loss")
    found = accumulated(tmp_path)
    (sound,), (picture,) = found.Audio("sample"), found.Images("sample/mel")
    assert (sound.step, picture.step) == (2, 2)
    wave, rate_hz = soundfile.read(io.BytesIO(sound.encoded_audio_string))
    assert rate_hz == 8000 and np.allclose(wave, sample.wave, atol=1e-4)
    assert (picture.width, picture.height) == (30, 20)
    pixels = np.asarray(PIL.Image.open(io.BytesIO(picture.encoded_image_string)))
    assert (pixels == sample.spectrogram).all()
    assert "note/text_summary" in found.Tags()["tensors"]
    assert found.Tensors("sample/text/text_summary")[0].tensor_proto.string_val == [b"a text"]


@needs_tensorboard
@pytest.mark.parametrize("same_process", [True, False])
def test_a_resumed_run_leaves_no_doubled_and_no_stale_point(tmp_path, same_process):
    board, _ = tensorboard_log(tmp_path)
    for step in range(1, 8):  # killed at 7; the last checkpoint was 4
        board(event(step, loss=1.0, val_loss=1.0))
    again = board if same_process else tensorboard_log(tmp_path)[0]
    for step in (5, 6):
        again(event(step, loss=2.0, val_loss=2.0))
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


def test_what_is_not_installed_is_stated(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = ("kit", "demo", {}, tmp_path)
    boards = {name: logs.tracker_log(name, *run) for name in ("wandb", "trackio")}
    for name, (board, reason) in (boards | {"tensorboard": tensorboard_log(tmp_path)}).items():
        assert board is None and reason.endswith(f"is not installed (pip install {name})")


def test_trackio_gets_a_run_for_each_start_and_is_imported_only_then(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text(
        "calls = []\n"
        "def init(**given):\n"
        "    calls.append(('init', given))\n"
        "    return Run()\n"
        "class Run:\n"
        "    def log(self, metrics, step): calls.append(('log', metrics, step))\n"
        "    def finish(self): calls.append(('finish',))\n"
        "def Audio(wave, sample_rate, caption): return (len(wave), sample_rate, caption)\n"
        "def Image(picture, caption): return (picture.shape, caption)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    given = ("kit", "demo", {"lr": 1e-4}, tmp_path, lambda: spoken_sample(step=2))
    log, reason = logs.tracker_log("trackio", *given)
    assert "trackio show" in reason and "trackio" not in sys.modules
    for step in (1, 2, 2, 10):  # back once: two runs
        log(event(step))
    calls = sys.modules.pop("trackio").calls
    assert [call[0] for call in calls] == "init log log finish init log log finish".split()
    for start, step in ((calls[0][1], 1), (calls[4][1], 2)):
        wanted = {"project": "kit", "config": {"lr": 1e-4}, "name": f"demo from step {step}"}
        assert start.items() >= wanted.items()
    assert calls[1][1]["loss"] == 5.0 and calls[1][2] == 1 and "sample" not in calls[1][1]
    assert calls[2][1]["sample"] == (800, 8000, "a text")
    assert calls[2][1]["sample/mel"] == ((20, 30, 3), "a text")
