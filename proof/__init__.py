"""Proofs and figures of the package. They are not in the wheel, and nothing in the wheel imports them."""
