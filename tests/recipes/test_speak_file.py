"""A file of sentences is spoken into a folder, each once, whatever interrupts it."""

import csv

import pytest
import soundfile
from helpers import manifest, real_voice

from kit.base.errors import KitError
from kit.inference.voice import Voice
from kit.recipes import speak_file as module
from kit.recipes.speak_file import speak_file
from kit.settings import GenerateConfig

SHORT = GenerateConfig(max_codes_per_text_id=0.5, retries=0, seed=1)


@pytest.fixture(scope="module")
def voice() -> Voice:
    return real_voice()


@pytest.mark.parametrize(
    "content, reported",
    [
        (b" \n\n", r"a\.txt.*no text"),
        ("one\nét\n".encode("latin-1"), r"a\.txt.*utf-8"),
        ("ሰላም\n\nжжж\n".encode(), r"a\.txt, line 3"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_work(content, reported, voice, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(KitError, match=reported):
        speak_file(voice, path, tmp_path / "out", SHORT, voice.speakers[0])
    assert not (tmp_path / "out").exists()


def test_each_line_is_spoken_once_also_after_an_interrupt_and_nothing_is_overwritten(
    voice, tmp_path, monkeypatch
):
    said = dict.fromkeys(row.text for row in manifest() if voice.can_speak(row.text))
    sentences = list(said)[:3]
    texts = tmp_path / "texts.txt"
    texts.write_text("\ufeff" + "\n\n".join(sentences), encoding="utf-8")
    monkeypatch.setattr(module, "BATCH", 1)
    speak, calls, folder = Voice.speak, [], tmp_path / "out"

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return speak(self, *given)

    monkeypatch.setattr(Voice, "speak", interrupted)
    with pytest.raises(KeyboardInterrupt):
        speak_file(voice, texts, folder, SHORT, voice.speakers[0])
    again = speak_file(voice, texts, folder, SHORT, voice.speakers[0])
    assert again.figures == {"sentences": 3, "spoken_now": 1}
    with (folder / "index.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["audio"] for row in rows] == ["00001.wav", "00003.wav", "00005.wav"]
    assert [row["text"] for row in rows] == sentences
    rates = {soundfile.info(folder / row["audio"]).samplerate for row in rows}
    assert rates == {voice.codec.sample_rate}
    for written, speaker in ((sentences, voice.speakers[-1]), (sentences[::-1], voice.speakers[0])):
        texts.write_text("\n\n".join(written), encoding="utf-8")
        with pytest.raises(KitError, match=r"00001\.wav.*--out"):
            speak_file(voice, texts, folder, SHORT, speaker)
