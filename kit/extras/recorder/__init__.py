"""A page that records sentences and takes uploads: what notebook 06 begins with."""
