"""Recordings, spectrograms, codecs (waveforms to codes and back) and speech recognition."""
