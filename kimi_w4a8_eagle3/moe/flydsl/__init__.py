"""The FlyDSL backend: gfx942 kernels with INT8 MFMA, and the code that compiles, tunes and warms them."""
