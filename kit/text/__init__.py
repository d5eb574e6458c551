"""Text to token ids: normalisation, languages, sentences, phonemes and tokenizers."""
