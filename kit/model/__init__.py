"""The one model: a GPT over audio codes, what a row of its sequence holds, and its file.

Knows nothing of where rows come from, how it is trained, or how it speaks.
"""
