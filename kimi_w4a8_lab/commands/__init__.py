"""The verbs of `kimi-w4a8` that measure or prepare: one module each, imported on first use."""

# Name and first line of help, in the order of `--help`, as in kimi_w4a8_eagle3.cli.
VERBS = {
    "quantize": "Quantize a target or a draft with AMD Quark, shard by shard.",
    "tune-moe": "Measure tile choices on this GPU, and write the fastest.",
    "eval": "Accuracy with a verdict, and proof that drafts change nothing.",
    "bench": "Measure a server: `kimi-w4a8 bench con2`, or another workload.",
    "draft": "A draft for your traffic: collect, train, compare, switch.",
    "accept": "Accept what this machine serves: stages, a page and a bundle.",
    "report": "Write one HTML page and SVG figures from finished runs.",
}
