"""What every room stands on: settings, the machine, files, the words for errors.

Knows nothing of speech.
"""
