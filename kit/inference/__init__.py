"""Codes from text, sound from codes, a voice to take away, and how good all of it is.

Knows nothing of training.
"""
