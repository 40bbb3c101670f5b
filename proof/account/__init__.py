"""Account of the milliseconds of a decode step and a prefill on MI325X, part by part, and of possible changes."""
