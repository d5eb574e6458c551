"""What a person sees: the record of a run, pictures, progress, and who is watching."""
