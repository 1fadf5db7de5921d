"""Processor milliseconds of a token of the policy's own in responses of several turns: kept keys
beside rounds.

    python -m benchmarks.turns

Rounds compute each trajectory's whole context again for every turn. Both ways sample 4 trajectories
to each of 6 prompts, in turns with each other, on one thread. Writes results/turns.json.
"""

import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.environment import environment
from benchmarks.training_shapes import llama
from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.kept import KeptTurns
from fastp3o.rollouts.turns.sampler import TrajectorySampler

P, K, V, TIMES = 6, 4, 2048, 5


class Shape(NamedTuple):
    """Tokens of a prompt, turns, tokens of a turn at most, and of an observation."""

    prompt: int
    turns: int
    turn: int
    observation: int


SHAPES = [
    Shape(30, 5, 4, 2),
    Shape(150, 4, 24, 12),
    Shape(150, 8, 24, 12),
    Shape(600, 4, 24, 12),
    Shape(150, 4, 24, 60),
]


class Numbers(PreTrainedTokenizerFast):
    """A tokenizer whose texts are numbers."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer_object=Tokenizer(WordLevel({"<end>": 2}, unk_token="<end>")),
            eos_token="<end>",
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        return " ".join(map(str, token_ids))


class Endless:
    """Answers every turn."""

    def reset(self) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool]:
        return "answer", 0.0, False


def samplers(shape: Shape) -> dict[str, TrajectorySampler]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(128, 384, 4, 4, 4, V))
    # Any of so many tokens ends a turn: they differ in length.
    model.generation_config.eos_token_id = list(range(2, 2 + V // shape.turn))
    policy = PackedModel(model)
    made: dict[str, TrajectorySampler] = {}
    for name in ("rounds", "kept"):
        first, further = (
            EngineSampler(policy, Numbers(), max_response_tokens=shape.turn, batch_size=n)
            for n in (P, P * K)
        )
        longest = shape.turns * (shape.turn + shape.observation)

        def observe(text: str, last: int, given: str = "", *, room: int = 0) -> list[int]:
            return [V // 2 + (7 * place + last) % 1000 for place in range(shape.observation)]

        sampler = partial(
            TrajectorySampler,
            tokenizer=Numbers(),
            environments=Environments("endless", Endless),
            observe=observe,
            max_turns=shape.turns,
            longest=longest,
        )
        if name == "kept":
            kept = KeptTurns(first, further, longest)
            made[name] = sampler(kept, kept.go_on, end=kept.end)
        else:
            made[name] = sampler(first, further)
    return made


def measure(shape: Shape) -> dict[str, Any]:
    draw = random.Random(0)
    prompts = [
        Prompt("", [draw.randrange(V // 2, V) for _ in range(shape.prompt)], number)
        for number in range(P)
    ]
    both = samplers(shape)
    times: dict[str, list[float]] = {"rounds": [], "kept": []}
    same = []
    for seed in range(TIMES + 1):  # the first warms up
        ids = {}
        for name, sampler in both.items():
            before = time.process_time()
            groups = sampler(prompts, K, seed)
            times[name].append((time.process_time() - before) * 1e3 / own_tokens(groups))
            ids[name] = [response.ids for group in groups for response in group.responses]
        same.append(ids["rounds"] == ids["kept"])
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return (
        shape._asdict()
        | medians
        | {"gain": medians["rounds"] / medians["kept"], "same_tokens": all(same)}
    )


def own_tokens(groups: list[Group]) -> int:
    return sum(
        end - start
        for group in groups
        for response in group.responses
        for start, end in response.spans
    )


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        results.append(measure(shape))
        print(json.dumps(results[-1]), flush=True)
    lines = ",\n".join(map(json.dumps, results))
    path = Path(__file__).parent / "results" / "turns.json"
    path.write_text(
        f'{{"environment": {json.dumps(environment())}, "benchmarks": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
