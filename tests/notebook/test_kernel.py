"""Real kernels: a program runs the notebook, or a person interrupts a cell."""

import nbformat
import pytest
from helpers import until
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from paths import python_path

from kit.base.formatting import describe_error
from kit.notebook.result import is_watched


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(__file__))  # kernels inherit it


def test_without_a_kernel_nobody_watches_and_errors_are_text():
    assert not is_watched()
    errors = [ValueError("Too\n long."), KeyError("x"), MemoryError()]
    assert [*map(describe_error, errors)] == ["Too long.", "KeyError: 'x'", "MemoryError"]


def cell(log, **options) -> str:
    return f"""
from pathlib import Path
from test_train_panel import Process, panel_of
process = Process(Path({str(log)!r}), **{options!r})
panel = panel_of(process, resumable=True)
"""


def executed(*cells: str) -> list:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    return notebook.cells


@pytest.mark.long
def test_a_notebook_without_a_front_end(log):
    failing = cell(log.with_name("failing.jsonl"), fails_at=3)
    run = "panel.run()"
    cells = executed(cell(log), run, "print(process.done)", failing, run)
    outputs = cells[1].outputs
    assert "Finished: step 20 of 20" in "".join(o.get("text", "") for o in outputs)
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert cells[2].outputs[0]["text"].strip() == "20"
    assert "not finite" in cells[4].outputs[-1]["evalue"]


RESULT = """
from kit.notebook.plots import bars
from kit.notebook.result import Result, print_results
print_results()
display(Result(line="a sentence"))
Result(line="of a picture", pictures=[bars(["a"], [1.0])], figures={"memory_bytes": 3 * 2**30})
"""


@pytest.mark.long
def test_an_executed_notebook_holds_each_result_once():
    (cell,) = executed(RESULT)
    *printed, drawn = cell.outputs
    assert "".join(output["text"] for output in printed) == "a sentence\nof a picture\n"
    assert "<p>" not in drawn.data["text/html"] and "<img" in drawn.data["text/html"]
    assert "3.00 GiB" in drawn.data["text/html"]


@pytest.mark.long
def test_an_interrupted_wait_stops_the_training_with_a_checkpoint(log):
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(cell(log, steps=3000, pause_s=0.01), reply=True, timeout=300)
        running = client.execute("panel.run(); panel.wait(); print('ended', process.done)")
        until(lambda: log.exists() and log.read_text().count("\n") > 5)
        manager.interrupt_kernel()
        said = printed(client, running)
    finally:
        manager.shutdown_kernel(now=True)
        client.stop_channels()
    assert said.startswith("ended ") and int(said.split()[1]) < 3000


def printed(client, request: str) -> str:
    said = ""
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            said += message["content"]["text"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return said
