"""Changes to installed files of other projects: described in `patches/manifest.toml`, applied and reverted safely.

An edit finds its place by structure (a parameter's name, a function's definition), never by a line number or a
copied context, and refuses a file in which that structure is not what it expects. Nothing here imports the
package that is edited.
"""
