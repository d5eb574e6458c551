"""Real kernels: a program runs the notebook, a person clicks or interrupts a cell."""

import os
import time

import nbformat
import pytest
from helpers import until
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from paths import python_path

from kit.base.words import in_words
from kit.notebook.kernel import Clicks, front_end


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.jsonl"


def test_no_kernel_means_plain_and_says_why():
    assert front_end() == ("plain", "there is no notebook kernel")


def test_errors_in_words():
    assert in_words(ValueError("Too\n long.")) == "Too long."
    assert in_words(KeyError("x")) == "KeyError: 'x'"
    assert in_words(MemoryError()) == "MemoryError"


CELL = """
import sys; sys.path[:0] = {paths!r}.split({separator!r})
from pathlib import Path
from test_train_panel import SWITCHES, Trainer, TrainPanel
log = Path({log!r})
trainer = Trainer(log, **{trainer!r})
panel = TrainPanel(SWITCHES, trainer, log)
"""


def cell(log, **trainer) -> str:
    paths = python_path(__file__)
    return CELL.format(paths=paths, separator=os.pathsep, log=str(log), trainer=trainer)


def test_a_notebook_without_a_front_end(log):
    cells = [cell(log), "panel.run()", "print(trainer.done)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = notebook.cells[1].outputs
    assert "Finished: step 20 of 20" in "".join(o.get("text", "") for o in outputs)
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert notebook.cells[2].outputs[0]["text"] == "20\n"


def test_a_notebook_whose_training_breaks_fails(log):
    cells = [nbformat.v4.new_code_cell(c) for c in (cell(log, breaks_at=3), "panel.run()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(CellExecutionError, match="not finite"):
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_a_running_cell_hears_clicks_and_holds_the_next_cells_back(log):
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(cell(log, steps=3000, pause_s=0.01), reply=True, timeout=300)
        ask = "print(panel.view.start.model_id, panel.view.stop.model_id)"
        ids = []

        def keep(message):
            if message["msg_type"] == "stream":
                ids.extend(message["content"]["text"].split())

        client.execute_interactive(ask, timeout=300, output_hook=keep)
        running = client.execute("panel.run('cell'); print('ended', trainer.done)")
        queued = client.execute("print('next cell', trainer.done)")
        time.sleep(0.5)
        press(client, ids[0])
        until(lambda: log.exists() and log.read_text().count("\n") > 5)
        asked = {"reply": True, "timeout": 60}  # by a page that was loaded anew
        assert client.kernel_info(**asked)["content"]["status"] == "ok"
        assert ids[1] in client.comm_info("jupyter.widget", **asked)["content"]["comms"]
        press(client, ids[1])
        said = texts(client, {running, queued})
    finally:
        manager.shutdown_kernel(now=True)
        client.stop_channels()
    done = int(said[running].split()[-1])
    assert 5 < done < 3000
    assert said[queued] == f"next cell {done}\n", "it ran after the training cell, not inside it"


def test_an_interrupt_stops_the_cell_with_a_checkpoint_and_without_an_error(log):
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(cell(log, steps=3000, pause_s=0.01), reply=True, timeout=300)
        source = "panel.resumable = True; panel.run('cell'); print('ended', trainer.done)"
        running = client.execute(source)
        until(lambda: log.exists() and log.read_text().count("\n") > 5)
        manager.interrupt_kernel()
        said = texts(client, {running})[running]
    finally:
        manager.shutdown_kernel(now=True)
        client.stop_channels()
    assert said.startswith("ended ") and int(said.split()[1]) < 3000


def press(client, comm_id: str) -> None:
    data = {"method": "custom", "content": {"event": "click"}}
    content = {"comm_id": comm_id, "data": data}
    client.shell_channel.send(client.session.msg("comm_msg", content))


def texts(client, requests: set, limit_s: float = 30.0) -> dict[str, str]:
    """What each request printed, once all are idle."""
    said, waiting = dict.fromkeys(requests, ""), set(requests)
    while waiting:
        message = client.get_iopub_msg(timeout=limit_s)
        asked, content = message["parent_header"].get("msg_id"), message["content"]
        if message["msg_type"] == "stream" and asked in said:
            said[asked] += content["text"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            waiting.discard(asked)
    return said


def test_polling_without_a_kernel_does_nothing():
    with Clicks() as clicks:
        clicks.poll()
