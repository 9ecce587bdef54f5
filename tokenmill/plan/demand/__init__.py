"""What is asked of machines: workloads, the traces they are read from, and what clients are promised."""
