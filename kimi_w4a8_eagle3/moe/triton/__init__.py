"""The Triton backend: kernels for any GPU that Triton compiles for, and the code that compiles and tunes them."""
