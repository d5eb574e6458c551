"""JupyterLab in a real Chromium, driven by commands rather than menus (menu clicks get lost).

`lab(folder)` and `browser()` are context managers; the rest are small acts on an open notebook.
Knows nothing of the kit. Screenshots go to the folder named by KIT_SCREENSHOTS, if it is set.
"""

import contextlib
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

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --window-size=1280,1500"
).split()
# The notebook on show, or null while the page is still loading.
PANEL = "const panel = window.jupyterapp?.shell?.currentWidget; const context = panel?.context;"
CELLS = "[...panel.content.model.sharedModel.cells].filter(c => c.cell_type === 'code')"


def missing() -> str:
    """Why browser tests cannot run here; "" when they can."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    for module in ("selenium", "jupyterlab"):
        try:
            __import__(module)
        except ImportError:
            return f"{module} is not installed (pip install -r tests/browser/requirements.txt)"
    return ""


def wait(condition, limit_s: float, what: str, pause_s: float = 0.3):
    """The first true value of `condition()`. Raises TimeoutError naming `what`."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {limit_s:.0f} s in vain for {what}")
        time.sleep(pause_s)
    return value


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def lab(folder: Path, **environment: str) -> Iterator[str]:
    """A JupyterLab over `folder` on localhost without a token; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
    command += [
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--ServerApp.root_dir={folder}",
    ]
    command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
    with tempfile.TemporaryDirectory() as home, open(Path(home) / "lab.log", "w") as log:
        # Settings of its own, or the last workspace comes back.
        own = {"JUPYTERLAB_WORKSPACES_DIR": home, "JUPYTER_CONFIG_DIR": home}
        env = os.environ | own | environment
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            address = f"http://127.0.0.1:{port}"
            wait(lambda: _answers(f"{address}/api") or server.poll() is not None, 60, "JupyterLab")
            if server.poll() is not None:
                raise RuntimeError(
                    f"JupyterLab ended: {(Path(home) / 'lab.log').read_text()[-800:]}"
                )
            yield address
        finally:
            server.terminate()  # it shuts its kernels down
            server.wait(30)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2):
            return True
    except OSError:
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
        try:
            yield driver
        finally:
            driver.quit()


def open_notebook(driver, address: str, path: str) -> None:
    """Open `path` (relative to the lab's folder) alone, and wait until its kernel is ready.

    A notebook without a kernelspec in its metadata never is: JupyterLab asks with a dialog.
    """
    driver.get(f"{address}/lab/tree/{path}?reset")
    status = f"{PANEL} return context?.isReady && context.sessionContext.session?.kernel?.status"
    wait(lambda: driver.execute_script(status) == "idle", 90, f"the kernel of {path}")
    driver.execute_script("window.jupyterapp.shell.collapseLeft()")


def run_all(driver) -> None:
    """Start every cell; does not wait for them."""
    driver.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")


def cells(driver) -> list[dict]:
    """Of each code cell: `count` (None: not run or running), `errors`, `text`."""
    script = f"""{PANEL} return {CELLS}.map(c => ({{
        count: c.execution_count,
        errors: c.outputs.filter(o => o.output_type === 'error')
            .map(o => `${{o.ename}}: ${{o.evalue}}`),
        text: c.outputs.map(o => [].concat(o.text ?? '').join('')).join('')}}))"""
    return driver.execute_script(script)


def wait_idle(driver, limit_s: float, buttons: tuple = ()) -> list[dict]:
    """Wait until every code cell has run, or one has failed; what `cells` says then.

    A notebook that waits for a click gets it: each of `buttons` is pressed once, when it shows.
    """
    waiting = list(buttons)

    def ended():
        for label in [label for label in waiting if button(driver, label)]:
            press(driver, label)
            waiting.remove(label)
        found = cells(driver)
        ran = all(c["count"] for c in found) or any(c["errors"] for c in found)
        status = driver.execute_script(
            f"{PANEL} return context.sessionContext.session.kernel.status"
        )
        return found if ran and status == "idle" else None

    return wait(ended, limit_s, "the notebook to end")


def button(driver, label: str):
    """The first visible widget button with this label that can be pressed, or None."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By

    with contextlib.suppress(StaleElementReferenceException):  # drawn anew while being looked at
        for found in driver.find_elements(By.CSS_SELECTOR, "button.jupyter-button"):
            if found.text.strip() == label and found.is_enabled() and found.is_displayed():
                return found
    return None


def press(driver, label: str, limit_s: float = 30) -> None:
    found = wait(lambda: button(driver, label), limit_s, f"the button {label}")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    found.click()


def text_of(driver, css: str) -> str:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
    return driver.execute_script(script, css)


def screenshot(driver, name: str, css: str = "") -> None:
    """Save the window as `name`.png, or only the first element that `css` finds."""
    folder = os.environ.get("KIT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = driver.find_elements("css selector", css) if css else []
        data = found[0].screenshot_as_png if found else driver.get_screenshot_as_png()
        (Path(folder) / f"{name}.png").write_bytes(data)
