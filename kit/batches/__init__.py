"""Clips to codes on disk, and codes to batches, resumed to the batch.

Knows what lengths the model takes; neither its weights nor the loop.
"""
