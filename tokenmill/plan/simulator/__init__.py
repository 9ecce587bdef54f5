"""`tokenmill simulate`: many replicas under the real scheduler in simulated time, behind routers, with failures."""
