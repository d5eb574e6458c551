"""What a person sees: the record of a run, pictures, progress, and who is watching.

Knows the events and logs of training; no model.
"""
