"""A server beside hostile clients: what they cost its processes and an honest client."""
