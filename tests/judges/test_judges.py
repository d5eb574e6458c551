"""What the judges must tell apart: words from noise, clean from rough, one voice from another."""

import pytest
import torch
from judges import RATE_HZ, JudgeError, Judges, plain, whisper_folder

from kit.audio.clip import load_wave
from kit.base.files import file_digest
from kit.dataset.layouts import read_dataset
from kit.dataset.synthetic import make_corpus
from kit.settings import CorpusConfig, ManifestConfig


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> dict[str, list]:
    """English sentences by espeak-ng, as (wave (L,), text) by speaker."""
    config = CorpusConfig(language="en", utterances=50, held_out=1, unseen=1, long=1, speakers=2)
    folder = make_corpus(config, tmp_path_factory.mktemp("corpus"))
    pairs = {}
    for row in read_dataset(folder, ManifestConfig(language="en")).rows:
        pairs.setdefault(row.speaker, []).append((load_wave(row.audio, RATE_HZ), row.text))
    return pairs


def test_words_are_understood_and_noise_is_not(judges, clips):
    waves, texts = zip(*[pair for mine in clips.values() for pair in mine][:4])
    clean = judges.judge(waves, texts, RATE_HZ)
    torch.manual_seed(0)
    rough = judges.judge([wave + 0.1 * torch.randn_like(wave) for wave in waves], texts, RATE_HZ)
    assert clean.cer < 0.5 and rough.cer > clean.cer
    assert rough.dnsmos < clean.dnsmos - 0.3
    assert clean.similarity is None and clean.clips == len(clean.transcripts) == 4


def test_a_voice_is_nearer_to_itself(judges, clips):
    first, second = (mine for _, mine in sorted(clips.items()))
    voice = judges.voice_of([wave for wave, _ in first[2:]], RATE_HZ)

    def alike(pairs: list) -> float:
        waves, texts = zip(*pairs[:2])
        return judges.judge(waves, texts, RATE_HZ, [voice] * 2).similarity

    assert alike(first) > alike(second) + 0.02


def test_nothing_to_judge_is_reported(judges):
    with pytest.raises(JudgeError, match="no clip"):
        judges.judge([], [], RATE_HZ)


def test_a_language_that_whisper_does_not_know(tmp_path):
    with pytest.raises(JudgeError, match=r"does not know the language 'xx'\. It knows: .* en, "):
        Judges("xx", tmp_path)


def test_weights_that_are_not_those_published_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("judges.WHISPER_SHA256", "0" * 64)
    with pytest.raises(JudgeError, match="not those that were published"):
        whisper_folder(tmp_path)
    assert not (tmp_path / "whisper-base/model.bin").exists()
    monkeypatch.undo()
    folder = whisper_folder(tmp_path)
    changed = (folder / "model.bin").stat().st_mtime_ns
    assert whisper_folder(tmp_path) == folder
    assert (folder / "model.bin").stat().st_mtime_ns == changed
    assert file_digest(folder / "model.bin").startswith("d01c3014")


def test_what_is_compared_is_letters_alone():
    assert plain("«Ёлка», — сказал он.", "ru") == "елка сказал он"
