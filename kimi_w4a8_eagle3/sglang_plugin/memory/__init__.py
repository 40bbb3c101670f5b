"""Memory: the bound of the KV pool by what AITER's paged kernels can index."""
