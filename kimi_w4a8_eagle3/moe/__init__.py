"""The W4A8 fused MoE: one contract, one dispatcher, one file per backend (reference, triton, flydsl)."""
