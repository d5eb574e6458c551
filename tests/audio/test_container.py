"""Files as programs and people leave them are read to their end, or refused with a reason."""

import re
import struct
import sys

import numpy as np
import pytest
import soundfile
from clips import cut_short, encoded, voice
from helpers import RATE, speech

from kit.audio.clip import measure_clip, read_clip
from kit.audio.container import count_decodable, frame_header, open_seekable
from kit.base.errors import DatasetError

SECOND = (speech() * 2**15).astype(np.int16)
FLOATS = SECOND / np.float32(2**15)
COMMENT = b"LIST" + struct.pack("<I", 7) + b"INFOabc\0"


def at(tmp_path, data: bytes, name: str = "a.wav") -> str:
    (tmp_path / name).write_bytes(data)
    return str(tmp_path / name)


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


PIPE_SIZES = [0, 0x7F000008, 0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDB, 0xFFFFFFFF]


@pytest.mark.parametrize("size", PIPE_SIZES)
def test_a_wav_from_a_pipe_is_read_to_the_end_of_the_file(tmp_path, size):
    path = at(tmp_path, with_data_bytes(size, encoded(SECOND)))
    assert np.array_equal(read_clip(path)[0], FLOATS)
    assert measure_clip(path).seconds == 1 and count_decodable(path).frames == RATE
    with open_seekable(path, RATE) as sound:
        sound.seek(20_000)
        assert np.array_equal(sound.read(dtype="int16"), SECOND[20_000:])


def test_an_empty_wav_with_a_comment_and_one_shorter_than_it_says_are_refused(tmp_path):
    empty = with_data_bytes(0, encoded(SECOND[:0]))
    assert "0 samples" in refused(at(tmp_path, empty + COMMENT))
    for size in (60_000, 2**30, 3 * 2**30):
        assert "truncated" in refused(at(tmp_path, with_data_bytes(size, encoded(SECOND))))


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_samples_read_are_the_samples_written(tmp_path, subtype):
    for format in ("WAV", "WAVEX", "RF64", "W64")[: 2 if subtype == "PCM_U8" else 4]:
        path = at(tmp_path, encoded(FLOATS, subtype=subtype, format=format))
        error = np.abs(read_clip(path)[0] - FLOATS).max()
        assert error <= (1 / 128 if subtype == "PCM_U8" else 0), format


def test_files_that_end_within_their_header_are_refused(tmp_path):
    for size in (4, 21):
        assert "truncated" in refused(at(tmp_path, encoded(SECOND, format="FLAC")[:size]))
    data = mp3(speech(1))
    refused(at(tmp_path, data[: data.index(b"Xing") + 4], "a.mp3"))


def test_a_length_beyond_any_file_is_refused(tmp_path):
    w64 = bytearray(encoded(SECOND, format="W64"))
    length_at = w64.index(b"data") + 16
    w64[length_at : length_at + 8] = struct.pack("<Q", 2**64 - 16)
    assert "truncated" in refused(at(tmp_path, bytes(w64)))


def test_chunks_of_odd_sizes_are_passed_over(tmp_path):
    wav = encoded(SECOND)
    for place in (36, len(wav)):
        path = at(tmp_path, wav[:place] + COMMENT + wav[place:])
        assert np.array_equal(read_clip(path)[0], FLOATS)


@pytest.mark.parametrize("format", ["WAV", "RF64", "W64", "AIFF", "OGG"])
def test_files_joined_byte_by_byte_are_refused_where_only_the_first_would_be_read(tmp_path, format):
    assert "joined" in refused(at(tmp_path, 2 * encoded(voice(1), format=format)))


def mp3(wave: np.ndarray, rate: int = RATE, mode: str = "VARIABLE") -> bytes:
    return encoded(wave, rate, format="MP3", bitrate_mode=mode, compression_level=0.5)


def without_xing(data: bytes) -> bytes:
    return data[frame_header(data, 0).size_bytes :]


def loud_then_quiet(seconds: float) -> np.ndarray:
    """A wave whose first frames are larger than the mean, so that an estimate is too short."""
    noise = 0.1 * np.random.default_rng(0).standard_normal(int(seconds * RATE))
    tone = np.sin(np.arange(len(noise)) / 20)
    return np.where(np.arange(len(noise)) < RATE / 2, noise, 0.02 * tone).astype(np.float32)


def end_of(path: str) -> np.ndarray:
    """Read the last half second as long recordings are read."""
    frames, expected, problem = count_decodable(path)
    assert not problem and frames == expected
    with open_seekable(path, frames) as sound:
        sound.seek(frames - RATE // 2)
        return sound.read(RATE // 2, dtype="float32")


@pytest.mark.parametrize("mode", ["VARIABLE", "CONSTANT"])
def test_an_mp3_with_a_right_header_is_read_as_libsndfile_reads_it(tmp_path, mode):
    path = at(tmp_path, mp3(loud_then_quiet(3), mode=mode), "a.mp3")
    with soundfile.SoundFile(path) as sound:
        assert np.array_equal(read_clip(path)[0], sound.read(dtype="float32"))


def test_a_variable_bit_rate_without_a_header_is_read_to_its_end(tmp_path):
    wave = loud_then_quiet(4)
    path = at(tmp_path, without_xing(mp3(wave)), "a.mp3")
    assert soundfile.info(path).frames < 0.8 * len(wave), "libsndfile's estimate"
    assert measure_clip(path).seconds == pytest.approx(4, abs=0.2)
    assert len(read_clip(path)[0]) == pytest.approx(len(wave), abs=0.2 * RATE)
    assert np.abs(end_of(path)).max() == pytest.approx(0.02, abs=0.005)


@pytest.mark.parametrize("between", [b"", b"TAG" + bytes(125), b"ID3\3\0\0\0\0\2\0" + bytes(256)])
def test_joined_mp3s_are_read_to_the_end_of_the_last(tmp_path, between):
    first, second = mp3(speech(1)), mp3(voice(2, seed=3))
    path = at(tmp_path, first + between + second, "a.mp3")
    assert soundfile.info(path).frames == RATE, "libsndfile reads the first"
    wave = read_clip(path)[0]
    assert measure_clip(path).seconds == pytest.approx(3, abs=0.3)
    alone = read_clip(at(tmp_path, second, "b.mp3"))[0][RATE // 2 : RATE]
    shifts = [float(alone @ wave[s : s + len(alone)]) for s in range(RATE, len(wave) - len(alone))]
    assert max(shifts) == pytest.approx(float(alone @ alone), rel=0.01)
    assert len(end_of(path)) == RATE // 2


def test_what_follows_the_last_frame_is_no_sound(tmp_path):
    frames = without_xing(mp3(speech()))
    alone = read_clip(at(tmp_path, frames, "a.mp3"))[0]
    for rest in (b"LYRICSBEGIN" * 300, bytes(3000), b"TAG" + bytes(125)):
        assert np.array_equal(read_clip(at(tmp_path, frames + rest, "b.mp3"))[0], alone)


UNREADABLE = [
    (lambda a, b: without_xing(a)[: len(a) // 2], "truncated"),
    (lambda a, b: a + without_xing(b)[: len(b) // 2], "truncated"),
    (lambda a, b: a[: len(a) // 2], "truncated"),
    (lambda a, b: a + b"no frame" * 500 + b, "damaged: 4,000 bytes"),
    (lambda a, b: a + mp3(speech(1, rate=44_100), 44_100), "44,100 Hz"),
    (lambda a, b: a + mp3(np.stack(2 * [speech()], axis=1)), "in 2"),
]


@pytest.mark.parametrize(("make", "words"), UNREADABLE)
def test_an_mp3_that_cannot_be_read_to_its_end_is_refused(tmp_path, make, words):
    path = at(tmp_path, make(mp3(speech()), mp3(voice(1))), "a.mp3")
    assert words in refused(path) and words in count_decodable(path).problem


@pytest.mark.parametrize("name", ["a.wav", "A.Mp3", "a"])
def test_the_content_decides_not_the_suffix(tmp_path, name):
    measure = measure_clip(at(tmp_path, mp3(speech()), name))
    assert measure.subtype == "MPEG_LAYER_III" and measure.seconds == 1


def test_opus_keeps_its_beginning_and_its_end(tmp_path):
    wave = voice(1)
    path = at(tmp_path, encoded(wave, 48_000, format="OGG", subtype="OPUS"), "a.opus")
    samples = read_clip(path)[0]
    assert np.array_equal(samples, soundfile.read(path, dtype="float32")[0])
    assert np.corrcoef(samples, wave)[0, 1] > 0.9
    short = cut_short(2, format="OGG", subtype="VORBIS")
    assert "truncated" in refused(at(tmp_path, short, "b.ogg"))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("M4A", b"\0\0\0\x1cftypM4A \0\0\2\0"),
        ("AAC", b"\xff\xf1P@\x1f?\xfc"),
        ("WMA", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
    ],
)
def test_without_pyav_the_one_command_is_named(tmp_path, name, head, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    reason = refused(at(tmp_path, head + bytes(500), "a"))
    assert name in reason and "`pip install av`" in reason


AV_CODECS = {"a.m4a": ("aac", "ipod"), "a.aac": ("aac", "adts"), "a.wma": ("wmav2", "asf")}


def written_by_av(path: str, wave: np.ndarray, codec: str, format: str) -> None:
    av = pytest.importorskip("av", reason="PyAV is optional")
    with av.open(path, "w", format=format) as container:
        stream = container.add_stream(codec, rate=44_100, layout="mono")
        stream.bit_rate = 64_000
        frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
        frame.sample_rate = 44_100
        for part in (frame, None):
            for packet in stream.encode(part):
                container.mux(packet)


@pytest.mark.parametrize("name", AV_CODECS)
def test_pyav_reads_the_rest_to_its_end_or_says_that_it_is_cut(tmp_path, name):
    wave = speech(2, rate=44_100)
    path = str(tmp_path / name)
    written_by_av(path, wave, *AV_CODECS[name])
    samples, rate = read_clip(path)
    assert rate == 44_100 and len(samples) == pytest.approx(len(wave), abs=4096)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=0.1)
    assert measure_clip(path).seconds == pytest.approx(2, abs=0.1)
    with open_seekable(path, len(samples)) as sound:
        sound.seek(50_000)
        assert np.array_equal(sound.read(1000, dtype="float32"), samples[50_000:51_000])
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    assert "truncated" in refused(path)
