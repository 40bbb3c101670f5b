"""Download a checkpoint once, completely and verified.

huggingface_hub lists, transfers, caches and hashes. `hub` checks the names in the Hub's answers and explains errors,
`snapshot` knows what lies in the cache, and `download` does the whole.
"""
