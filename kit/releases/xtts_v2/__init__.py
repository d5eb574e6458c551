"""A released XTTS-v2: its GPT, tokenizer, DVAE, speaker encoder and HiFi-GAN."""
