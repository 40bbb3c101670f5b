"""Decoding: the target's token at every position, and grammars that wait for the end of thinking."""
