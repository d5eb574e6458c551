"""The panels of the notebooks, in core ipywidgets (7.7.1 and 8)."""
