"""The HTTP server: checks of requests, conversations of each API, and parsers of answers."""
