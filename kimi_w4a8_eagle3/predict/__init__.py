"""What a machine should do: the roofline model fitted to published figures, and several nodes."""
