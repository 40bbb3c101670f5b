"""Download a checkpoint once, completely and verifiably.

`hub` lists a repository and turns its errors into plain words, `transfer` brings one file and resumes it, `store`
knows where files lie, `download` does a whole repository, `verify` checks what is on disk against `manifest`, with or
without a network. What a Hub or a file says becomes one of the types in `names` and `model` first, and every file is
reached through `tree`, which does not leave its folder.
"""
