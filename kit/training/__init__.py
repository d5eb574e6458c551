"""The loop and all that a run is: settings, switches, optimizers, EMA, checkpoints, recovery, log.

Knows no file of a dataset, no sound and no widget; batches are handed to it.
"""
