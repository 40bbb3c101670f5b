"""Is this machine ready to serve a recipe? One function a check, one line a result, a remedy for what is wrong.

`probe` is the only module that touches the machine; tests hand the checks a recorded one. `facts` combines what the
probe sees, `gpus`, `host`, `storage` and `software` judge it against `needs`, `runner` collects the verdicts.
"""
