"""The verbs of `kimi-w4a8` that measure or prepare: one module each, imported on first use."""

# Name and first line of help, in the order of `--help`, as in kimi_w4a8_eagle3.cli.
VERBS = {
    "rank": "Rank layouts of 8x MI325X for recorded traffic and latency limits, by simulation.",
    "quantize": "Quantize a target or a draft with AMD Quark, shard by shard.",
    "tune-moe": "Measure tile choices on this GPU and write the fastest into the table; rows of other shapes and GPUs "
    "stay.",
    "eval": "Accuracy with a verdict, and proof that speculation changes no answer.",
    "bench": "Measure a server: `kimi-w4a8 bench con2`, `con40`, or any workload of `kimi-w4a8 bench list`.",
    "accept": "Accept what this machine serves, in an hour on eight MI325X: a timetable, the stages, a page and a "
    "bundle.",
    "report": "Write one self-contained HTML page and SVG figures from finished runs, from this machine or another.",
}
