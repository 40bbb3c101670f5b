"""The laboratory: everything that measures or prepares what kimi_w4a8_eagle3 serves.

It imports the serving package, which never imports it. The command line finds its verbs by the entry point
`kimi_w4a8_eagle3.verbs`.
"""
