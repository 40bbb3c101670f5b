"""Changes to installed files of other projects: described in `patches/manifest.toml`, applied and reverted safely.

An edit finds its place by structure (a parameter's name, a function's definition), never by a line number or a copied
context. It refuses a file whose structure differs from the expected one. Nothing here imports the edited package.
"""
