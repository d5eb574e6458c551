"""JupyterLab in a real Chromium, driven by commands rather than menus (menu clicks get lost).

`lab(folder)` and `browser()` are context managers; the rest are small acts on an open notebook.
Screenshots go to the folder named by KIT_SCREENSHOTS, if it is set.
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()
WIDTH_PX = 1366  # the narrowest screen that is still common; with the file browser open beside it
HEIGHT_PX = 768
TALLEST_PX = 16_000  # Chromium draws no higher picture
BLOCK_PX = 24  # a square of so many pixels without any ink is no letter
WHITE = 225  # and above, in all three colours
THEMES = ("JupyterLab Dark", "JupyterLab Light")  # the one it begins with last
NOTIFICATIONS = "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
VIEWPORT = ".jp-WindowedPanel-viewport"
LIMIT_S = float(os.environ.get("KIT_BROWSER_LIMIT_S", 600))  # of every single wait
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
# The notebook on show, or null while the page is still loading.
PANEL = "const panel = window.jupyterapp?.shell?.currentWidget; const context = panel?.context;"
ALL_DRAWN = """const drawn = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
    const pictures = [...document.querySelectorAll('.jp-OutputArea-output img')];
    return drawn.length === panel.content.model.cells.length
        && !drawn.some(cell => cell.matches('.jp-mod-placeholder, .jp-Cell-Placeholder'))
        && pictures.every(picture => picture.complete);"""
CELLS = "[...panel.content.model.sharedModel.cells].filter(c => c.cell_type === 'code')"


def missing() -> str:
    """Why browser tests cannot run here; "" when they can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    for module in ("selenium", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (pip install -r tests/browser/requirements.txt)"
    return ""


def wait(condition, what: str):
    """The first true value of `condition()`. Raises TimeoutError naming `what`."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        if value := condition():
            return value
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {LIMIT_S:.0f} s in vain for {what}")
        time.sleep(0.3)


@contextlib.contextmanager
def lab(folder: Path, **environment: str) -> Iterator[str]:
    """A JupyterLab over `folder` on localhost without a token; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
    command += ["--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token="]
    command += [f"--ServerApp.root_dir={folder}", "--ServerApp.disable_check_xsrf=True"]
    with tempfile.TemporaryDirectory() as home, open(Path(home) / "lab.log", "w") as log:
        # Settings of its own, or the last workspace comes back.
        own = {"JUPYTERLAB_WORKSPACES_DIR": home, "JUPYTER_CONFIG_DIR": home}
        no_news = Path(home) / NOTIFICATIONS  # its question would lie over the page
        no_news.parent.mkdir(parents=True)
        no_news.write_text('{"fetchNews": "false", "checkForUpdates": false}', encoding="utf-8")
        env = os.environ | own | environment
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            address = f"http://127.0.0.1:{port}"
            wait(lambda: _answers(f"{address}/api") or server.poll() is not None, "JupyterLab")
            if server.poll() is not None:
                end = (Path(home) / "lab.log").read_text()[-800:]
                raise RuntimeError(f"JupyterLab ended: {end}")
            yield address
        finally:
            server.terminate()  # it shuts its kernels down
            server.wait(LIMIT_S)


def end_kernels(address: str) -> None:
    """Shut every kernel down, so that notebooks done with take no memory."""
    with urllib.request.urlopen(f"{address}/api/sessions", timeout=60) as answer:
        sessions = json.load(answer)
    for session in sessions:
        gone = urllib.request.Request(f"{address}/api/sessions/{session['id']}", method="DELETE")
        urllib.request.urlopen(gone, timeout=60).close()


def restart_kernel(address: str) -> None:
    """Restart the only kernel, as its menu would: what it had in memory is gone."""
    with urllib.request.urlopen(f"{address}/api/kernels", timeout=60) as answer:
        (kernel,) = json.load(answer)
    new = urllib.request.Request(f"{address}/api/kernels/{kernel['id']}/restart", method="POST")
    urllib.request.urlopen(new, timeout=60).close()


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
        return True
    return False


@contextlib.contextmanager
def browser() -> Iterator:
    """A headless Chromium with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        driver.set_script_timeout(60)
        # Else JupyterLab, in a window that never has the focus, has no current notebook.
        driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        resize(driver, HEIGHT_PX)
        try:
            yield driver
        finally:
            driver.quit()


def resize(driver, height_px: int, width_px: int = WIDTH_PX) -> None:
    """Give the page `width_px` x `height_px`, whatever the window."""
    size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def open_notebook(driver, address: str, path: str, width_px: int = WIDTH_PX) -> None:
    """Open `path` (relative to the lab's folder) alone, and wait until its kernel is ready.

    In a narrow window the file browser is closed.
    """
    resize(driver, HEIGHT_PX, width_px)
    driver.get(f"{address}/lab/tree/{path}?reset")
    status = f"{PANEL} return context?.isReady && context.sessionContext.session?.kernel?.status"
    wait(lambda: driver.execute_script(status) == "idle", f"the kernel of {path}")
    if width_px < WIDTH_PX:
        command(driver, "application:toggle-left-area")


def reload(driver) -> None:
    """Save the notebook and reload the page; its kernel keeps running, and may be busy."""
    command(driver, "docmanager:save")
    driver.execute_script("window.left = true")
    driver.refresh()
    ready = f"{PANEL} return !window.left && Boolean(context?.isReady)"
    wait(lambda: driver.execute_script(ready), "the notebook after a reload")


def command(driver, name: str, **options) -> None:
    """Run a command of JupyterLab, as a menu would, and wait until it has ended."""
    script = """const [name, options, done] = arguments;
        window.jupyterapp.commands.execute(name, options).then(() => done(), done)"""
    error = driver.execute_async_script(script, name, options)
    if error:
        raise RuntimeError(f"JupyterLab's {name} failed: {error}")


def run_all(driver) -> None:
    """Start every cell; does not wait for them."""
    driver.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")


def complaints(driver, name: str, width_px: int = WIDTH_PX) -> list[str]:
    """What cannot be read of the notebook on show, in either theme; screenshots of all of it."""
    sentences = []
    for theme in THEMES:
        command(driver, "apputils:change-theme", theme=theme)
        light = str(theme == "JupyterLab Light").lower()
        ready = f"return document.body.dataset.jpThemeLight === '{light}'"
        wait(lambda ready=ready: driver.execute_script(ready), theme)
        resize(driver, TALLEST_PX, width_px)  # what is out of sight is not laid out
        driver.execute_script("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        wait(lambda: driver.execute_script(f"{PANEL} {ALL_DRAWN}"), f"all cells of {name}")
        word = theme.split()[-1].lower()
        sentences += [f"{word}: {sentence}" for sentence in driver.execute_script(LOOK)]
        screenshot(driver, f"{name}-{word}", VIEWPORT)
        if word == "dark":
            (page,) = driver.find_elements("css selector", VIEWPORT)
            blocks = white_blocks(page.screenshot_as_png)
            if blocks:
                sentences.append(f"dark: {len(blocks)} white blocks, from {blocks[0]} on")
        resize(driver, HEIGHT_PX, width_px)
    return sentences


def white_blocks(png: bytes) -> list[tuple[int, int]]:
    """Places (x, y) of the squares of a picture that are white all over."""
    darkest = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).min(axis=2)
    rows, columns = (size // BLOCK_PX for size in darkest.shape)
    whole = darkest[: rows * BLOCK_PX, : columns * BLOCK_PX]
    squares = whole.reshape(rows, BLOCK_PX, columns, BLOCK_PX).min(axis=(1, 3))
    return [(int(x) * BLOCK_PX, int(y) * BLOCK_PX) for y, x in np.argwhere(squares >= WHITE)]


def in_sight(driver, label: str) -> bool:
    """Whether the page shows a button with this label where it is scrolled to now."""
    script = """return [...document.querySelectorAll('button.jupyter-button')].some(button => {
        const at = button.getBoundingClientRect();
        const top = document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2);
        return button.innerText.trim() === arguments[0] && button.contains(top)})"""
    return driver.execute_script(script, label)


def cells(driver) -> list[dict]:
    """Of each code cell: `count` (None: not run or running), `errors`, `noise`, `text`."""
    script = f"""{PANEL} return {CELLS}.map(c => ({{
        count: c.execution_count,
        errors: c.outputs.filter(o => o.output_type === 'error')
            .map(o => `${{o.ename}}: ${{o.evalue}}`),
        noise: c.outputs.filter(o => o.name === 'stderr').map(o => [].concat(o.text).join('')),
        text: c.outputs.map(o => [].concat(o.text ?? '').join('')).join('')}}))"""
    return driver.execute_script(script)


def wait_idle(driver) -> list[dict]:
    """Wait until every code cell has run, or one has failed; what `cells` says then."""
    status = f"{PANEL} return context.sessionContext.session.kernel.status"

    def ended():
        now = cells(driver)
        ran = all(c["count"] for c in now) or any(c["errors"] for c in now)
        return now if ran and driver.execute_script(status) == "idle" else None

    return wait(ended, "the notebook to end")


def show(driver, css: str) -> None:
    """Scroll to the first element that `css` finds, when it is there."""
    script = """const found = document.querySelector(arguments[0]);
        found?.scrollIntoView({block: 'start'}); return Boolean(found)"""
    wait(lambda: driver.execute_script(script, css), css)


def button(driver, label: str):
    """The first visible widget button with this label that can be pressed, or None."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By

    with contextlib.suppress(StaleElementReferenceException):  # redrawn while being looked at
        for element in driver.find_elements(By.CSS_SELECTOR, "button.jupyter-button"):
            if element.text.strip() == label and element.is_enabled() and element.is_displayed():
                return element
    return None


def press(driver, label: str) -> None:
    element = wait(lambda: button(driver, label), f"the button {label}")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def text_of(driver, css: str) -> str:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
    return driver.execute_script(script, css)


def screenshot(driver, name: str, css: str = "") -> None:
    """Save the window as `name`.png, or only the first element that `css` finds."""
    folder = os.environ.get("KIT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        elements = driver.find_elements("css selector", css) if css else []
        data = elements[0].screenshot_as_png if elements else driver.get_screenshot_as_png()
        (Path(folder) / f"{name}.png").write_bytes(data)
