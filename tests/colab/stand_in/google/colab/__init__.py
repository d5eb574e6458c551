"""Stands in for Google Colab's own package: just what the kit calls, and a Drive (drive.py)."""
