"""Machine checks for a recipe: one function per check, one line per result, a remedy for each problem.

Only `probe` touches the machine; tests give the checks a recorded one. `facts` combines what it reads with the recipe's
arguments, `gpus`, `host`, `storage` and `software` judge them, and `runner` collects the verdicts.
"""
