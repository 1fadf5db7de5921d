"""Makes the steps: what a script or `train` runs. loop.py is the online algorithm from top to
bottom, supervised.py the loop of fixed data; microbatches.py makes an optimizer step of either.
"""
