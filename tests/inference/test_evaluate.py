"""Figures of a voice, counted by hand on real recordings."""

import dataclasses
import math

import pytest
import soundfile
import torch
from helpers import (
    RATE,
    manifest,
    real_config,
    real_voice,
    waves,
)

from kit.audio.ctc_recognizer import Recognizer, RecognizerConfig
from kit.audio.recognizer import alphabet_of, cer
from kit.inference.evaluate import (
    Scores,
    gate_checks,
    gate_evaluator,
    noise_floor,
    problems_of,
    save_samples,
    score,
    suggest_fix,
    transcribe,
)
from kit.inference.sampling import GenerateConfig
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.text.normalize import letters

GOOD = Scores(cer=0.05, eos_rate=1.0, duration_ratio=1.0, sentences=9)


@pytest.fixture(scope="module")
def recognizer() -> Recognizer:
    torch.manual_seed(0)
    alphabet = alphabet_of([r.text for r in manifest()])
    return Recognizer(RecognizerConfig(width=32, blocks=1), alphabet).eval()


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


def test_scores_are_counted_by_hand(voice, recognizer):
    rows = [r for r in manifest() if r.split == "train"][:5]
    scores, speech = score(voice, rows, recognizer, GenerateConfig(temperature=0, exact_codes=12))
    assert [s.text for s in speech] == [r.text for r in rows] and scores.sentences == 5
    assert scores.eos_rate == sum(s.stopped for s in speech) / 5
    seconds = sum(len(s.wave) for s in speech) / RATE
    assert scores.duration_ratio == pytest.approx(seconds / sum(r.seconds for r in rows))
    assert len(scores.transcripts) == 5 and scores.cer == cer(
        list(scores.transcripts), [r.text for r in rows]
    )
    long = [len(s.wave) / RATE > 2 * r.seconds for s, r in zip(speech, rows)]
    assert scores.runaway_rate == sum(long) / 5
    assert set(scores.figures()) == {f.name for f in dataclasses.fields(Scores)} - {"transcripts"}


def test_a_broken_model_fails_the_gate(voice, recognizer):
    rows = [r for r in manifest() if r.split == "train"][:4]
    broken = SpeechGPT(real_config())
    broken.code_head.bias.data[broken.config.stop_code] = -100.0  # never finds its end
    figures = gate_evaluator(voice, rows, recognizer, GenerateConfig(max_codes_per_text_id=30))(
        broken
    )
    assert figures["eos_rate"] == 0 and figures["runaway_rate"] > 0
    reasons = "; ".join(problems_of(gate_checks(Scores(**figures), 0.01, 0.12)))
    assert all(word in reasons for word in ("CER", "never ended", "twice as long"))


def test_a_recogniser_without_mistakes_has_no_error(voice, recognizer, monkeypatch):
    rows = manifest()[:3]
    transcripts = iter([[letters(r.text) for r in rows], [""] * 3])
    monkeypatch.setattr("kit.inference.evaluate.transcribe", lambda *a: next(transcripts))
    found = noise_floor(rows, recognizer, voice.codec)
    assert (found.cer, found.cer_codec) == (0.0, 1.0)


def test_an_empty_waveform_is_silence(recognizer):
    clips = [waves()[0], torch.zeros(0), torch.zeros(1024)]
    transcripts = transcribe(recognizer, clips, RATE)
    assert len(transcripts) == 3 and transcripts[1] == transcripts[2]


def test_transcripts_keep_their_order_in_batches(recognizer):
    clips = waves()[:4] * 2
    transcripts = transcribe(recognizer, clips, RATE, batch=4)
    assert transcripts[:4] == transcripts[4:] and len(set(transcripts[:4])) == 4


def test_samples_are_written_where_the_report_looks(tmp_path):
    named = {"ema": (["ሰላም", "ለሁሉ", "ሰው", "ቤት"], [w[:2000] for w in waves()[:4]])}
    rows = save_samples(named, "held_out", RATE, tmp_path, most=3)
    assert [r["text"] for r in rows] == ["ሰላም", "ለሁሉ", "ሰው"]
    for row in rows:
        assert (
            row["split"] == "held_out" and soundfile.info(tmp_path / row["wav"]).samplerate == RATE
        )


def test_a_sound_voice_passes():
    assert problems_of(gate_checks(GOOD, 0.01, 0.12)) == []


BAD = [({"cer": 0.2}, "CER 20.0% is above 12.0%"), ({"eos_rate": 0.98}, "2.0% of the sentences")]
BAD += [({"runaway_rate": 0.1}, "10.0% of the sentences took over twice as long")]
BAD += [({"duration_ratio": r}, "times the recordings") for r in (0.5, 1.3, math.nan)]


@pytest.mark.parametrize(("over", "reason"), BAD)
def test_each_fault_is_named(over, reason):
    (found,) = problems_of(gate_checks(dataclasses.replace(GOOD, **over), 0.01, 0.12))
    assert reason in found


def test_a_memorising_voice_is_not_advised_to_train_longer():
    fix = suggest_fix(2.24, 6.93)  # a person's hour and a half, after 640 steps from scratch
    assert "BASE_MODEL" in fix and "2.24" in fix and "6.93" in fix
    (found,) = problems_of(gate_checks(dataclasses.replace(GOOD, cer=0.8), 0.01, 0.12, fix))
    assert found.endswith(fix)


@pytest.mark.parametrize("losses", [(7.1, 7.0), (1.2, 1.33), (None, None), (2.0, None)])
def test_who_still_learns_is(losses):
    assert suggest_fix(*losses) == "train longer"
