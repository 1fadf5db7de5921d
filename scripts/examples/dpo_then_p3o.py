"""DPO on given preferences, then P3O on fresh responses: `python scripts/examples/dpo_then_p3o.py
[MODEL]`.
"""

import sys

from fastp3o import DPOConfig, P3OConfig, train

THINGS = ["the sea", "a lighthouse", "rain", "an old clock", "bread", "the moon", "a train", "snow"]

prompts = [{"prompt": f"Describe {thing} in one short sentence.\n"} for thing in THINGS]
preferences = [
    record
    | {"chosen": f"I like {thing}.", "rejected": f"It is {thing}! It is {thing}! It is {thing}!"}
    for record, thing in zip(prompts, THINGS, strict=True)
]


def short_sentence(prompts: list[str], responses: list[str]) -> list[float]:
    return [response.strip().endswith(".") - 0.01 * len(response) for response in responses]


model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B-Base"
dpo = train(
    DPOConfig(model=model, output_dir="runs/dpo", epochs=4, batch_size=4), train_data=preferences
)
print(dpo.history[["loss", "accuracy", "margin"]])

config = P3OConfig(
    model="runs/dpo/model",
    output_dir="runs/dpo_p3o",
    updates=10,
    prompts_per_update=8,
    eval_every=5,
)
p3o = train(config, prompts=prompts, eval_prompts=prompts, reward=short_sentence)
print(p3o.history[["reward", "kl", "response_length"]])
