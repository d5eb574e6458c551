"""Turn recordings in any usual form into a checked manifest and a report of rejected clips."""
