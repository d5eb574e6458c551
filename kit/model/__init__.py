"""The one model: a GPT over audio codes, what a row of its sequence holds, and its files.

A released XTTS-v2 is this model under other names; xtts.py reads one, xtts_export.py writes one.

Knows nothing of where rows come from, how it is trained, or how it speaks.
"""
