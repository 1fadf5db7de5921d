"""Training from Python: what the scripts do, on objects.

train.py    a configuration and objects to a finished run
result.py   the folder of a finished run to a model, a tokenizer and a table

from fastp3o import P3OConfig, train

result = train(
    P3OConfig(model="Qwen/Qwen3-0.6B", output_dir="runs/p3o", updates=100),
    prompts=[{"prompt": "How are you?"}, ...],
    reward=lambda prompts, responses: [float(len(response)) for response in responses],
)
result.model, result.tokenizer, result.history
"""

from fastp3o.api.result import Result
from fastp3o.api.train import train

__all__ = ["Result", "train"]
