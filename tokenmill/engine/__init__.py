"""The loop: requests are scheduled into steps, steps run on a runner, results are committed."""
