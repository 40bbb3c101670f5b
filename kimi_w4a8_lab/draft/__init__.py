"""EAGLE3 drafts for one's own traffic: collected requests, the target's states, training, comparison and the switch."""
