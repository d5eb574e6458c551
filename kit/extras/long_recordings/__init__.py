"""Long recordings, with or without a text, become clips and rows: what notebook 06 does."""
