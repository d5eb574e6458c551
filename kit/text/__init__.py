"""Letters to token ids: spelling, numbers in words, phonemes, the tokenizer; and espeak-ng.

Knows no recording and no model.
"""
