"""The native library for CPUs: C++ behind a plain C interface, loaded with ctypes."""
