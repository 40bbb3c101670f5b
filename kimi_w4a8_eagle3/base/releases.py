"""The oldest and the newest release of SGLang that this package serves with; its tests run on both."""

SGLANG_PINNED = "0.5.20"  # a test compares it with requirements/constraints.txt and the Dockerfile
SGLANG_NEWEST = "0.5.23"
