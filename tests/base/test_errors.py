"""A newcomer reads a warning of the kit without code, others as Python shows them."""

import warnings

from kit.base.errors import Note, show_plain_notes


def test_a_note_is_its_sentence_and_any_other_warning_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    show_plain_notes()
    assert warnings.formatwarning("Take care.", Note, "a.py", 8) == "Note: Take care.\n"
    for kind in (UserWarning, DeprecationWarning):
        assert f"a.py:8: {kind.__name__}: no" in warnings.formatwarning("no", kind, "a.py", 8)
