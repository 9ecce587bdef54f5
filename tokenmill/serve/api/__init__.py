"""The endpoints, one module per family, with their schemas and formats."""
