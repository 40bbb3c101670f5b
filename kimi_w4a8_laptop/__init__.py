"""The built-in model and its engine on a CPU: the distribution kimi-w4a8-laptop, which no image for GPUs contains.

`pyproject.toml` registers its parts under `kimi_w4a8_eagle3.laptop`, where `base/installed.py` finds them.
"""
