"""How a linear layer is stored and multiplied: one file per scheme, and the choice among them."""
