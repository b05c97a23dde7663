"""Kernels in C for CPUs, compiled on the machine they run on."""
