"""What everybody may use and what imports nothing of this package but itself."""
