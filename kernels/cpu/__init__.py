"""Kernels for processors: numba, compiled once and cached, run on torch's own thread team."""
