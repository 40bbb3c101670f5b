"""A soak: hours of mixed load on a fleet, with everything that could leak sampled beside it, and a verdict."""
