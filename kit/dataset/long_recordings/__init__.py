"""Recordings of an hour with their transcripts, cut into clips at the pauses."""
