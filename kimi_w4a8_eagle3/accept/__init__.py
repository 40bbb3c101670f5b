"""The first hour on a real machine: stages that go on where they stopped, and a page of what they proved.

`stages` calls what the rest of the package has, `journal` keeps what was found, `kernel_stage` is a process of its own,
`claims` turns the column "not proved" of docs/verified.md into rows.
"""
