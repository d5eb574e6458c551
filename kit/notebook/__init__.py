"""What a person sees: results, pictures, progress, and panels of core ipywidgets (7.7.1 or 8)."""
