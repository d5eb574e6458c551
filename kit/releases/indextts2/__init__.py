"""A released IndexTTS2: GPT, tokenizer, codes; its own package has its classes and its sound."""
