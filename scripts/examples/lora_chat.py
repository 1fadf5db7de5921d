"""LoRA adapters on chats: `python scripts/examples/lora_chat.py [MODEL]` fine-tunes, and chats with
the result.
"""

import sys
from itertools import pairwise

from transformers import TextGenerationPipeline

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
generate = TextGenerationPipeline(model=result.model, tokenizer=result.tokenizer)
(answered,) = generate(chats[3]["messages"][:1], max_new_tokens=8)
print(answered["generated_text"][-1]["content"])
