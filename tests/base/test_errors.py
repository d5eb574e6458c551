"""A newcomer reads a warning of the kit without code, others as Python shows them."""

import subprocess
import sys

WARNINGS = """
import warnings
from kit.base.errors import show_plain_notes
from kit.text.normalize import normalize
show_plain_notes()
normalize("Привіт", "uk")
for kind in (UserWarning, DeprecationWarning):
    warnings.warn("not the kit's", kind)
"""


def test_a_note_is_its_sentence_and_any_other_warning_says_where_it_comes_from():
    command = [sys.executable, "-c", WARNINGS]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert shown.startswith("Note: There is no kit/text/languages/uk.py: text in `uk` keeps")
    assert "normalize(" not in shown
    for kind in ("UserWarning", "DeprecationWarning"):
        assert f"<string>:8: {kind}: not the kit's" in shown
