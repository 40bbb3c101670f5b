"""Load with known answers, the servers it is sent to, smg in front of them, and a server without a model."""
