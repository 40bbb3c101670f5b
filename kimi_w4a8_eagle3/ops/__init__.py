"""The operator's view of a fleet: replica states, probes, one metrics endpoint, the terminal view."""
