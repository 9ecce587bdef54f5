"""Who owns memory: the block pool, the prefix index, and the manager that hands blocks to requests."""
