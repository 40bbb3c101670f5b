"""Emitters of the FlyDSL kernels and their compilation, which no server loads."""
