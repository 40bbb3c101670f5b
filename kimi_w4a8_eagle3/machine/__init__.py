"""GPUs of this machine, and the limits of the installed AITER: hardware, page-offset guard, AITER regimes."""
