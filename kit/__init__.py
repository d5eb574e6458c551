"""A training kit for voices: recordings in, a voice out. Each folder is a room."""
