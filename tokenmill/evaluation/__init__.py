"""tokenmill as a model of programs that evaluate models."""
