"""Share a voice: a page and a server that speak, and the Hugging Face hub."""
