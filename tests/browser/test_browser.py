"""The notebooks in a real JupyterLab and Chromium: what a person sees and presses."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import lab as web
import nbformat
import pytest
from helpers import dataset, few_words
from hub import hub_with_a_release

with suppress(ImportError):  # then every test here is skipped
    from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

pytestmark = pytest.mark.skipif(bool(web.missing()), reason=web.missing())

NARROW_PX = 1000  # half of a screen, the file browser closed
KERNEL = {"name": "python3", "display_name": "Python 3"}  # without it JupyterLab opens a dialog
SETUP = """
import sys; sys.path[:0] = [{root!r}, {here!r}]
from slow import FIELDS, SWITCHES, SlowTrainer, plan, tone
from kit.notebook.speech_panels import SpeakPanel
from kit.notebook.train_panel import TrainPanel
trainer = SlowTrainer({log!r})
panel = TrainPanel(trainer, trainer.start, SWITCHES, FIELDS, plan=plan, countdown_s=None)
"""
NOTES = ".widget-html-content"  # tiles, notes, players
# The input in the box of this class and label, scrolled into sight.
INPUT = """const box = [...document.querySelectorAll(arguments[0])]
    .find(found => found.textContent.trim() === arguments[1]);
    box?.scrollIntoView({block: 'center'}); return box?.querySelector('input')"""


@pytest.fixture(scope="module")
def driver():
    with web.browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What JupyterLab shows: copies of the notebooks, so that saving them changes none."""
    clone = tmp_path_factory.mktemp("lab")
    (clone / "kit").symlink_to(ROOT / "kit")
    folder = clone / "notebooks"
    folder.mkdir()
    for path in (*NOTEBOOKS, ROOT / "notebooks" / "start.py"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with (
        hub_with_a_release(),  # for the notebook that begins with one
        web.lab(folder, KIT_PRESET=os.environ.get("KIT_PRESET", "tiny")) as address,
    ):
        yield address


@pytest.fixture
def start_panel(driver, address, folder):
    """Run a notebook of these cells, behind those that make a panel over a slow pretended run."""

    def start(*sources: str) -> Path:
        """The log of the run."""
        log = folder / f"{len(list(folder.iterdir()))}.jsonl"
        setup = SETUP.format(root=str(ROOT), here=str(Path(__file__).parent), log=str(log))
        cells = [nbformat.v4.new_code_cell(source) for source in (setup, *sources)]
        made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
        path = log.with_suffix(".ipynb")
        nbformat.write(made, path)
        web.open_notebook(driver, address, path.name)
        web.run_all(driver)
        return log

    yield start
    web.end_kernels(address)


def status(driver) -> str:
    return web.text_of(driver, '[role="status"]')


def step(driver) -> int:
    """The step that the panel's tiles show; 0 before there is one."""
    match = re.search(r"([\d,]+) / [\d,]+", web.text_of(driver, NOTES))
    return int(match[1].replace(",", "")) if match else 0


def stop(driver) -> None:
    web.press(driver, "Stop")
    web.wait(lambda: "Stopped at step" in status(driver), "the stop")


def picture(driver) -> str:
    return driver.execute_script("return document.querySelector('img.widget-image')?.src")


def locked(driver) -> bool:
    inputs = ".widget-checkbox input, .widget-text input"
    script = "return [...document.querySelectorAll(arguments[0])].every(b => b.disabled)"
    return driver.execute_script(script, inputs)


def test_the_training_panel_starts_stops_continues_and_ends(driver, start_panel):
    start_panel("panel.run()", "panel.wait(900)")
    web.wait(lambda: web.button(driver, "Start"), "the panel")
    assert not locked(driver)
    before = picture(driver)
    web.screenshot(driver, "live-1-before", ".jp-OutputArea-output .widget-vbox")
    web.press(driver, "Start")
    web.wait(lambda: step(driver) >= 20, "20 steps")
    web.wait(lambda: picture(driver) != before, "the curve to move")
    assert locked(driver), "switches lock during a run"
    web.screenshot(driver, "live-2-running", ".jp-OutputArea-output .widget-vbox")
    stop(driver)
    web.screenshot(driver, "live-3-stopped", ".jp-OutputArea-output .widget-vbox")
    assert not locked(driver)
    stopped_at = step(driver)
    web.press(driver, "Start")
    web.wait(lambda: f"Finished: step {stopped_at + 40} of" in status(driver), "the end")
    assert f"step {stopped_at + 1}: resumed" in web.text_of(driver, NOTES)
    web.screenshot(driver, "live-4-finished", ".jp-OutputArea-output .widget-vbox")
    web.screenshot(driver, "live-5-window")
    assert not any(cell["errors"] for cell in web.wait_idle(driver))


def field(driver, label: str):
    """The text box with this label, in sight."""
    return web.wait(lambda: driver.execute_script(INPUT, ".widget-text", label), label)


def enter(driver, label: str, text: str) -> None:
    """Type `text` into the text box with this label, instead of what is there."""
    field(driver, label).send_keys(Keys.CONTROL, "a")
    field(driver, label).send_keys(text)


def test_fields_say_what_is_wrong_and_reach_the_run(driver, start_panel):
    log = start_panel("panel.run()", "panel.wait(900)")
    web.wait(lambda: web.button(driver, "Start"), "the panel")
    assert not field(driver, "Warm-up steps").is_displayed()
    enter(driver, "Learning rate", "20")
    web.wait(lambda: "Learning rate = 20" in web.text_of(driver, '[role="alert"]'), "what is wrong")
    web.wait(lambda: not web.button(driver, "Start"), "Start to be off")
    web.screenshot(driver, "fields-1-wrong", ".jp-OutputArea-output .widget-vbox")
    field(driver, "Learning rate").send_keys(Keys.TAB)
    driver.switch_to.active_element.send_keys(Keys.SPACE)  # the reset button
    web.wait(lambda: web.button(driver, "Start"), "Start to be on")
    assert field(driver, "Learning rate").get_attribute("value") == "0.002"
    enter(driver, "Learning rate", "1e-4")
    driver.find_element("css selector", ".jupyter-widget-Collapse-header").click()
    web.wait(lambda: field(driver, "Warm-up steps").is_displayed(), "more settings")
    enter(driver, "Warm-up steps", "0")
    enter(driver, "Max steps", "5000")
    web.wait(lambda: "5000 steps" in status(driver), "another plan")
    assert not web.complaints(driver, "fields")
    web.press(driver, "Start")
    web.wait(lambda: step(driver) >= 5, "5 steps")
    assert locked(driver)
    values = json.loads(log.with_suffix(".json").read_text())
    assert (values["lr"], values["warmup_steps"], values["max_steps"]) == (1e-4, 0, 5000)
    assert not web.complaints(driver, "fields-running")
    stop(driver)


def test_run_all_starts_after_a_countdown_that_a_key_stops(driver, start_panel):
    held = start_panel("panel.countdown_s = 20.0", "panel.run()", "panel.wait(900)")
    web.wait(lambda: "Training starts in" in status(driver), "the countdown")
    assert web.button(driver, "Start") and web.button(driver, "Stop")
    web.screenshot(driver, "countdown", ".jp-OutputArea-output .widget-vbox")
    field(driver, "Learning rate").send_keys("1")
    web.wait(lambda: "then press Start" in status(driver), "the end of the countdown")
    assert web.button(driver, "Start") and not held.exists()
    start_panel("panel.countdown_s = 3.0", "panel.run()", "panel.wait(900)")
    web.wait(lambda: step(driver) >= 3, "training that starts by itself")
    stop(driver)


def test_run_all_ends_in_sight_of_the_panel_and_of_its_mirror(driver, start_panel):
    """Run all goes to the last cell, here several screens below."""
    rest = ["#\n" * 60] * 3
    start_panel("panel.countdown_s = 600.0", "panel.run()", "panel.wait(900)", *rest)
    web.wait(lambda: web.in_sight(driver, "Start"), "the panel to come into sight")
    assert "Training starts in" in status(driver) and web.in_sight(driver, "Stop")
    web.screenshot(driver, "run-all-1-countdown")
    flip(driver, "Gradient checkpointing")
    web.wait(lambda: "then press Start" in status(driver), "the end of the countdown")
    buttons = driver.find_elements("css selector", "button.jupyter-button")
    starts = [each for each in buttons if each.text.strip() == "Start"]
    assert len(starts) == 2, "one in the panel, one below the cell that waits"
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", starts[1])
    starts[1].click()
    web.wait(lambda: step(driver) >= 5, "the training that the mirror started")
    web.screenshot(driver, "run-all-2-running")
    assert not web.complaints(driver, "run-all")
    stop(driver)


def test_the_speaking_panel_plays_and_refuses_in_a_sentence(driver, start_panel):
    start_panel("SpeakPanel(tone, 'ሰላም ለዓለም፡ እንዴት ናችሁ?', {'voice': ['s0', 's1']}).run()")
    web.press(driver, "Speak")
    length = "return document.querySelector('audio')?.duration"
    web.wait(lambda: driver.execute_script(length), "the sound")
    assert driver.execute_script(length) == pytest.approx(0.5)
    web.screenshot(driver, "speak-1-spoken", ".jp-OutputArea-output .widget-vbox")
    box = driver.find_element("css selector", ".widget-textarea textarea")
    box.clear()
    box.send_keys(" ")
    web.press(driver, "Speak")
    web.wait(lambda: "There is nothing to speak" in status(driver), "the sentence")
    web.screenshot(driver, "speak-2-refused", ".jp-OutputArea-output .widget-vbox")


def test_a_reloaded_tab_finds_its_panel_and_the_run(driver, start_panel):
    """With a cell that waits for the run, as in 02_train: the kernel is busy all the time."""
    start_panel("trainer.steps = 10**5", "panel.run()", "panel.wait(900)")
    web.press(driver, "Start")
    web.wait(lambda: step(driver) >= 10, "10 steps")
    web.reload(driver)
    before = web.wait(lambda: step(driver), "the panel after a reload")
    web.wait(lambda: locked(driver), "the run's own switches")
    web.wait(lambda: step(driver) > before, "numbers that move after a reload")
    stop(driver)


def plan(driver) -> str:
    """The panel's line on memory; "" where it is not shown."""
    lines = status(driver).splitlines()
    return next((line for line in lines if line.startswith("Memory planned")), "")


def flip(driver, label: str) -> None:
    """Click the switch with this label, and have it in sight."""
    web.wait(lambda: driver.execute_script(INPUT, ".widget-label-basic", label), label).click()


def players(driver) -> int:
    return driver.execute_script("return document.querySelectorAll('.widget-html audio').length")


def watch_training(driver, address: str, notebook: Path) -> None:
    """02_train as a person uses it: try a switch, Start, listen, reload the tab, Stop, resume."""
    steps(notebook, 100_000)
    web.open_notebook(driver, address, notebook.name)
    web.run_all(driver)
    web.wait(lambda: "Training starts in" in status(driver), "the countdown of the panel")
    web.wait(lambda: web.in_sight(driver, "Start"), "the panel to come into sight")
    web.show(driver, ".widget-checkbox")
    before = web.wait(lambda: plan(driver), "the plan")
    flip(driver, "Gradient checkpointing")
    web.wait(lambda: "by your changes" in plan(driver), "another plan")
    web.screenshot(driver, "02_train-planned")
    flip(driver, "Gradient checkpointing")
    web.wait(lambda: plan(driver) == before, "the first plan")
    assert step(driver) == 0 and not players(driver), "nothing has started"
    enter(driver, "Micro-batch", "2")
    web.wait(lambda: "passes of 2 utterances" in plan(driver), "smaller passes")
    web.press(driver, "Start")
    web.wait(lambda: players(driver), "the first sample")
    assert "Training." in status(driver)
    web.screenshot(driver, "02_train-running")
    web.reload(driver)
    web.show(driver, ".widget-checkbox")
    reached = web.wait(lambda: step(driver), "the panel after a reload")
    assert locked(driver) and players(driver)
    web.wait(lambda: step(driver) > reached, "numbers that move after a reload")
    stop(driver)
    steps(notebook, step(driver) + 20)


def steps(notebook: Path, number: int) -> None:
    """Set how long the notebook trains."""
    wanted = f"MAX_STEPS = {number}  #"
    text, count = re.subn(r"MAX_STEPS = \d+  #", wanted, notebook.read_text("utf-8"))
    assert count == 1
    notebook.write_text(text, "utf-8")


def test_every_notebook_runs_in_the_browser_and_can_be_read(driver, address, folder):
    """In order, for each needs what the one before made; then 02 again, when 05 has measured."""
    for path in sorted(folder.glob("0*.ipynb")):
        if path.stem == "02_train":
            watch_training(driver, address, path)
            web.end_kernels(address)
        run_and_read(driver, address, path, path.stem)
        if path.stem == "02_train":
            report = Path(os.environ["KIT_RUNS"], "demo", "report.json").read_text("utf-8")
            assert json.loads(report)["settings"]["data"]["micro_batch"] == 2
            assert players(driver) == 3, "at the start, in the middle and at the end"
    run_and_read(driver, address, folder / "02_train.ipynb", "02_train-measured")
    web.show(driver, ".widget-checkbox")
    shown = web.text_of(driver, NOTES)
    assert re.search(r"\d\.\d\dx, [+-][\d.]+ [MG]iB here", shown)


def run_and_read(driver, address: str, path: Path, name: str, width_px: int = web.WIDTH_PX) -> None:
    """Run a notebook; it has no errors, says nothing on stderr, and all of it can be read."""
    web.open_notebook(driver, address, path.name, width_px)
    web.run_all(driver)
    cells = web.wait_idle(driver)
    assert not [text for cell in cells for text in cell["errors"] + cell["noise"]], path.name
    assert not web.complaints(driver, name, width_px), path.name
    web.end_kernels(address)


def test_your_voice_in_half_a_screen_and_a_kernel_restarted_while_it_trains(
    driver, address, folder
):
    """A restart interrupts the cell that waits, which stops the training; Run all resumes it."""
    texts, waves = (some[:30] for some in few_words())
    table = "".join(f"c{i}|{text}\n" for i, text in enumerate(texts))
    dataset(folder / "almaz", table, {f"c{i}": wave for i, wave in enumerate(waves)})
    notebook = folder / "your_voice.ipynb"
    source = notebook.read_text("utf-8")
    for name, value in {"RUN": "almaz", "DATA": "almaz"}.items():
        assert source.count(f'{name} = \\"\\"  #') == 1
        source = source.replace(f'{name} = \\"\\"  #', f'{name} = \\"{value}\\"  #')
    notebook.write_text(source, "utf-8")
    steps(notebook, 100_000)
    web.open_notebook(driver, address, notebook.name, NARROW_PX)
    web.run_all(driver)
    web.press(driver, "Start")
    web.wait(lambda: step(driver) >= 10, "10 steps")
    web.screenshot(driver, "your_voice-running")
    web.restart_kernel(address)
    web.open_notebook(driver, address, notebook.name, NARROW_PX)
    web.run_all(driver)
    web.wait(lambda: "resumed from step" in web.text_of(driver, NOTES), "the training to resume")
    assert locked(driver)
    web.screenshot(driver, "your_voice-restarted")
    stop(driver)
    steps(notebook, step(driver) + 20)
    web.end_kernels(address)
    run_and_read(driver, address, notebook, "your_voice", NARROW_PX)
    assert players(driver), "of the sentence that was spoken"
