"""Is a deployment as accurate as it should be, and does speculation change its answers? `kimi eval` decides."""
