"""Training: the loop, settings, switches, optimizers, EMA, checkpoints, recovery and the log."""
