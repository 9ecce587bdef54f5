"""How tokens are chosen: settings per row, penalties, log-probabilities, beams."""
