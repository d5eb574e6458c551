"""Stands in for Google Colab's own package: just enough to be noticed, and a Drive (drive.py)."""
