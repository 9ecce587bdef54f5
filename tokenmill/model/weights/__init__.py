"""Where weights come from: checkpoints of several formats, or random numbers."""
