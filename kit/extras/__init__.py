"""What the core does without: each folder can be deleted, and what it offers are names in it."""
