"""Other people's models, read and written: XTTS-v2, NeuCodec, IndexTTS2, Whisper."""
