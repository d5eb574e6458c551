"""Files as programs and people leave them are read to their end, or refused with a reason."""

import os
import re
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from clips import BAD, cut_short, encoded, flac_telling, voice, written
from helpers import RATE, in_time, speech

from kit.audio import container
from kit.audio.clip import measure_clip, read_clip
from kit.audio.container import duration_s, open_audio
from kit.base.errors import DatasetError

SECOND = (speech() * 2**15).astype(np.int16)
FLOATS = SECOND / np.float32(2**15)


def refused(path: str) -> str:
    with pytest.raises(DatasetError) as caught:
        read_clip(path)
    reason = str(caught.value)
    assert reason.startswith(path)
    with pytest.raises(DatasetError, match=f"^{re.escape(reason)}$"):
        measure_clip(path)
    return reason


def with_data_bytes(size: int, wav: bytes) -> bytes:
    return wav[:40] + struct.pack("<I", size) + wav[44:]


@pytest.mark.parametrize("size", [0, 0x7FFFF000, 0xFFFFFFFF])
def test_a_wav_from_a_pipe_is_read_to_the_end_of_the_file(tmp_path, size):
    path = written(tmp_path, with_data_bytes(size, encoded(SECOND)))
    assert np.array_equal(read_clip(path)[0], FLOATS)
    assert measure_clip(path).seconds == 1
    with open_audio(path) as (sound, seconds):
        assert (sound.frames, seconds) == (RATE, 1)
        sound.seek(20_000)
        assert np.array_equal(sound.read(dtype="float32"), FLOATS[20_000:])


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_samples_read_are_the_samples_written(tmp_path, subtype):
    for format in ("WAV", "WAVEX", "RF64", "W64")[: 2 if subtype == "PCM_U8" else 4]:
        path = written(tmp_path, encoded(FLOATS, subtype=subtype, format=format))
        error = np.abs(read_clip(path)[0] - FLOATS).max()
        assert error <= (1 / 128 if subtype == "PCM_U8" else 0), format


def mp3(wave: np.ndarray, rate: int = RATE, mode: str = "VARIABLE") -> bytes:
    return encoded(wave, rate, format="MP3", bitrate_mode=mode, compression_level=0.5)


def loud_then_quiet(seconds: float) -> np.ndarray:
    """A wave whose first frames are larger than the mean, so that an estimate is too short."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(int(seconds * RATE))
    tone = np.sin(np.arange(len(noise)) / 20)
    return np.where(np.arange(len(noise)) < RATE / 2, noise, 0.02 * tone).astype(np.float32)


@pytest.mark.parametrize("mode", ["VARIABLE", "CONSTANT"])
def test_an_mp3_is_read_as_libsndfile_reads_it(tmp_path, mode):
    path = written(tmp_path, mp3(loud_then_quiet(3), mode=mode), "a.mp3")
    wave = soundfile.read(path, dtype="float32")[0]
    assert np.allclose(read_clip(path)[0], wave, atol=1e-4)
    assert duration_s(path) == measure_clip(path).seconds == 3


def test_an_mp3_of_unknown_length_is_read_to_its_end(tmp_path):
    wave = loud_then_quiet(4)
    data = mp3(wave)
    without_length = data[data.index(data[:2], 2) :]  # its first frame says how long it is
    path = written(tmp_path, without_length, "a.mp3")
    assert measure_clip(path).seconds == pytest.approx(4, abs=0.2)
    assert len(read_clip(path)[0]) == pytest.approx(len(wave), abs=0.2 * RATE)


@pytest.mark.parametrize("between", [b"", b"ID3\3\0\0\0\0\2\0" + bytes(256)])
def test_joined_mp3s_are_read_to_the_end_of_the_last(tmp_path, between):
    first, second = mp3(speech(1)), mp3(voice(2, seed=3))
    wave = read_clip(written(tmp_path, first + between + second, "a.mp3"))[0]
    assert len(wave) == pytest.approx(3 * RATE, abs=0.3 * RATE)
    assert np.sqrt(np.mean(wave[2 * RATE :] ** 2)) > 0.05, "the second is there to its end"


CODECS = {  # what PyAV writes: codec, container, bits a second and rate
    "a.m4a": ("aac", "ipod", 64_000, 44_100),
    "a.aac": ("aac", "adts", 64_000, 44_100),
    "a.wma": ("wmav2", "asf", 64_000, 44_100),
    "a.webm": ("libopus", "webm", 64_000, 48_000),
    "a.amr": ("libopencore_amrnb", "amr", 12_200, 8000),
}


def written_by_av(
    path: str, wave: np.ndarray, codec: str, format: str, bit_rate: int, rate: int
) -> bytes:
    with av.open(path, "w", format=format) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = bit_rate
        frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        for part in (frame, None):
            for packet in stream.encode(part):
                file.mux(packet)
    return Path(path).read_bytes()


@pytest.mark.parametrize("name", CODECS)
def test_other_formats_are_read_to_their_end_or_refused_if_truncated(tmp_path, name):
    rate = CODECS[name][-1]
    wave = speech(2, rate=rate)
    path = str(tmp_path / name)
    data = written_by_av(path, wave, *CODECS[name])
    samples, read_rate = read_clip(path)
    assert read_rate == rate and len(samples) == pytest.approx(len(wave), abs=4096)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=0.2)
    assert measure_clip(path).seconds == pytest.approx(2, abs=0.1)
    with open_audio(path) as (sound, _):
        sound.seek(8000)
        assert np.array_equal(sound.read(1000, dtype="float32"), samples[8000:9000])
    assert "truncated" in refused(written(tmp_path, data[: len(data) // 2], name))


UNREADABLE = {
    kind: (make, words) for kind, (make, found, words) in BAD.items() if found == "unreadable"
}
UNREADABLE |= {
    "RF64": (lambda: cut_short(format="RF64"), "of 22,050"),
    "too much said": (lambda: with_data_bytes(60_000, encoded(SECOND)), "22,050 of 30,000"),
    "two rates": (lambda: mp3(speech()) + mp3(speech(1, rate=44_100), 44_100), "joined"),
    "mono and stereo": (lambda: mp3(speech()) + mp3(np.stack(2 * [speech()], axis=1)), "joined"),
    # FFmpeg would open what a playlist names.
    "a playlist": (lambda: b"#EXTM3U\nfile:///etc/passwd\n", "cannot be read as audio"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_to_its_end_is_refused(tmp_path, kind):
    make, words = UNREADABLE[kind]
    assert words in refused(written(tmp_path, make()))


NO_FILES = {
    "cannot be read as audio: No such": lambda path: None,
    "cannot be read as audio: Is a dir": os.mkdir,
    "a.wav is a named pipe": os.mkfifo,
    "a.wav is a device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.parametrize("words", NO_FILES)
def test_what_is_no_file_is_reported_and_not_waited_for(tmp_path, words):
    path = str(tmp_path / "a.wav")
    NO_FILES[words](path)
    with in_time(20):
        assert words in refused(path)


def test_what_is_longer_than_asked_for_is_not_decoded_further(tmp_path, monkeypatch):
    path = str(tmp_path / "a.m4a")
    written_by_av(path, speech(30, rate=44_100), *CODECS["a.m4a"])
    mp3_path = written(tmp_path, mp3(speech(30)), "a.mp3")
    flac_path = written(tmp_path, flac_telling(0, 30), "a.flac")  # of unknown length
    for given in (path, mp3_path, flac_path):
        with open_audio(given, max_s=2.0) as (sound, seconds):
            assert 2 <= sound.frames / sound.samplerate < 2.2
            assert seconds == pytest.approx(30, abs=0.1)
        assert duration_s(given) == pytest.approx(30, abs=0.1)
        measure = measure_clip(given, decode_s=14.0)
        assert measure.seconds == pytest.approx(30, abs=0.1) and measure.peak is None
        monkeypatch.setattr("kit.audio.clip.MAX_CLIP_S", 20.0)
        with pytest.raises(DatasetError, match=f"{given} is too long .*split"):
            read_clip(given)
        monkeypatch.undo()


def test_many_samples_are_decoded_into_a_file(tmp_path, monkeypatch):
    path = written(tmp_path, mp3(speech(3)), "a.mp3")
    wave = read_clip(path)[0]
    monkeypatch.setattr(container, "IN_MEMORY_BYTES", 1000)
    assert np.array_equal(read_clip(path)[0], wave)


def test_what_follows_the_last_frame_of_an_mp3_is_no_sound_and_its_suffix_decides_nothing(tmp_path):
    frames = mp3(speech())
    alone = read_clip(written(tmp_path, frames, "a.wav"))[0]
    assert len(alone) == RATE
    for rest in (b"LYRICSBEGIN" * 300, b"TAG" + bytes(125)):
        wave = read_clip(written(tmp_path, frames + rest, "b"))[0]
        assert np.array_equal(wave[: len(alone)], alone)
        assert len(wave) < 1.05 * len(alone), "but for what the encoder added"
