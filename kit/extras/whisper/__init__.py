"""Whisper as the recogniser, and to transcribe recordings without text."""

RECOGNIZERS = {"whisper": "kit.extras.whisper.recognizer:whisper_from_header"}
READY_RECOGNIZERS = {"whisper": "kit.extras.whisper.recipe:whisper_recognizer"}
