"""Search and check of MoE kernels on a GPU: tile candidates, timing, and layers with known outputs."""
