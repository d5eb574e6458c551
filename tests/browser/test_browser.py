"""The notebooks in a real JupyterLab and Chromium: what a person sees and presses."""

import os
import re
from pathlib import Path

import lab as web
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = float(os.environ.get("KIT_NOTEBOOK_LIMIT_S", 600))

pytestmark = pytest.mark.skipif(bool(web.missing()), reason=web.missing())

KERNEL = {"name": "python3", "display_name": "Python 3"}  # without it JupyterLab opens a dialog
SETUP = """
import sys; sys.path[:0] = [{root!r}, {here!r}]
from slow import SWITCHES, SlowTrainer, tone
from kit.notebook.panel.speak_panel import SpeakPanel
from kit.notebook.panel.train_panel import TrainPanel
trainer = SlowTrainer("log.jsonl")
panel = TrainPanel(SWITCHES, trainer, "log.jsonl", numbers={{"grad_accum": 4}})
"""


@pytest.fixture(scope="module")
def driver():
    with web.browser() as driver:
        yield driver


@pytest.fixture
def folder(tmp_path):
    """A folder with one notebook, whose panel stands over a slow pretended run."""

    def make(*sources: str) -> Path:
        setup = SETUP.format(root=str(ROOT), here=str(Path(__file__).parent))
        cells = [nbformat.v4.new_code_cell(source) for source in (setup, *sources)]
        made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
        nbformat.write(made, tmp_path / "panel.ipynb")
        return tmp_path

    return make


def status(driver) -> str:
    return web.text_of(driver, '[role="status"]')


def step(driver) -> int:
    """The step that the panel's tiles show; 0 before there is one."""
    found = re.search(r"([\d,]+) / [\d,]+", web.text_of(driver, ".widget-html-content"))
    return int(found[1].replace(",", "")) if found else 0


def picture(driver) -> str:
    return driver.execute_script("return document.querySelector('img.widget-image')?.src")


def locked(driver) -> bool:
    script = (
        "return [...document.querySelectorAll('.widget-checkbox input')].every(b => b.disabled)"
    )
    return driver.execute_script(script)


def drive(driver, name: str) -> None:
    """Start, watch the numbers and the picture move, Stop."""
    web.wait(lambda: web.button(driver, "Start"), 60, "the panel")
    assert not locked(driver)
    before = picture(driver)
    web.screenshot(driver, f"{name}-1-before", ".jp-OutputArea-output .widget-vbox")
    web.press(driver, "Start")
    web.wait(lambda: step(driver) >= 20, 30, "20 steps")
    assert picture(driver) != before, "the curve must move"
    assert locked(driver), "switches lock during a run"
    web.screenshot(driver, f"{name}-2-running", ".jp-OutputArea-output .widget-vbox")
    web.press(driver, "Stop")
    web.wait(lambda: "Stopped at step" in status(driver), 20, "the stop")
    web.screenshot(driver, f"{name}-3-stopped", ".jp-OutputArea-output .widget-vbox")


def test_the_training_panel_starts_stops_continues_and_ends(driver, folder):
    with web.lab(folder("panel.run()", "panel.wait(120)")) as address:
        web.open_notebook(driver, address, "panel.ipynb")
        web.run_all(driver)
        drive(driver, "live")
        assert not locked(driver)
        stopped_at = step(driver)
        web.press(driver, "Continue")
        web.wait(lambda: "Finished: step 150 of 150" in status(driver), 60, "the end")
        assert f"step {stopped_at + 1}: resumed" in web.text_of(driver, ".widget-html-content")
        web.screenshot(driver, "live-4-finished", ".jp-OutputArea-output .widget-vbox")
        web.screenshot(driver, "live-5-window")
        assert not any(cell["errors"] for cell in web.wait_idle(driver, 30))


def test_in_a_cell_that_keeps_running_the_buttons_work(driver, folder):
    """Colab's way, forced; the next cell must wait for the run and not start inside it."""
    with web.lab(folder("panel.run('cell')", "print('after', trainer.done)")) as address:
        web.open_notebook(driver, address, "panel.ipynb")
        web.run_all(driver)
        drive(driver, "cell")
        cells = web.wait_idle(driver, 30)
        assert not any(cell["errors"] for cell in cells)
        assert cells[2]["text"] == f"after {step(driver)}\n"
        assert web.button(driver, "Start") is None and "Run this cell again" in status(driver)


def test_the_speaking_panel_plays_and_refuses_in_a_sentence(driver, folder):
    show = "SpeakPanel(tone, 'ሰላም ለዓለም፡ እንዴት ናችሁ?', {'voice': ['s0', 's1']}).run()"
    with web.lab(folder(show)) as address:
        web.open_notebook(driver, address, "panel.ipynb")
        web.run_all(driver)
        web.press(driver, "Speak", 60)
        length = "return document.querySelector('audio')?.duration"
        web.wait(lambda: driver.execute_script(length), 20, "the sound")
        assert driver.execute_script(length) == pytest.approx(0.5)
        web.screenshot(driver, "speak-1-spoken", ".jp-OutputArea-output .widget-vbox")
        box = driver.find_element("css selector", ".widget-textarea textarea")
        box.clear()
        box.send_keys(" ")
        web.press(driver, "Speak")
        web.wait(lambda: "There is nothing to speak" in status(driver), 20, "the sentence")
        web.screenshot(driver, "speak-2-refused", ".jp-OutputArea-output .widget-vbox")


@pytest.mark.skipif(not NOTEBOOKS, reason="there are no notebooks yet")
def test_every_notebook_runs_in_the_browser_without_an_error(driver):
    """In order, for each needs what the one before made. Start is pressed where it appears."""
    with web.lab(ROOT / "notebooks", KIT_PRESET=os.environ.get("KIT_PRESET", "tiny")) as address:
        for path in NOTEBOOKS:
            web.open_notebook(driver, address, path.name)
            web.run_all(driver)
            cells = web.wait_idle(driver, LIMIT_S, buttons=("Start",))
            web.screenshot(driver, path.stem)
            errors = [error for cell in cells for error in cell["errors"]]
            assert not errors, f"{path.name}: {errors}"
