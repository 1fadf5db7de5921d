"""Logits -> the log-probability of each label and of each sequence, and their gradients. A row is one token's logits.

transform.py            what a head does to its matrix products: bias, soft cap, temperature
labels.py               labels that are ignored
token_logprobs.py       public: logits and labels -> log-probabilities of tokens
sequence_logprobs.py    public: log-probabilities of tokens -> of sequences
eager.py                both as PyTorch graphs: the tests' oracle
in_torch.py             forward and backward passes over rows in PyTorch, a few rows at a time
inplace.py              a gradient that takes the memory of the logits
logits_kernel.py        Triton: the forward pass over rows, and the backward pass
on_policy_kernel.py     Triton: both in one launch, where coefficients are known beforehand
sequence_kernel.py      Triton: sums over sequences
"""
