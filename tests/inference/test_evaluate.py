"""Figures of a voice, counted by hand on real recordings."""

import copy
import dataclasses
import math

import pytest
import soundfile
import torch
from helpers import (
    RATE,
    manifest,
    opinionated_voice,
    real_config,
    real_voice,
    tiny_model,
    waves,
)

from kit.audio.recognizer import Recognizer, RecognizerConfig, alphabet_of, cer
from kit.inference.evaluate import Scores, gate_evaluator, save_samples, score, transcribe
from kit.inference.generate import generate
from kit.inference.sampling import GenerateConfig
from kit.inference.verdicts import gate_checks, problems_of, suggest_fix
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.recipes.evaluate import LabeledClip, SpeakerLoss, loss_by_speaker, noise_floor
from kit.recipes.rehearsal import BaseSample, code_log_probs, measure_divergence
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
    monkeypatch.setattr("kit.recipes.evaluate.transcribe", lambda *a: next(transcripts))
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


# --- whether a voice follows the speaker reference ------------------------------------------------


@pytest.fixture(scope="module")
def two_speakers(tmp_path_factory) -> Voice:
    return opinionated_voice(tmp_path_factory.mktemp("voice"))


def recordings(voice: Voice, count: int = 20) -> list[LabeledClip]:
    chance = torch.Generator().manual_seed(0)
    texts = ["ሰላም", "ሰላም ሰላም"]
    return [
        LabeledClip(
            text=texts[i % 2],
            speaker=voice.speakers[i % 2],
            wave=0.1 * torch.randn(4000 + 100 * i, generator=chance),
        )
        for i in range(count)
    ]


def test_it_is_the_models_own_loss_whatever_is_read_together(two_speakers):
    rows = recordings(two_speakers)
    together = loss_by_speaker(two_speakers, rows)
    assert list(together) == two_speakers.speakers == ["alma", "brook"]
    for speaker in two_speakers.speakers:
        assert together[speaker].own != together[speaker].other
        alone = [
            loss_by_speaker(two_speakers, [row])[speaker] for row in rows if row.speaker == speaker
        ]
        assert min(found.own for found in alone) < together[speaker].own
        assert together[speaker].own < max(found.own for found in alone)


def test_a_voice_that_ignores_the_reference_is_reported(two_speakers):
    deaf = copy.copy(two_speakers)
    deaf.model = copy.deepcopy(two_speakers.model)
    deaf.model.conditioner.latents.data.fill_(1e9)  # the reference has no effect beside them
    for found in loss_by_speaker(deaf, recordings(two_speakers)).values():
        assert found.own == pytest.approx(found.other, rel=1e-6) and not found.uses_reference


@pytest.mark.parametrize(
    ("own", "other", "used"), [(2.0, 2.1, True), (2.0, 2.001, False), (2.1, 2.0, False)]
)
def test_a_reference_of_ones_own_must_gain_something(own, other, used):
    assert SpeakerLoss(own=own, other=other).uses_reference == used


def test_one_speaker_is_nobody_elses(two_speakers):
    alone = copy.copy(two_speakers)
    alone.references = {"alma": two_speakers.references["alma"]}
    assert loss_by_speaker(alone, recordings(two_speakers)) == {}


def test_what_is_too_long_for_the_model_is_left_out(two_speakers):
    rows = recordings(two_speakers, 2)
    long = LabeledClip(text="ሰላም", speaker="alma", wave=torch.randn(22050 * 60))
    stranger = LabeledClip(text="ሰላም", speaker="nobody", wave=rows[0].wave)
    assert loss_by_speaker(two_speakers, [*rows, long, stranger]) == loss_by_speaker(
        two_speakers, rows
    )
    assert loss_by_speaker(two_speakers, [long]) == {}


# --- what a model forgot of the one it began as ---------------------------------------------------


@pytest.fixture(scope="module")
def base():
    model = tiny_model()
    with torch.no_grad():
        model.code_head.weight *= 20  # or every code is as likely as every other
    return model


@pytest.fixture(scope="module")
def readings(base) -> list[BaseSample]:
    torch.manual_seed(0)
    mels = torch.randn(2, base.config.n_mels, 30)
    texts = [[3, 4, 5], [6, 7, 8, 9]]
    config = GenerateConfig(temperature=1.0, top_k=0, top_p=1.0, retries=0)
    said = generate(base, texts, mels, config)
    return [
        BaseSample(base_ids=ids, tuned_ids=ids, spoken=row, mel=mel)
        for ids, row, mel in zip(texts, said, mels)
    ]


def moved(model, by: float):
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn_like(parameter)
    return other


def test_a_model_compared_with_itself_has_forgotten_nothing(base, readings):
    found = measure_divergence(base, copy.deepcopy(base), readings)
    assert found.forgotten == pytest.approx(0, abs=1e-6)
    assert 0 < found.base < torch.tensor(float(base.config.code_vocab)).log()


def test_the_further_it_moved_the_more_is_forgotten(base, readings):
    little, much = (measure_divergence(base, moved(base, by), readings) for by in (0.002, 0.02))
    assert 0 < little.forgotten < much.forgotten
    assert little.base == much.base


def test_it_is_the_divergence_of_what_they_expect_at_every_code(base, readings):
    other = moved(base, 0.01)
    wanted = []
    for reading in readings:
        ours = code_log_probs(base, reading.base_ids, reading)
        theirs = code_log_probs(other, reading.tuned_ids, reading)
        places = len(reading.spoken.codes) + reading.spoken.stopped
        assert ours.shape == (places, base.config.code_vocab)
        wanted.append(torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none"))
    each = torch.cat(wanted).sum(-1)
    assert measure_divergence(base, other, readings).forgotten == pytest.approx(
        float(each.mean()), rel=1e-4
    )


def test_what_is_expected_is_what_the_codes_were_drawn_from(base, readings):
    """Its mean over the codes that were said is what the decoder noted as it said them."""
    for reading in readings:
        expected = code_log_probs(base, reading.base_ids, reading).clone()
        expected[:, base.config.start_code] = -torch.inf  # which is never said
        expected = expected.log_softmax(-1)
        codes = reading.spoken.codes
        said = torch.cat((codes, torch.tensor([base.config.stop_code])))[: len(expected)]
        likely = expected[torch.arange(len(said)), said].mean()
        assert float(likely) == pytest.approx(reading.spoken.log_prob, abs=1e-3)


def test_the_end_counts_where_it_was_found(base, readings):
    spoken = readings[0].spoken
    for stopped in (False, True):
        reading = dataclasses.replace(
            readings[0], spoken=dataclasses.replace(spoken, stopped=stopped)
        )
        assert len(code_log_probs(base, reading.base_ids, reading)) == len(spoken.codes) + stopped
