"""Log-probabilities of the responses to each prompt -> P3O's loss (arXiv 2310.00212) and its gradients.

settings.py           public: P3OSettings, the numbers that define the objective
output.py             public: P3OLossOutput, a loss and its metrics
losses.py             public: P3O's loss from log-probabilities of responses or of tokens
logits_p3o_loss.py    public: the same from logits
linear_p3o_loss.py    public: the same from hidden states and a head
pairs.py              what is known of the responses beside the policy's log-probs, checked
eager.py              the loss as a PyTorch graph: the paper's formulas, and the tests' oracle
pair_kernel.py        Triton: loss, metrics and the gradient of every token in one launch
coefficients.py       loss, metrics and the gradient of every token, with either
"""
