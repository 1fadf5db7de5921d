"""Sampling without training: responses that their rewards choose, as data for the other stages.

config.py     its options
loop.py       responses and rewards to all prompts, batch by batch
setup.py      what it works with, and the folder that it goes on with
samples.py    the file of all responses and rewards, which a resumed run goes on with
selection.py  which of them are kept, and the records that they become
report.py     what is written and said of those
"""
