"""The Triton backend: kernels for any GPU that Triton compiles for, and what compiles and tunes them."""
