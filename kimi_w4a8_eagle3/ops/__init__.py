"""The operator's view of a fleet: replica states, probes, one metrics endpoint and the live page."""
