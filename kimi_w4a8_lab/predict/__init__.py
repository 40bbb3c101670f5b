"""Performance prediction: a roofline model fitted to published figures."""
