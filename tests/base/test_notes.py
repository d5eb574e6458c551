"""What a newcomer reads of a warning: the kit's own without code, others as Python shows them."""

import subprocess
import sys
import warnings

import pytest

from kit.base.errors import Note, show_plain_notes

LEARNT = """
import warnings
from kit.base.errors import show_plain_notes
from kit.text.normalize import normalize
show_plain_notes()
normalize("Привет", "ru")
warnings.warn("not the kit's")
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    show_plain_notes()


def test_a_note_is_its_sentence():
    shown = warnings.formatwarning("A is damaged.", Note, "a.py", 7)
    assert shown == "Note: A is damaged.\n"


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning])
def test_any_other_warning_says_where_it_comes_from(kind):
    shown = warnings.formatwarning("old", kind, "a.py", 7)
    assert shown.startswith(f"a.py:7: {kind.__name__}: old")


def test_so_it_is_on_a_terminal():
    shown = subprocess.run(
        [sys.executable, "-c", LEARNT], capture_output=True, text=True, check=True
    ).stderr
    assert shown.startswith("Note: There is no kit/text/languages/ru.py: text in `ru` keeps")
    assert "normalize(" not in shown
    assert "UserWarning: not the kit's" in shown
