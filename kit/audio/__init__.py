"""Recordings, spectrograms, codecs and speech recognition.

Codecs (codec.py) turn waveforms into codes and back: a small one trained on the user's recordings
(mel_codec.py), and those of released models (kit/releases/).
"""
