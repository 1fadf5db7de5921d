"""The machinery of a training loop: `run.py` is around the steps, `minibatches.py` and `optimizer.py` make one."""
