"""The FlyDSL backend: gfx942 kernels with INT8 MFMA, and what compiles, tunes and warms them."""
