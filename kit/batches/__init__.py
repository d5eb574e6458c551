"""Encode clips to codes on disk, and read them as batches that resume exactly."""
