"""LoRA adapters on chats: `python scripts/examples/lora_chat.py [MODEL]` fine-tunes, and chats with
the result.
"""

import sys
from itertools import pairwise

from fastp3o import SFTConfig, train

LETTERS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
]

chats = [
    {
        "messages": [
            {"role": "user", "content": f"After {a}?"},
            {"role": "assistant", "content": f"{b}."},
        ]
    }
    for a, b in pairwise(LETTERS)
]
config = SFTConfig(
    model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B",
    output_dir="runs/chat",
    lora_rank=16,
    lora_dropout=0.05,
    learning_rate=1e-3,
    epochs=10,
    batch_size=4,
)
# runs/chat/adapter is what peft loads
result = train(config, train_data=chats[:-1], eval_data=chats[-1:])
model, tokenizer = result.model, result.tokenizer
prompt = tokenizer.apply_chat_template(
    chats[3]["messages"][:1], add_generation_prompt=True, return_tensors="pt"
)
response = model.generate(**prompt, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(response, skip_special_tokens=True))
