"""Access control in front of an engine: keys, closed endpoints, limits, and checks of bodies (docs/security.md).

Nothing here imports sglang; `sglang_plugin/http/door.py` installs the door in front of an engine's HTTP application.
"""
