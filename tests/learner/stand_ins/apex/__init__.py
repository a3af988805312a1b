"""Stands for NVIDIA's Apex in a test world: the same names, plain arithmetic, calls recorded."""
