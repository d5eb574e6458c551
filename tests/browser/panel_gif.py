"""Write docs/panel.gif, the moving panel of README.

`python tests/browser/panel_gif.py RUN [STEPS]`: RUN is a folder that 01_data_prep has prepared. A
copy of it is trained in JupyterLab and Chromium, with the cells of 02_train up to the panel.
"""

import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

import lab as web
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PANEL = ".jp-OutputArea-output .widget-vbox"
# How far down its curve ends: what follows are players of sounds, which a picture does not need.
CURVE_END = """const panel = document.querySelector(arguments[0]);
    const curve = panel.querySelector('img.widget-image').getBoundingClientRect();
    return Math.ceil(curve.bottom - panel.getBoundingClientRect().top)"""
TRAINED = ("checkpoints", "notebooks", "train*", "model*", "export", "samples", "report.html")
FRAMES = 10  # while it trains
FRAME_MS = 700
FIRST_MS = 1800
LAST_MS = 4000
COLOURS = 224
HEIGHT_PX = 1600  # of the window: the panel as a whole


def write_notebook(path: Path, steps: int) -> None:
    """Write 02_train up to the cell with the panel, trained for `steps`."""
    notebook = nbformat.read(ROOT / "notebooks" / "02_train.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    names = [bool(re.search(r"\bpanel\(\)", cell.source)) for cell in code]
    cells = code[: names.index(True) + 1]
    for cell in cells:
        cell.source = re.sub(r"^MAX_STEPS = \d+", f"MAX_STEPS = {steps}", cell.source, flags=re.M)
    notebook.cells = cells
    nbformat.write(notebook, path)


def frame(driver) -> Image.Image:
    (element, *_) = driver.find_elements("css selector", PANEL)
    return Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")


def record(driver) -> list[Image.Image]:
    """Pictures of the panel: the countdown, at equal shares of the training, the end."""

    def status() -> str:
        return web.text_of(driver, '[role="status"]')

    def share() -> float:
        """The share of the steps that the panel shows."""
        match = re.search(r"([\d,]+) / ([\d,]+)", web.text_of(driver, ".widget-html-content"))
        step, steps = (int(number.replace(",", "")) for number in match.groups() if match)
        return step / steps

    web.wait(lambda: "starts in" in status(), "the countdown")
    web.resize(driver, HEIGHT_PX)
    web.show(driver, PANEL)
    pictures = [frame(driver)]
    web.press(driver, "Start")
    web.wait(lambda: re.search(r"\d / \d", web.text_of(driver, ".widget-html-content")), "a step")
    for number in range(FRAMES):
        web.wait(lambda n=number: share() >= n / FRAMES or "Finished" in status(), "more steps")
        pictures.append(frame(driver))
    web.wait(lambda: "Finished" in status(), "the end")
    pictures.append(frame(driver))
    height_px = driver.execute_script(CURVE_END, PANEL)
    return [resized(picture, pictures[-1].width, height_px) for picture in pictures]


def resized(picture: Image.Image, width_px: int, height_px: int) -> Image.Image:
    """Cut `picture` off, or fill it up with its own background."""
    full = Image.new("RGB", (width_px, height_px), picture.getpixel((0, picture.height - 1)))
    full.paste(picture)
    return full


def save(frames: list[Image.Image], path: Path) -> None:
    """Save an animation whose frames have one palette."""
    palette = frames[-1].quantize(COLOURS)
    frames = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames]
    times_ms = [FIRST_MS, *[FRAME_MS] * (len(frames) - 2), LAST_MS]
    first, *rest = frames
    first.save(path, save_all=True, append_images=rest, duration=times_ms, loop=0, optimize=True)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.2f} MB")


def main(run: Path, steps: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        runs, folder = Path(home, "runs"), Path(home, "notebooks")
        shutil.copytree(run, runs / run.name, ignore=shutil.ignore_patterns(*TRAINED))
        codes = run.parent / "codes"  # beside the runs
        if codes.exists():
            shutil.copytree(codes, runs / "codes")
        folder.mkdir()
        Path(home, "kit").symlink_to(ROOT / "kit")
        shutil.copy(ROOT / "notebooks" / "start.py", folder)
        write_notebook(folder / "02_train.ipynb", steps)
        names = {"KIT_RUNS": str(runs), "KIT_RUN": run.name, "PYTHONPATH": str(ROOT)}
        with web.lab(folder, **names) as address, web.browser() as driver:
            web.open_notebook(driver, address, "02_train.ipynb")
            web.run_all(driver)
            frames = record(driver)
            web.end_kernels(address)
    save(frames, ROOT / "docs" / "panel.gif")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 120)
