"""P3O on prompts and a reward of your own: `python scripts/examples/own_reward.py [MODEL]` learns
to add.
"""

import sys

from fastp3o import P3OConfig, train


def first_word_is_answer(
    prompts: list[str], responses: list[str], answer: list[int]
) -> list[float]:
    """answer: a column of the records."""
    return [
        float(response.split()[:1] == [str(right)])
        for response, right in zip(responses, answer, strict=True)
    ]


sums = [
    {"prompt": f"Question: {a} + {b}\nAnswer:", "answer": a + b}
    for a in range(10, 40)
    for b in range(10, 40)
]
config = P3OConfig(
    model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B-Base",
    output_dir="runs/sums",
    updates=20,
    prompts_per_update=16,
    responses_per_prompt=4,
    max_response_tokens=8,
    eval_every=10,
    keep_best="reward",
)
result = train(config, prompts=sums[::2], eval_prompts=sums[1::36], reward=first_word_is_answer)
print(result.history[["reward", "kl", "eval/reward"]])
