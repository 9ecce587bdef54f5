"""Places beside the device that hold blocks: host memory, disk."""
