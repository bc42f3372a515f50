"""Kernels by device. Each file holds the reference, the kernel and its checked wrapper."""
