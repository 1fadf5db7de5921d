"""Every kernel once on a small case, for a memory checker: compute-sanitizer python benchmarks/small_case.py"""

import torch

from fastp3o_kernels import linear_logprobs, linear_p3o_loss, logits_p3o_loss, sequence_logprobs

LENGTHS, V, D = [3, 5, 1, 7], 5003, 64


def main() -> None:
    device = torch.device("cuda")
    rows, pairs = sum(LENGTHS), len(LENGTHS) // 2
    hidden = torch.randn(rows, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(V, device=device, requires_grad=True)
    labels = torch.randint(V, (rows,), device=device)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    rewards = torch.randn(pairs, 2, device=device)
    budget = 8 * 6 * 5008
    with torch.no_grad():
        logprobs = linear_logprobs(hidden, weight, labels, bias=bias, softcap=30.0, memory_budget=budget)
        old = sequence_logprobs(logprobs, cu_seqlens).view(-1, 2)
    given = labels, cu_seqlens, old, old, rewards
    for clipping in ("joint", "separate", "none", "token"):
        tokens = {"old_token_logprobs": logprobs} if clipping == "token" else {}
        for on_policy in (False, True):
            settings = {"clipping": clipping, "on_policy": on_policy, **tokens}
            head = {"bias": bias, "softcap": 30.0, "memory_budget": budget}
            (2 * linear_p3o_loss(hidden, weight, *given, **head, **settings).loss).backward()
            logits = (hidden @ weight.T).detach().requires_grad_()
            logits_p3o_loss(logits, *given, **settings).loss.backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
