"""What training starts from, by hours, machine, licence and click; the answer is kept."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import CPU, dataset, speech
from made_runs import bare_run

from kit.base.errors import DatasetError, KitError
from kit.base.hardware import Hardware
from kit.recipes import your_voice
from kit.recipes.run_parts import START_FROM
from kit.recipes.start import start
from kit.recipes.your_voice import SCRATCH, YourVoice

RELEASE = "XTTS-v2"
T4 = Hardware(
    device="cuda", name="T4", cores=2, ram_bytes=2**34, memory_bytes=15 * 2**30, capability=(7, 5)
)
SMALL = dataclasses.replace(T4, name="GTX 1060", memory_bytes=6 * 2**30)


@pytest.fixture
def voice_of(runs, monkeypatch):
    """Make a voice whose recordings are already checked: so many hours, of a person or not."""

    def make(hours=3.0, hw=T4, own=True, **options) -> YourVoice:
        checked = SimpleNamespace(kept_s=3600 * hours, too_long=[])
        source = SimpleNamespace(data="clips" if own else "")
        preparation = SimpleNamespace(checked=checked, source=source)
        monkeypatch.setattr(your_voice, "Preparation", lambda *_, **__: preparation)
        return YourVoice(bare_run(runs / "mine", hw), **options)

    (runs / "mine").mkdir()
    return make


@pytest.fixture
def clicked(monkeypatch):
    """A person is there who clicks the answer that is set here; "": the default of the question."""
    answer = SimpleNamespace(name=RELEASE, defaults=[])

    def ask_question(_text, answers, default):
        answer.defaults.append(default)
        assert list(answers) == [RELEASE, SCRATCH]
        return answer.name or default

    monkeypatch.setattr(your_voice, "is_watched", lambda: True)
    monkeypatch.setattr(your_voice, "ask_question", ask_question)
    return answer


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"own": False}, "built-in corpus"),
        ({"hw": CPU}, "GPU with 8 GB"),
        ({"hw": SMALL}, "GTX 1060"),
    ],
)
def test_where_there_is_no_choice_nothing_is_asked(voice_of, clicked, facts, reason):
    line = voice_of(**facts).choose().line
    assert "from scratch" in line and reason in line
    assert clicked.defaults == []


@pytest.mark.parametrize(
    ("hours", "licence", "default"),
    [(4.9, "", ""), (5.0, "", SCRATCH), (4.9, "CPML", RELEASE), (5.0, "CPML", SCRATCH)],
)
def test_a_licence_is_never_the_default_and_few_hours_wait_for_a_click(
    voice_of, clicked, hours, licence, default
):
    voice_of(hours, accept_license=licence).choose()
    assert clicked.defaults == [default]


@pytest.mark.parametrize(
    ("hours", "licence", "expected"),
    [(3.0, "", SCRATCH), (9.0, "", SCRATCH), (3.0, "CPML", RELEASE)],
)
def test_where_nobody_watches_no_licence_is_accepted(voice_of, hours, licence, expected):
    voice = voice_of(hours, accept_license=licence)
    assert f"from {expected}, as" in voice.choose().line
    assert voice.active_run.report()["way"]["from"] == expected


def test_the_answer_and_its_licence_are_kept_and_not_asked_for_again(voice_of, clicked):
    voice_of().choose()
    clicked.name = SCRATCH
    again = voice_of()
    assert f"from {RELEASE}" in again.choose().line and len(clicked.defaults) == 1
    assert again.active_run.report()["way"] == {"from": RELEASE, "licence": "CPML"}
    assert "from scratch" in voice_of(way=SCRATCH).choose().line, "WAY changes it"
    assert "from scratch" in voice_of().choose().line and len(clicked.defaults) == 1


def test_a_run_that_has_started_resumes_as_it_did(voice_of, clicked):
    voice = voice_of()
    voice.active_run.path("codec.safetensors").touch()
    assert "from scratch" in voice.choose().line
    (voice.active_run.folder / "report.json").unlink()
    (voice.active_run.folder / START_FROM).write_text("0123 /voices/mother")
    assert "from /voices/mother" in voice.choose().line
    with pytest.raises(KitError, match=r"mine.*mother.*mine-2"):
        voice_of(way=SCRATCH).choose()
    assert clicked.defaults == []


def test_the_release_at_the_top_needs_its_licence_there_too(voice_of, clicked):
    with pytest.raises(KitError, match="CPML"):
        voice_of(way=RELEASE).choose()
    assert RELEASE in voice_of(way=RELEASE, accept_license="CPML").choose().line
    assert clicked.defaults == []


@pytest.mark.parametrize(
    ("hours", "place", "shown"),
    [(0.2, 1, "12.0 minutes"), (0.9, 2, "54.0 minutes"), (3, 3, "3.00 hours"), (20, 4, "20.00")],
)
def test_the_table_has_a_row_for_these_hours_in_its_order(voice_of, hours, place, shown):
    grid = voice_of(hours).expect().grid
    assert [row[0].startswith("→") for row in grid].index(True) == place
    assert shown in grid[place][0]


def test_before_the_end_of_the_training_nothing_speaks(voice_of):
    voice = voice_of()
    for step in (voice.verdict, voice.speaking):
        with pytest.raises(KitError, match="not ended"):
            step()


def test_the_report_says_in_five_lines_what_is_kept_and_why_not(runs):
    sentences = ("the dog ran home today", "we are going to the sea", "it was the best of times")
    clips = {f"c{i}": speech(2.0 + i / 10) for i in range(3)} | {"c3": np.zeros(44_100)}
    table = "".join(f"c{i}|{text}\n" for i, text in enumerate((*sentences, "nobody is here")))
    folder = dataset(runs / "mother", table, clips)
    voice = YourVoice(start("mother"), str(folder), "en")
    result = voice.report()
    assert len(result.line.splitlines()) == 5
    assert "in 3 clips" in result.line and "1 silent" in result.line and "en" in result.line
    assert len(result.pictures) == len(result.sounds) == 1 and result.sounds[0].caption in sentences
    with pytest.raises(DatasetError, match="MAX_REJECTED_PERCENT"):
        voice.require_usable()
