"""Tool calls in a model's text: which ones a request allows, and parsers that find them while it streams."""
