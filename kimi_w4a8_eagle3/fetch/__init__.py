"""Download a checkpoint once, completely and verified.

`hub` lists a repository and `download` brings it, both with huggingface_hub, whose requests `audit` limits. `cache`
knows what lies where, without following links. Names from outside become the types in `names`.
"""
