"""Download a checkpoint once, completely and verified.

`hub` lists a repository and `download` brings it, both with huggingface_hub, whose requests `audit` limits. `cache`
knows what lies where. Names from outside become the types in `names`, and `tree` reaches files without following links.
"""
