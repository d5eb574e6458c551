"""Sound to codes and back: one checked clip, its spectrogram, the codec, the recogniser.

Of a codec there are two: a small one trained on one's own recordings (mel_codec.py), and that of a
released XTTS-v2 (xtts_codec.py; its parts lie beside it).

Knows no dataset and no speech model.
"""
