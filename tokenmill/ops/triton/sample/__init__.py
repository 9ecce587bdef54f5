"""What happens to logits, in Triton: shaping, grammar masks, sampling, log-probabilities."""
