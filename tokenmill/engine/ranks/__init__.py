"""A runner that is a group of ranks: processes that launch the same steps, start in no time, and may be lost."""
