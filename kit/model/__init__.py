"""The model: a GPT over audio codes, its input sequence, LoRA adapters and its files."""
