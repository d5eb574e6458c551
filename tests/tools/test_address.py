"""The repository's address is one value; badges and clone cells repeat it, and move together."""

import json
import shutil

import address
import pytest
from address import ROOT

NAME = address.address().removeprefix("https://github.com/")


@pytest.mark.parametrize("path", address.repeating(), ids=lambda path: path.name)
def test_every_place_repeats_the_one_value(path):
    places = set(address.repeated(path.read_text(encoding="utf-8")))
    assert places == {NAME}, "run: make address URL=..."


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_has_a_badge_of_its_own_and_a_clone_cell(path):
    text = path.read_text(encoding="utf-8")
    assert f"colab.research.google.com/github/{NAME}/blob/main/notebooks/{path.name}" in text
    assert f"git clone -q https://github.com/{NAME} voicekit" in text


def test_one_command_moves_all_of_them(tmp_path):
    for path in [ROOT / "pyproject.toml", *address.repeating()]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    with open(tmp_path / "README.md", "a", encoding="utf-8") as file:
        file.write("Ideas from https://github.com/somebody/else\n")
    changed = address.rewrite("https://github.com/a-student/my.voices.git", tmp_path)
    assert len(changed) == 1 + len(address.repeating(tmp_path))
    assert address.address(tmp_path) == "https://github.com/a-student/my.voices"
    for path in address.repeating(tmp_path):
        text = path.read_text(encoding="utf-8")
        assert set(address.repeated(text)) == {"a-student/my.voices"} and NAME not in text
        if path.suffix == ".ipynb":
            json.loads(text)
    assert "github.com/somebody/else" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert address.rewrite("https://github.com/a-student/my.voices", tmp_path) == []


@pytest.mark.parametrize("url", ["", "voicekit", "https://gitlab.com/a/b", "https://github.com/a"])
def test_what_colab_cannot_open_is_refused(url, tmp_path):
    with pytest.raises(SystemExit, match=r"https://github\.com/OWNER/NAME"):
        address.rewrite(url, tmp_path)
