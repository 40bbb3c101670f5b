"""What proves the package and never serves: not in the wheel, and nothing in the wheel imports it."""
