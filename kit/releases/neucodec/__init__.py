"""A released NeuCodec: its encoder, decoder and files."""
