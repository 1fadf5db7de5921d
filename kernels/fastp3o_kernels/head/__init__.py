"""Hidden states and a head -> the log-probability of each label, and gradients, never all logits at once.

head.py               public: Head, the weight and what else turns hidden states into logits
linear_logprobs.py    public: hidden states, head and labels -> log-probabilities of tokens
linear_loss.py        public: hidden states, head and an objective of groups of responses -> its loss
groups.py             public: Groups, what an objective sees
dtypes.py             dtypes of the head's matrix products
chunks.py             a memory budget -> the tokens that go through the head together
forward.py            the head applied span by span, within the budget
backward.py           gradients of hidden states, weight and bias
waiting_tokens.py     tokens whose gradients of logits wait for their matrix products
fp16_scale.py         the scale of gradients of logits in fp16
gradient_scaling.py   gradients times the incoming gradient of a loss
scale_kernel.py       Triton: the same, without a pass over memory where that is 1
eager.py              all logits as one PyTorch graph: the tests' oracle
"""
