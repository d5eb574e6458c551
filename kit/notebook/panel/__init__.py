"""The panels of 02_train and 04_inference, in core ipywidgets (7.7.1 and 8)."""
