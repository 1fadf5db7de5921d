"""Every kernel once on a small case, for a memory checker: compute-sanitizer python benchmarks/small_case.py"""

import torch

from fastp3o_kernels import (
    Head,
    P3OSettings,
    linear_logprobs,
    linear_p3o_loss,
    logits_p3o_loss,
    sequence_logprobs,
)

LENGTHS, V, D = [3, 5, 1, 7], 5003, 64


def main() -> None:
    device = torch.device("cuda")
    tokens, pairs = sum(LENGTHS), len(LENGTHS) // 2
    hidden = torch.randn(tokens, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(V, device=device, requires_grad=True)
    labels = torch.randint(V, (tokens,), device=device)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    rewards = torch.randn(pairs, 2, device=device)
    head, budget = Head(weight, bias=bias, softcap=30.0), 8 * 6 * 5008
    with torch.no_grad():
        logprobs = linear_logprobs(hidden, head, labels, memory_budget=budget)
        old = sequence_logprobs(logprobs, cu_seqlens).view(-1, 2)
    for clipping in ("joint", "separate", "none", "token"):
        old_tokens = {"old_token_logprobs": logprobs} if clipping == "token" else {}
        for old_logprobs, chosen in ((old, old_tokens), (None, {})):
            given = labels, cu_seqlens, old_logprobs, old, rewards, P3OSettings(clipping=clipping)
            (2 * linear_p3o_loss(hidden, head, *given, **chosen, memory_budget=budget).loss).backward()
            logits = (hidden @ weight.T).detach().requires_grad_()
            logits_p3o_loss(logits, *given, **chosen).loss.backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
