"""`speak --file`: sentences to WAV files and an index, each once."""

import csv
from pathlib import Path

import pytest
import soundfile
from helpers import manifest, real_voice

from kit.base.errors import KitError, SpeechError
from kit.inference.generate import GenerateConfig
from kit.inference.voice import Voice
from kit.recipes.speak import read_sentences, speak, speak_lines

SHORT = GenerateConfig(max_codes_per_text_id=0.5, retries=0, seed=1)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


@pytest.fixture(scope="module")
def texts(voice) -> list[str]:
    texts = dict.fromkeys(row.text for row in manifest())
    return [text for text in texts if voice.can_speak(text)][:5]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def index(folder: Path) -> list[dict]:
    with (folder / "index.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_lines_are_named_by_number_or_id_and_a_missing_or_binary_file_is_named(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\n\n  two, three \n")
    assert read_sentences(path) == {"00001": "one", "00003": "two, three"}
    path = write(tmp_path / "a.txt", "a|one\nb| two|three\n")
    assert read_sentences(path) == {"a": "one", "b": "two|three"}
    with pytest.raises(KitError, match=r"gone\.txt"):
        read_sentences(tmp_path / "gone.txt")
    (tmp_path / "a.txt").write_bytes(b"one\n\xe9t\xe9\n")
    with pytest.raises(KitError, match=r"a\.txt, line 2: .*UTF-8"):
        read_sentences(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "text, reported",
    [
        ("", "no text"),
        ("a|one\ntwo\n", "line 2"),
        ("one\nb|two\n", "line 2"),
        ("a|one\na|two\n", "line 2.*'a'"),
        ("../a|one\n", "line 1.*'/'"),
        ("|one\n", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(text, reported, tmp_path):
    with pytest.raises(KitError, match=reported):
        read_sentences(write(tmp_path / "a.txt", text))


def test_each_sentence_has_a_file_and_a_row_and_is_spoken_once(voice, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("kit.recipes.speak.BATCH", 2)
    spoken = []
    speak_batch = Voice.speak

    def counted(self, batch, *more):
        spoken.extend(batch)
        assert len(batch) <= 2
        return speak_batch(self, batch, *more)

    monkeypatch.setattr(Voice, "speak", counted)
    sentences = {f"s{i}": text for i, text in enumerate(texts)}
    first = speak_lines(voice, sentences, tmp_path, SHORT)
    assert sorted(spoken) == sorted(texts) and first.figures["spoken_now"] == 5
    rows = index(tmp_path)
    assert [(row["audio"], row["text"]) for row in rows] == [
        (f"{name}.wav", text) for name, text in sentences.items()
    ]
    for row in rows:
        wave, rate_hz = soundfile.read(tmp_path / row["audio"])
        assert rate_hz == voice.codec.sample_rate
        assert float(row["seconds"]) == pytest.approx(len(wave) / rate_hz, abs=1e-3)
    spoken.clear()
    kept = (tmp_path / "s0.wav").stat().st_mtime_ns
    (tmp_path / "s3.wav").unlink()
    sentences["s1"] = texts[0]
    again = speak_lines(voice, sentences, tmp_path, SHORT)
    assert sorted(spoken) == sorted([texts[0], texts[3]]), "the edited and the deleted one"
    assert (again.figures["sentences"], again.figures["spoken_now"]) == (5, 2)
    assert (tmp_path / "s0.wav").stat().st_mtime_ns == kept
    spoken.clear()
    speak_lines(voice, sentences, tmp_path, SHORT, voice.speakers[-1])
    assert len(spoken) == 5, "another speaker says all"


def test_what_an_interrupt_left_is_kept_and_errors_come_before_any_work(
    voice, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr("kit.recipes.speak.BATCH", 1)
    sentences = {f"s{i}": text for i, text in enumerate(texts)}
    speak_batch = Voice.speak
    calls = []

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return speak_batch(self, *given)

    monkeypatch.setattr(Voice, "speak", interrupted)
    with pytest.raises(KeyboardInterrupt):
        speak_lines(voice, sentences, tmp_path, SHORT)
    assert len(index(tmp_path)) == 2
    assert speak_lines(voice, sentences, tmp_path, SHORT).figures["spoken_now"] == 3
    sentences = {"good": texts[0], "bad": "ж" * 5}
    with pytest.raises(SpeechError, match=r"1 of 2.*\nbad: "):
        speak_lines(voice, sentences, tmp_path / "out", SHORT)
    with pytest.raises(SpeechError, match="'nobody'"):
        speak_lines(voice, {"good": texts[0]}, tmp_path / "out", SHORT, "nobody")
    assert not (tmp_path / "out").exists()
    write(tmp_path / "index.csv", "a,b\n1,2\n")
    with pytest.raises(KitError, match=r"index\.csv"):
        speak_lines(voice, {"good": texts[0]}, tmp_path, SHORT)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"speaker": "alma"}, "--text"),
        ({"voice": "export"}, "--text"),
        ({"text": "a", "file": Path("b")}, "not both"),
        ({"file": Path("b")}, "--out"),
        ({"text": "a", "voice": "export", "dtype": "int8"}, "--dtype"),
        ({"text": "a", "speaker": "alma", "reference": "b.wav"}, "--reference"),
    ],
)
def test_options_that_do_not_belong_together(options, named):
    with pytest.raises(KitError, match=named):
        list(speak("mine", **options))
