"""`tokenmill plan`: which settings and how many GPUs a workload needs, from candidates judged by queueing."""
