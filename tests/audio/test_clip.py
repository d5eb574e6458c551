"""One recording: every usual coding gives the same figures."""

import tracemalloc

import numpy as np
import pytest
from clips import GOOD, encoded, hour, voice, written
from helpers import RATE, speech

from kit.audio import clip
from kit.audio.clip import measure_clip, read_clip


@pytest.mark.parametrize("kind", GOOD)
def test_every_usual_coding_is_read_and_measured(tmp_path, kind):
    path = written(tmp_path, GOOD[kind]())
    wave, rate = read_clip(path)
    assert wave.dtype == np.float32 and wave.ndim == 1 and 0.3 < np.abs(wave).max() < 0.52
    measure = measure_clip(path)
    assert measure.seconds == pytest.approx(1, abs=1e-3) and measure.rate_hz == rate
    assert measure.peak == pytest.approx(0.5, abs=0.02) and measure.clipped == 0
    assert measure.dc == pytest.approx(wave.mean(), abs=0.005)  # 8 bits are off by half a step
    energy = np.mean(wave.astype(np.float64) ** 2)
    assert measure.rms_db == pytest.approx(10 * np.log10(energy), abs=0.05)


def test_only_the_silence_around_speech_is_left_out():
    spoken = np.concatenate([speech(0.5), np.zeros(RATE, np.float32), speech(0.5)])
    kept = np.zeros(round(clip.KEPT_SILENCE_S * RATE), np.float32)
    long = np.zeros(RATE // 2, np.float32)
    cut = clip.trim_silence(np.concatenate([long, spoken, long]), RATE)
    assert len(cut) == pytest.approx(len(spoken) + 2 * len(kept), abs=0.04 * RATE)
    assert np.abs(cut).sum() == pytest.approx(np.abs(spoken).sum(), rel=1e-3)
    for whole in (spoken, np.concatenate([kept, spoken, kept]), long, spoken[:100]):
        assert len(clip.trim_silence(whole, RATE)) == len(whole)


@pytest.mark.parametrize("gains", [[1, -1], [0.9, -1, 0, 0, 0, 0]])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_channels_that_cancel_are_read_from_the_loudest_one(tmp_path, gains, subtype):
    noise = 0.01 * np.random.default_rng(0).standard_normal((RATE, len(gains)))
    both = (speech()[:, None] * gains + noise).astype(np.float32)
    path = written(tmp_path, encoded(both, subtype=subtype))
    loudest = int(np.abs(gains).argmax())
    assert np.allclose(read_clip(path)[0], both[:, loudest], atol=1e-4)
    measure = measure_clip(path)
    assert measure.cancels and measure.mono_peak == pytest.approx(0.5, abs=0.05)
    level_db = 10 * np.log10(np.mean(both[:, loudest] ** 2))
    assert measure.rms_db == pytest.approx(level_db, abs=0.05)


def test_an_hour_is_refused_by_its_header_not_decoded(tmp_path):
    path = written(tmp_path, hour(), "a.flac")
    tracemalloc.start()
    measure = measure_clip(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert (measure.seconds, measure.peak, measure.digest) == (3600, None, None)


def test_the_share_of_clipped_samples(tmp_path):
    wave = np.where(np.arange(RATE) % 100 < 3, -1.0, 0.2)
    for how in ({}, {"subtype": "FLOAT"}, {"subtype": "PCM_24"}, {"subtype": "PCM_U8"}):
        measure = measure_clip(written(tmp_path, encoded(wave, **how)))
        assert measure.clipped == pytest.approx(0.03, abs=1e-3), how


def test_silence_before_within_and_after(tmp_path):
    before, within, after = (np.zeros(int(seconds * RATE)) for seconds in (0.5, 0.3, 0.2))
    wave = np.concatenate([before, speech(1), within, speech(1), after])
    measure = measure_clip(written(tmp_path, encoded(wave)))
    figures = measure.leading_s, measure.trailing_s, measure.silence_s, measure.gap_s
    assert figures == pytest.approx((0.5, 0.2, 1.0, 0.3), abs=0.03)


def test_two_people_in_two_channels_differ_and_one_in_stereo_does_not(tmp_path):
    first, second = speech(1), speech(1)[::-1]
    turns = np.stack([np.r_[first, 0.01 * second], np.r_[0.01 * first, second]], 1)
    assert measure_clip(written(tmp_path, encoded(turns))).differs
    for other in (0.4, -1.0, 0.01):  # softer, inverted, and what is only noise
        stereo = np.stack([turns.sum(1), other * turns.sum(1)], 1) / 2
        assert not measure_clip(written(tmp_path, encoded(stereo))).differs


@pytest.mark.parametrize("wanted_db", [10, 20, 40])
def test_the_signal_to_noise_ratio_of_a_voice_with_pauses(tmp_path, wanted_db):
    noise = 0.01 * np.random.default_rng(0).standard_normal(3 * RATE)
    tone = np.sin(2 * np.pi * 200 * np.arange(3 * RATE) / RATE)
    loud = tone * np.sqrt(2) * 0.01 * 10 ** (wanted_db / 20) * (np.arange(3 * RATE) % RATE > 7000)
    wave = (noise + loud) / 2
    assert measure_clip(written(tmp_path, encoded(wave))).snr_db == pytest.approx(wanted_db, abs=2)


def test_digital_silence_and_one_sample_have_figures_too(tmp_path):
    measure = measure_clip(written(tmp_path, encoded(np.zeros(RATE, np.float32))))
    assert (measure.peak, measure.rms_db, measure.snr_db) == (0, -120, 0)
    assert measure.leading_s == measure.silence_s == 1
    measure = measure_clip(written(tmp_path, encoded(np.array([0.5]))))
    assert measure.peak == 0.5 and measure.snr_db is None and measure.silence_s == 0


def test_the_digest_knows_the_sound_not_the_file(tmp_path):
    digest = lambda *file: measure_clip(written(tmp_path, *file)).digest  # noqa: E731
    wave = (voice() * 2**15).astype(np.int16)
    same = digest(encoded(wave))
    assert same == digest(encoded(wave, format="FLAC"), "b.flac")
    assert same != digest(encoded(wave[:-1])) and same != digest(encoded(wave, 24_000))


def test_floats_somewhat_beyond_full_scale_are_scaled_down_to_it(tmp_path):
    wave, _ = read_clip(written(tmp_path, encoded(3 * speech(), subtype="FLOAT")))
    assert np.abs(wave).max() == 1 and np.allclose(wave, 2 * speech(), atol=1e-6)


@pytest.mark.parametrize("gains", [[1, 0.3], [0, 1], [1, -0.3], [0, 0, 1, 0, 0, 0]])
def test_other_channels_are_averaged(tmp_path, gains):
    wave = (speech()[:, None] * gains).astype(np.float32) + 0.001
    path = written(tmp_path, encoded(wave, subtype="FLOAT"))
    mono = wave.mean(axis=1)
    assert np.array_equal(read_clip(path)[0], mono)
    measure = measure_clip(path)
    assert not measure.cancels and measure.channels == len(gains)
    assert measure.peak == pytest.approx(np.abs(wave).max(), abs=1e-5)  # of the loudest channel
    assert measure.rms_db == pytest.approx(10 * np.log10(np.mean(mono**2)), abs=0.02)
    offsets = np.stack([speech() + 0.2, speech() - 0.2], axis=1)  # opposite, but not in phase
    assert not measure_clip(written(tmp_path, encoded(offsets))).cancels


def test_usual_rates_are_resampled_exactly_and_odd_ones_by_a_small_ratio_nearby():
    for rate in (16_000, 44_100, 48_000, 96_000, 384_000):
        a, b = clip.resampling_ratio(rate, RATE)
        assert a * RATE == b * rate
    for rate in (44_101, 11_027, 191_999, 4001):
        a, b = clip.resampling_ratio(rate, RATE)
        assert a * b <= clip.MAX_FILTER_TAPS and a / b == pytest.approx(rate / RATE, rel=7e-4)
