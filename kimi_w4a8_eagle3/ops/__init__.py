"""What an operator watches: replica states, probes, one metrics endpoint, the terminal view."""
