"""One engine as its operator sees it: its state, the canary, probes, one metrics endpoint and the live page."""
