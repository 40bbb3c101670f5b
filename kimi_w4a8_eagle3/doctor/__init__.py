"""Machine checks for a recipe: one function per check, one line per result, a remedy for each problem.

Only `probe` touches the machine; tests give the checks a recorded one. `facts` combines what the probe reads, `gpus`,
`host`, `storage` and `software` judge it against `needs`, and `runner` collects the verdicts.
"""
