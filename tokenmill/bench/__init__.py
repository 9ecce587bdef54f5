"""What things cost on this machine: ops against measured ceilings, and traces of steps."""
