"""What to use where: the hardware as plain data, the memory model, and settings solved from both. No torch."""
