"""Recordings that nobody made for the kit: too long ones, and some the check cannot judge."""

from pathlib import Path

import numpy as np
import pytest
from helpers import EAR, RATE, dataset, few_words, speech, unchecked

from kit.base.errors import DatasetError
from kit.batches.code_cache import CodeCache
from kit.recipes.evaluate import Evaluation
from kit.recipes.prepare import Preparation
from kit.recipes.speak import Speaking
from kit.recipes.start import start
from kit.recipes.train import Training


@pytest.fixture(scope="module")
def recordings() -> tuple[list[str], list[np.ndarray]]:
    return few_words()


def folder_of(recordings, into: Path, joined: int) -> Path:
    """An LJSpeech folder in which the last `joined` sentences are one recording, with pauses."""
    texts, waves = recordings
    clips = {f"c{i:02d}": wave for i, wave in enumerate(waves[:-joined])}
    table = [f"{name}|{text}" for name, text in zip(clips, texts)]
    pause = np.zeros(int(0.4 * RATE), dtype=np.float32)
    clips["tale"] = np.concatenate([part for wave in waves[-joined:] for part in (wave, pause)])
    table.append("tale|" + " ".join(f"{text}።" for text in texts[-joined:]))
    return dataset(into, "\n".join(table) + "\n", clips)


def test_what_is_too_long_is_cut_at_its_pauses_and_counts_as_lost_only_then(tmp_path, recordings):
    folder = folder_of(recordings, tmp_path / "data", joined=16)
    prep = Preparation(start("long", settings={"recognizer": EAR}), str(folder))
    prep.check()
    assert prep.checked.lost_percent > prep.rules.max_rejected_percent
    assert "Too long for a row: 1 of the recordings" in str(prep.require_usable())
    for step in (prep.train_tokenizer, prep.train_codec, prep.train_recognizer, prep.align):
        step()
    assert "clips from 1 recording" in str(prep.cut_long())
    prep.fit_positions()
    prep.encode()
    cut = [row for row in prep.rows if Path(row.audio).is_relative_to(prep.active_run.folder)]
    assert len(cut) >= 2 and max(row.seconds for row in cut) <= prep.rules.max_clip_s
    assert {row.id for row in cut} <= {row["id"] for row in CodeCache(prep.active_run.index()).rows}
    said = " ".join(row.text for row in cut)
    assert len(said) > 0.8 * len(" ".join(recordings[0][-16:]))


def test_where_all_is_too_long_the_data_report_says_so(tmp_path):
    clips = {"a": speech(30.0), "b": speech(40.0)}
    folder = dataset(tmp_path / "data", "a|ሰላም ለሁሉም\nb|ዛሬ ጥሩ ቀን ነው\n", clips)
    prep = Preparation(start("all_long"), str(folder), max_rejected_percent=100.0)
    prep.check()
    with pytest.raises(DatasetError, match=r"No utterance can be trained on(.|\n)*40\.0 s, longer"):
        prep.require_usable()


def test_a_recogniser_that_cannot_judge_is_no_dead_end(tmp_path, recordings):
    """From 01 to 04: what cannot be checked is said and left out, in the record, too."""
    folder = folder_of(recordings, tmp_path / "data", joined=10)
    settings = {
        "align": {"hopeless": 0.0},
        "train": {"max_steps": 4, "eval_steps": 4, "gate_every": 4},
        "evaluate": {"sentences": 2},
    }
    run = start("unsure", settings=settings)
    prep = Preparation(run, str(folder), max_rejected_percent=60.0)
    reported = {step.__name__: str(step()) for step in (prep.check, prep.require_usable)}
    for step in (prep.train_tokenizer, prep.train_codec, prep.train_recognizer, prep.align):
        reported[step.__name__] = str(step())
    assert reported["align"].startswith("not judged")
    assert "Nothing is cut" in str(prep.cut_long())
    for step in (prep.fit_positions, prep.encode, prep.measure_lengths, prep.make_batches):
        step()
    assert run.report()["data"]["alignment"].startswith("not judged")
    assert not any(finding.kind == "mismatch" for finding in prep.data_report.refused)

    for result in unchecked(Training(start("unsure"))).run():
        assert str(result)
    verdicts = [str(result) for result in Evaluation(start("unsure")).run()]
    assert any("cannot tell whether a voice is below" in line for line in verdicts)
    said = Speaking(start("unsure")).say()
    assert len(said.sounds[0].wave) > 1000
