"""Who may ask an engine what: keys, closed endpoints, limits, and the reading of request bodies (docs/door.md).

Nothing here imports sglang; `sglang_plugin/door.py` puts it in front of an engine's HTTP application.
"""
