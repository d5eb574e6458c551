"""Fine-tune a released model on recordings: what notebook 07 does beside preparing and training."""
