"""The lint of words: names, comments, strings and phrases across lines are found, keys are not."""

import json

import pytest
from dialect import hits

PYTHON = """
def whatTold(x):  # it goes
    # on from there
    return f"what lies {x}", ("knows "
        "nothing")
for word in words: report["heard"] = begun_step
"""


MARKDOWN = "Its\nledger, mend it.\n\n## For contributors: `told`"
NOTEBOOK = json.dumps({"cells": [{"cell_type": "code", "source": ["ears = 1"]}]})
FOUND = [
    ("a.py", PYTHON, [(2, "Told"), (2, "goes on from"), (4, "lies"), (4, "knows nothing")]),
    ("b.md", MARKDOWN, [(2, "ledger"), (2, "mend")]),
    ("c.yaml", "told: 1  # begun\n", [(1, "begun")]),
    ("d.ipynb", NOTEBOOK, [(1, "ears")]),
]


@pytest.mark.parametrize(("name", "text", "found"), FOUND)
def test_words_are_found_by_line(tmp_path, monkeypatch, name, text, found):
    monkeypatch.setattr("dialect.ROOT", tmp_path)
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert sorted((line, word) for line, word, _ in hits(path)) == sorted(found)
