"""What a GPU holds, and how the kernels of the installed AITER index it: hardware, page-offset guard, AITER regimes."""
