"""Settings, files and locks, hardware, the checksummed tensor file, errors. No speech here."""
