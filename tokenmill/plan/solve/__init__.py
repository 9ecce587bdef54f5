"""What one engine's settings are solved from: machine and model as numbers, memory, step times. Below the engine."""
