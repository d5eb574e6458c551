"""Training: run.py starts or resumes a run, loop.py takes its steps, trainer.py is its state."""
