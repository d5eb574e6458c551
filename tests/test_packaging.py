"""One set of dependencies in four places (pyproject, requirements, conda, README), agrees."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from test_imports import imported

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tools"))
import oldest  # noqa: E402

WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = WHOLE["project"]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")

# Where the name one imports is not the name one installs.
INSTALLED_AS = {
    "yaml": "pyyaml",
    "espeakng_loader": "espeakng-loader",
    "IPython": "ipywidgets",  # ipywidgets requires it
    "traitlets": "ipywidgets",
    "PIL": "matplotlib",  # matplotlib requires it
}


def requirements(lines) -> dict[str, Requirement]:
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


def pins(lines) -> dict[str, str]:
    """{name: version}; fails on a line that is not an exact pin."""
    found = {}
    for name, one in requirements(lines).items():
        (exact,) = one.specifier
        assert exact.operator == "==", f"{one} must be pinned with =="
        found[name] = exact.version
    return found


def lines_of(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def requirements_txt() -> dict[str, str]:
    return pins(lines_of("requirements.txt"))


def environment_yml() -> dict[str, str]:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    from_conda = [e.replace("=", "==") for e in entries if isinstance(e, str) and e != "pip"]
    from_pip = [line for e in entries if isinstance(e, dict) for line in e["pip"]]
    found = pins(from_conda + from_pip)
    found.pop("python")
    return found


CORE = requirements(PROJECT["dependencies"])
EXTRAS = {extra: requirements(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
DECLARED = CORE | {name: one for extra in EXTRAS.values() for name, one in extra.items()}


def test_conda_pip_and_make_install_the_same():
    assert environment_yml() == requirements_txt()
    for_make = CORE | EXTRAS["demo"] | EXTRAS["lab"] | EXTRAS["watch"] | EXTRAS["test"]
    assert set(requirements_txt()) == set(for_make)
    assert requirements_txt()["torch"] == requirements_txt()["torchaudio"]
    for name, version in requirements_txt().items():
        assert version in DECLARED[name].specifier, f"{name} is outside pyproject.toml's range"


def test_pip_leaves_a_torch_that_was_tried_and_colab_its_own_packages():
    tried = ("2.9.0", "2.10.0", "2.11.0", "2.14.1")  # Colab has 2.11.0
    assert all(version in CORE["torch"].specifier for version in tried)
    assert "2.8.0" not in CORE["torch"].specifier
    assert all(version in CORE["torchaudio"].specifier for version in ("2.9.0", "2.11.1"))
    asked = requirements(lines_of("requirements-colab.txt"))
    assert not {"torch", "torchaudio", "torchao", "numpy", "ipywidgets", "ipykernel"} & set(asked)
    assert set(asked) <= set(CORE | EXTRAS["demo"])
    assert not any(one.specifier for one in asked.values()), "what is there already stays"


def undeclared(modules: set[str], declared) -> list[str]:
    ours = {"kit", "google", *sys.stdlib_module_names}  # google.colab: Colab has it, nobody else
    packages = {name.split(".")[0] for name in modules} - ours
    return sorted(p for p in packages if canonicalize_name(INSTALLED_AS.get(p, p)) not in declared)


@pytest.mark.parametrize("path", sorted((ROOT / "kit").rglob("*.py")), ids=lambda p: p.stem)
def test_every_import_is_declared(path):
    always = undeclared(imported(path, top_level=True), CORE)
    assert not always, "add to `dependencies` in pyproject.toml"
    assert not undeclared(imported(path), DECLARED), "add to an extra in pyproject.toml"


def presets() -> list[Path]:
    """All files of configs/."""
    return [path for path in (ROOT / "configs").rglob("*") if path.is_file()]


def test_every_room_is_in_the_package():
    rooms = {path.parent.relative_to(ROOT) for path in (ROOT / "kit").rglob("__init__.py")}
    folders = {path.parent.relative_to(ROOT) for path in presets()}
    names = {".".join(folder.parts) for folder in rooms | {Path("kit", each) for each in folders}}
    assert set(WHOLE["tool"]["setuptools"]["packages"]) == names


def test_make_says_before_it_installs_that_the_disk_is_too_full(tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    called = ["make", "test", "ROOM_GB=1000000", f"PYTHON={sys.executable}"]
    done = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "needs 1000000 GB on this disk" in done.stderr
    assert "TORCH=cpu" in done.stderr and not (tmp_path / ".venv").exists()


def test_the_oldest_versions_claimed_are_those_installed_to_try_them():
    """`make test-oldest`: each is in its range, older than the pinned one, and none is left out."""
    command = [sys.executable, "tests/tools/oldest.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found = requirements(printed.stdout.decode().split())
    assert set(found) == set(requirements_txt())
    for name, one in found.items():
        version = str(one.specifier).removeprefix("==").removesuffix(".*")
        assert DECLARED[name].specifier.contains(version)
        assert Version(version) <= Version(requirements_txt()[name])
    with pytest.raises(ValueError, match=r"numpy<3.*says no oldest version"):
        oldest.oldest({"dependencies": ["numpy<3"]})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in "kit configs pyproject.toml README.md LICENSE NOTICE".split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    command = [*PIP, "wheel", "--no-deps", "-w", folder, source]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8")
    if ended.returncode and "setuptools" in ended.stderr:
        pytest.skip("setuptools 77 could not be downloaded")
    assert not ended.returncode, ended.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.long
def test_it_holds_what_it_needs_and_names_its_licence(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = file.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert {f"kit/{path.relative_to(ROOT).as_posix()}" for path in presets()} <= names
    assert "License-Expression: MIT" in metadata
    assert any(name.endswith("licenses/NOTICE") for name in names)


@pytest.mark.long
def test_the_command_runs_away_from_the_repository(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    packages = next((environment / "lib").glob("python*/site-packages"))
    installed = [*PIP, "install", "--no-deps", "--no-index", "--target", packages, wheel]
    subprocess.run(installed, check=True)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # its dependencies
    work = tmp_path / "elsewhere"
    work.mkdir()
    variables = {k: v for k, v in os.environ.items() if k not in ("KIT_RUNS", "PYTHONPATH")}
    there = {"cwd": work, "env": variables, "capture_output": True, "timeout": 300}
    command = [python, "-m", "kit", "setup", "--run", "mine", "--preset", "tiny"]
    ended = subprocess.run(command, **there)
    assert not ended.returncode, ended.stderr.decode()
    assert (work / "runs" / "mine" / "report.json").is_file()
    module, function = PROJECT["scripts"]["voicekit"].split(":")
    shown = f"import sys; from {module} import {function}; sys.argv[1:] = ['--help']; {function}()"
    ended = subprocess.run([python, "-c", shown], **there)
    assert b"prepare" in ended.stdout
    speaks = f"{module}.{function}(['speak', '--voice', '.', '--text', '.'])"
    without = f"import sys, {module}; sys.modules['yaml'] = None; sys.exit({speaks})"
    ended = subprocess.run([python, "-c", without], **there)
    assert ended.returncode == 2 and b"`yaml`" in ended.stderr and b"pip" in ended.stderr


def test_the_supported_pythons_are_the_same_everywhere():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    python = next(e for e in yaml.safe_load(text)["dependencies"] if e.startswith("python="))
    assert python.removeprefix("python=") in {"3.11", "3.12", "3.13"}  # as the Makefile asks
    assert PROJECT["requires-python"] == ">=3.11"
    assert WHOLE["tool"]["ruff"]["target-version"] == "py311"
    assert "(3, 11) <= v <= (3, 13)" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text(encoding="utf-8")
