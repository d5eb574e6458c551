"""What is rejected and what is only a warning: each rule on measures of its own."""

import dataclasses
import math

import numpy as np
import pytest
from clips import TEXT

from kit.audio.clip import KEPT_SILENCE_S, ClipMeasure
from kit.dataset.checks import judge_rows, script, usual_paces
from kit.dataset.data_report import FIXES
from kit.dataset.manifest import Utterance
from kit.settings import ManifestConfig

RULES = ManifestConfig()
LEVELS = {"peak": 0.5, "mono_peak": 0.5, "rms_db": -20.0, "dc": 0.0, "clipped": 0.0, "snr_db": 40.0}
EDGES = {"leading_s": 0.1, "trailing_s": 0.1, "silence_s": 0.2, "gap_s": 0.0}
SOUND = ClipMeasure(rate_hz=22050, channels=1, subtype="PCM_16", seconds=1.0, **LEVELS, **EDGES)


def row(number: int, text: str = TEXT, **over) -> Utterance:
    plain = {"id": f"c{number}", "audio": f"/w/{number}.wav", "speaker": "v", "split": "train"}
    return Utterance(**plain | {"text": text, "line": number, "file": "metadata.csv"} | over)


def judged(rows, measures=(), config=RULES):
    """`judge`, with a sound measure of its own for every row that `measures` (by place) lacks."""
    own = {i: dataclasses.replace(SOUND, digest=f"{i:016x}") for i in range(len(rows))}
    given = own | dict(measures)
    return judge_rows(rows, {r.audio: given[i] for i, r in enumerate(rows)}, config)


def many(count: int, **over) -> list[Utterance]:
    return [row(i, **over) for i in range(count)]


def changed(**over) -> ClipMeasure:
    return dataclasses.replace(SOUND, digest="own", **over)


# Others are made of real bytes in test_manifest.py.
ALONE = {
    "too long": ClipMeasure(rate_hz=8000, channels=1, subtype="PCM_16", seconds=3600),
    "silent": changed(mono_peak=0.001),  # whatever its channels had before they were mixed
    "two channels": changed(differs=True),
    "sample rate": changed(rate_hz=2000),
    "unreadable": "is truncated: 5 samples are there",
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_row_is_refused_for_itself(kind):
    kept, (refusal,), _ = judged(many(1), {0: ALONE[kind]})
    assert not kept and refusal.kind == kind and refusal.cure == FIXES[kind]
    assert (refusal.file, refusal.line, refusal.audio) == ("metadata.csv", 0, "/w/0.wav")
    assert refusal.seconds == getattr(ALONE[kind], "seconds", 0)


def test_a_row_with_several_faults_names_all_of_them():
    _, (refusal,), _ = judged([row(0, "ሰላም " * 60)], {0: changed(seconds=12.0)})
    assert refusal.kind == "long text", "and it is not cut"
    _, (refusal,), _ = judged(many(1), {0: changed(peak=1.0, clipped=0.3, dc=0.5)})
    assert refusal.kind == "clipped" and "30.0%" in refusal.reason and "+0.50" in refusal.reason
    for text, is_short in ((TEXT, True), ("ሰላም " * 3000, False)):
        _, (refusal,), _ = judged([row(0, text)], {0: changed(seconds=3600.0)})
        assert refusal.kind == "too long"
        assert (f"its {len(text)} characters" in refusal.reason) == is_short


def test_a_pace_far_from_everyone_elses_is_refused():
    rng = np.random.default_rng(0)
    texts = ["ሰላም " * int(n) for n in rng.integers(3, 30, 200)]
    rows = [row(i, text.strip()) for i, text in enumerate(texts)]
    usual = [changed(seconds=len(r.text) / 12 * rng.uniform(0.8, 1.25)) for r in rows]
    measures = {i: dataclasses.replace(m, digest=str(i)) for i, m in enumerate(usual)}
    assert not judged(rows, measures)[1]
    measures[7] = dataclasses.replace(measures[7], seconds=3.5 * measures[7].seconds)
    _, (refusal,), _ = judged(rows, measures)
    assert (refusal.id, refusal.kind) == ("c7", "pace") and "far from the usual" in refusal.reason
    assert not judged(rows, measures, ManifestConfig(pace_deviations=math.inf))[1]
    # A very even dataset does not refuse small differences.
    low, high = usual_paces([10.0] * 1000, 6)
    assert low < 5 and high > 20 and usual_paces([1, 50] * 5, 6) == (0, math.inf)


def test_the_same_recording_twice():
    same = {0: changed(), 1: changed()}
    kept, (refusal,), _ = judged(many(3), same)
    assert [r.id for r in kept] == ["c0", "c2"] and refusal.id == "c1"
    assert refusal.reason == "the same recording as c0 (metadata.csv, line 0)"
    # Under two texts it is refused both times.
    kept, refused, _ = judged([row(0), row(1, "ሌላ ነገር ነው"), row(2)], same)
    assert [r.id for r in kept] == ["c2"] and {f.id for f in refused} == {"c0", "c1"}
    assert "c0 (metadata.csv, line 0), under another text" in refused[1].reason


def test_a_sample_rate_that_few_have_is_odd_and_one_that_many_have_is_not():
    rates = {5: changed(rate_hz=44100)}
    _, (refusal,), _ = judged(many(200), rates)
    assert (refusal.id, refusal.kind) == ("c5", "sample rate") and "22050" in refusal.reason
    assert not judged(many(200), rates, ManifestConfig(odd_share=0))[1]
    assert not judged(many(20), rates)[1]


def test_letters_of_another_script_are_named():
    kept, (refusal,), _ = judged([*many(100), row(100, "ሰላም ok ለሁሉ привет")])
    assert len(kept) == 100 and refusal.kind == "alphabet"
    assert refusal.reason == "letters of another script (Cyrillic, Latin): k o в е и п р т"
    # Scripts that belong together are not odd.
    assert not judged([row(i, "東京へ行きましたスーパー") for i in range(50)])[1]
    assert script("ሰ") == "ETHIOPIC" and script("ʼ") == script("5") == script("፣") == ""


def test_repeated_texts_are_reported_once():
    kept, refused, (warning,) = judged([*many(5), row(5, speaker="other")])
    assert len(kept) == 6 and not refused
    assert (warning.id, warning.kind) == ("c0", "repeated text") and "5 times" in warning.reason


def test_warnings_keep_the_row():
    rows = [row(0, "ሀ ሁ"), row(1, "ለ ሉ"), row(2), row(3, split="held_out", speaker="w")]
    clipped = dataclasses.replace(SOUND, clipped=0.005)
    inverted = dataclasses.replace(SOUND, channels=2, cancels=True)
    silent = changed(seconds=2.5, trailing_s=1.5)
    kept, refused, warned = judged(rows, {0: silent, 1: clipped, 2: inverted})
    assert len(kept) == 4 and not refused
    kinds = {"c0": "edge silence", "c1": "clipped", "c2": "opposite phase"}
    assert {w.id: w.kind for w in warned} == kinds | {"c3": "also in training"}
    assert "1.5 s after" in warned[0].reason
    assert kept[0].silence_s == pytest.approx(1.5 - KEPT_SILENCE_S)
    assert kept[0].speech_s == pytest.approx(kept[0].seconds - kept[0].silence_s)
    assert not kept[1].silence_s


def test_silence_around_the_speech_is_no_slow_pace_and_silence_within_is_a_warning():
    edges = changed(seconds=4.6, leading_s=1.6, trailing_s=1.6, silence_s=3.2)
    for measure, kind in ((edges, "edge silence"), (changed(seconds=2.5, gap_s=1.2), "gap")):
        kept, refused, (warning,) = judged([row(0, "ሰላም ለሁሉም ሰው")], {0: measure})
        assert kept and not refused and warning.kind == kind
    _, (refusal,), _ = judged([row(0, "ሰላም ለሁሉም ሰው")], {0: changed(seconds=4.6 + 9)})
    assert refusal.kind == "pace"
