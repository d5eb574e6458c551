"""A training kit for voices: recordings in, a voice out. Each folder is a room."""

__version__ = "0.1.0"
