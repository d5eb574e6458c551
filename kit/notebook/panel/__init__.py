"""The panels of the notebooks, in core ipywidgets: the same code for 7.7.1 (Colab's) and 8."""
