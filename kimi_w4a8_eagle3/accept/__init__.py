"""First-hour checks on a real machine: stages that resume where they stopped, and a page of their results.

`stages` calls the rest of the package, `journal` keeps the results, `kernel_stage` runs in its own process, and
`claims` turns the column "not proved" of docs/verified.md into rows.
"""
