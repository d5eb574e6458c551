"""Records of files of any size, in a shuffled order, with a position of a few bytes to go on from.

Knows nothing of what a record means.
"""
