"""The verbs of `kimi-w4a8` that measure or prepare: one module each, imported on first use."""

# The same table as in kimi_w4a8_eagle3.cli: groups, and the first line of help and an example of each verb.
VERBS = {
    "first day": {"accept": ("Accept what this machine serves: stages, a page and a bundle.", "accept --recipe agent")},
    "measure": {
        "bench": ("Measure a server: `kimi-w4a8 bench con2`, or another workload.", "bench con2 --recipe agent"),
        "eval": ("Accuracy with a verdict, and proof that drafts change nothing.", "eval gsm8k --recipe agent"),
        "report": ("Write one HTML page and SVG figures from finished runs.", "report runs/RUN"),
    },
    "models": {
        "quantize": ("Quantize a target or a draft with AMD Quark, shard by shard.", "quantize w4a8-target SRC DST"),
        "draft": ("A draft for your traffic: collect, train, compare, switch.", "draft collect FOLDER --share 0.1"),
        "tune-moe": ("Measure tile choices on this GPU, and write the fastest.", "tune-moe --output tiles.json"),
    },
}
