"""Speaking with a trained model: decoding, sampling, number formats, export and evaluation."""
