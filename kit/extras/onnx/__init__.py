"""A voice for onnxruntime, without torch."""
