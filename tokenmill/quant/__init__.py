"""How weights are stored and multiplied."""
