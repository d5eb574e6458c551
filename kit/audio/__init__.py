"""Sound to codes and back: one checked clip, its spectrogram, the codec, the recogniser.

Knows no dataset and no speech model.
"""
