"""Figures of a voice, counted by hand on real recordings, and each misread word."""

import copy
import dataclasses

import pytest
import soundfile
import torch
from helpers import RATE, manifest, opinionated_voice, real_config, real_voice, tiny_model, waves

from kit.audio.recognizer import Recognizer, alphabet_of, cer
from kit.extras.finetune.forgetting import BaseSample, code_log_probs, cross_entropies
from kit.inference import evaluate
from kit.inference.evaluate import KINDS, Scores, align_words
from kit.inference.generate import generate
from kit.inference.voice import Voice
from kit.model.gpt import SpeechGPT
from kit.recipes.evaluation_data import loss_by_speaker
from kit.settings import GenerateConfig, RecognizerConfig
from kit.tuning.checks import gate_checks


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
    config = GenerateConfig(temperature=0, exact_codes=12)
    scores, speech = evaluate.score(voice, rows, recognizer, config)
    assert [s.text for s in speech] == [r.text for r in rows] and scores.sentences == 5
    assert scores.eos_rate == sum(s.stopped for s in speech) / 5
    seconds = sum(len(s.wave) for s in speech) / RATE
    assert scores.duration_ratio == pytest.approx(seconds / sum(r.seconds for r in rows))
    assert len(scores.transcripts) == 5
    assert scores.cer == cer(list(scores.transcripts), [r.text for r in rows])
    long = [len(s.wave) / RATE > 2 * r.seconds for s, r in zip(speech, rows)]
    assert scores.runaway_rate == sum(long) / 5
    assert set(scores.figures()) == {f.name for f in dataclasses.fields(Scores)} - {"transcripts"}


def test_a_broken_model_fails_the_gate(voice, recognizer):
    rows = [r for r in manifest() if r.split == "train"][:4]
    broken = SpeechGPT(real_config())
    broken.code_head.bias.data[broken.config.stop_code] = -100.0  # never finds its end
    config = GenerateConfig(max_codes_per_text_id=30, retries=0)
    figures = evaluate.gate_evaluator(voice, rows, recognizer, config)(broken)
    assert figures["eos_rate"] == 0 and figures["runaway_rate"] > 0
    failing = {check.what for check in gate_checks(figures, 0.01, 0.12) if not check.passed}
    assert {"CER of the voice", "sentences that end", "sentences far too long"} <= failing


def test_transcripts_keep_their_order_and_no_wave_is_silence(recognizer, monkeypatch):
    monkeypatch.setattr(evaluate, "TRANSCRIBE_BATCH", 4)
    clips = [*waves()[:4] * 2, torch.zeros(0), torch.zeros(1024)]
    transcripts = evaluate.transcribe(recognizer, clips, RATE)
    assert transcripts[:4] == transcripts[4:8] and len(set(transcripts[:4])) == 4
    assert transcripts[8] == transcripts[9]


def test_samples_are_written_where_the_report_looks(tmp_path):
    named = {"ema": (["ሰላም", "ለሁሉ", "ሰው", "ቤት"], [w[:2000] for w in waves()[:4]])}
    rows = evaluate.save_samples(named, "held_out", RATE, tmp_path)
    assert [(r["text"], r["split"]) for r in rows] == [(t, "held_out") for t in named["ema"][0][:3]]
    assert all(soundfile.info(tmp_path / row["wav"]).samplerate == RATE for row in rows)


@pytest.fixture(scope="module")
def two_speakers(tmp_path_factory) -> Voice:
    return opinionated_voice(tmp_path_factory.mktemp("voice"))


def recordings(voice: Voice) -> list[tuple[str, str, torch.Tensor]]:
    torch.manual_seed(0)
    named = list(zip(("ሰላም", "ሰላም ሰላም"), voice.speakers)) * 10
    return [(*names, 0.1 * torch.randn(4000 + 100 * i)) for i, names in enumerate(named)]


def test_a_speakers_loss_is_between_those_of_its_recordings(two_speakers):
    rows = recordings(two_speakers)
    together = loss_by_speaker(two_speakers, rows)
    assert list(together) == two_speakers.speakers == ["alma", "brook"]
    for speaker in two_speakers.speakers:
        assert together[speaker].own != together[speaker].other
        own = [row for row in rows if row[1] == speaker]
        alone = [loss_by_speaker(two_speakers, [row])[speaker].own for row in own]
        assert min(alone) < together[speaker].own < max(alone)


def test_a_voice_that_ignores_the_reference_is_reported(two_speakers):
    deaf = dataclasses.replace(two_speakers, model=copy.deepcopy(two_speakers.model))
    deaf.model.conditioner.latents.data.fill_(1e9)  # the reference has no effect beside them
    for loss in loss_by_speaker(deaf, recordings(two_speakers)).values():
        assert loss.own == pytest.approx(loss.other, rel=1e-6) and not loss.uses_reference


def test_forgetting_is_the_divergence_at_every_code():
    base = tiny_model()
    base.code_head.weight.data *= 20  # or every code is as likely as every other
    other = copy.deepcopy(base)
    for parameter in other.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    mels = torch.randn(2, base.config.n_mels, 30)
    texts = [[3, 4, 5], [6, 7, 8, 9]]
    spoken = generate(base, texts, mels, GenerateConfig(temperature=1, top_k=0, top_p=1, retries=0))
    samples, expected = [], []
    for ids, row, mel in zip(texts, spoken, mels):
        sample = BaseSample(base_ids=ids, tuned_ids=ids, spoken=row, mel=mel)
        ours, theirs = (code_log_probs(model, ids, sample) for model in (base, other))
        assert ours.shape == (len(row.codes) + row.stopped, base.config.code_vocab)
        expected.append(torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none"))
        samples.append(sample)
    mean = float(torch.cat(expected).sum(-1).mean())
    for model, divergence in ((base, 0), (other, mean)):
        before, after = cross_entropies(base, model, samples)
        assert after - before == pytest.approx(divergence, abs=1e-6, rel=1e-4)


TEXT = "my mother bought fresh bread from the market"
TRANSCRIPTS = {
    "left out": "my mother bought bread from the market",
    "doubled": "my mother bought bought fresh bread from the market",
    "added": "my mother bought some fresh bread from the market",
    "merged": "my mother bought freshbread from the market",
    "split": "my mo ther bought fresh bread from the market",
    "replaced": "my mother bought fresh grapes from the market",
    "misspelt": "my mother bought fresh breat from the market",
}


@pytest.mark.parametrize(("kind", "transcript"), TRANSCRIPTS.items())
def test_each_kind_is_distinguished_from_the_others(kind, transcript):
    pairs = align_words(TEXT, transcript)
    assert [pair.kind for pair in pairs if pair.kind] == [kind]
    assert [word for pair in pairs for word in pair.words] == TEXT.split()
    assert [word for pair in pairs for word in pair.recognized] == transcript.split()
    assert set(TRANSCRIPTS) == set(KINDS)


def test_punctuation_is_no_error_and_silence_leaves_all_out():
    assert not any(pair.kind for pair in align_words("ሰላም፣ ለሁሉም!", "ሰላም ለሁሉም"))
    counts = evaluate.count_kinds(align_words(TEXT, ""))
    assert counts == {**dict.fromkeys(KINDS, 0), "left out": 8}
    assert align_words("", "") == []


def test_the_word_with_most_errors_comes_first():
    pairs = align_words("two apples and two pears", "two apples and ten pears")
    pairs += align_words("two plums", "plums")
    first, *others = evaluate.word_stats(pairs)
    assert (first.word, first.count, first.wrong) == ("two", 3, 2)
    assert set(first.kinds) == {"replaced", "left out"} and "ten" in first.recognized
    assert not any(record.wrong for record in others)
