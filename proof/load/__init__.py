"""Load with known answers, the fleets it is sent to, and a server without a model."""
