"""Whether a film review is positive, by which words and pairs of neighbors it has: a logistic
regression, which judges what a policy learned from a reward model of another kind.

    python scripts/polarity.py --train_data gold.jsonl --eval_data held_out.jsonl --output polarity.json
    FASTP3O_POLARITY=polarity.json fastp3o p3o --gold_reward scripts/polarity.py:polarity ...
"""

import json
import math
import os
import re
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.errors import UserError
from fastp3o.evaluation.interval import share_interval
from fastp3o.files import write_file
from fastp3o.script import run_script

WEIGHTS = "FASTP3O_POLARITY"  # the variable with the file that `polarity` reads


class PolarityConfig(Flags):
    """Pairs of a positive and a negative review: records with prompt, chosen and rejected."""

    train_data: str = required("JSON Lines file of pairs to learn from.")
    eval_data: str = required("JSON Lines file of held-out pairs.")
    output: str = required("JSON file of the weights, and of the accuracy on held-out pairs.")
    l2: float = option(1e-5, "Half of it weighs the weights' squared length in the loss.", above=0)


class Reviews(NamedTuple):
    """N prompts with their reviews, and whether each is positive."""

    texts: list[str]
    positive: list[bool]


def polarity(prompts: list[str], responses: list[str]) -> list[float]:
    """The log-odds that the reviews are positive: a reward function. Raises UserError if the
    variable FASTP3O_POLARITY does not name a file of weights.
    """
    path = os.environ.get(WEIGHTS)
    if not path or not Path(path).is_file():
        raise UserError(f"{WEIGHTS} must name a file that scripts/polarity.py wrote: {path!r}")
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return log_odds(texts, weights_of(path))


@cache
def weights_of(path: str) -> dict[str, float]:
    return json.loads(Path(path).read_text(encoding="utf-8"))["weights"]


def log_odds(texts: list[str], weights: dict[str, float]) -> list[float]:
    """The sum of a text's weights by the root of how many features it has: length is no merit."""
    every = (features(text) for text in texts)
    return [
        sum(weights.get(feature, 0.0) for feature in found) / math.sqrt(len(found) or 1)
        for found in every
    ]


def features(text: str) -> list[str]:
    """The words of a text and its pairs of neighbors, each once, in the order of the text."""
    words = re.findall(r"\w+(?:['-]\w+)*|[.,!?]", text.lower())
    return list(dict.fromkeys((*words, *map(" ".join, pairwise(words)))))


def main(config: PolarityConfig) -> None:
    reviews = read(config.train_data)
    weights = fitted(reviews, config)
    held_out = read(config.eval_data)
    positive, negative = np.array(log_odds(held_out.texts, weights)).reshape(2, -1)
    right = (np.sign(positive - negative) + 1) / 2
    low, high = share_interval(right, np.ones(len(right)))
    accuracy = {"accuracy": float(right.mean()), "accuracy_low": low, "accuracy_high": high}
    result = accuracy | {"pairs": len(right), "weights": weights}
    write_file(Path(config.output), json.dumps(result, ensure_ascii=False))
    print(
        f"{len(reviews.texts)} reviews, {len(weights)} words and pairs: accuracy {right.mean():.2f} "
        f"[{low:.2f}, {high:.2f}] of {len(right)} held-out pairs"
    )


def read(path: str) -> Reviews:
    """All positive reviews of a file, then all negative ones. Raises UserError if there is none."""
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if not records:
        raise UserError(f"{path} has no pair")
    texts = [one["prompt"] + one[label] for label in ("chosen", "rejected") for one in records]
    return Reviews(texts, [place < len(records) for place in range(len(texts))])


def fitted(reviews: Reviews, config: PolarityConfig) -> dict[str, float]:
    """Weights of a logistic regression, without a constant: there are as many positive reviews as
    negative ones.
    """
    import torch
    import torch.nn.functional as F

    every = [features(text) for text in reviews.texts]
    places = {feature: place for place, feature in enumerate(dict.fromkeys(chain(*every)))}
    bags = torch.tensor([places[feature] for feature in chain(*every)])
    lengths = [len(found) for found in every]
    starts = torch.tensor([0, *accumulate(lengths[:-1])])
    shares = torch.tensor(lengths, dtype=torch.float64).rsqrt()
    shares = shares.repeat_interleave(torch.tensor(lengths))
    positive = torch.tensor(reviews.positive, dtype=torch.float64)
    weights = torch.zeros(len(places), 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = F.embedding_bag(bags, weights, starts, mode="sum", per_sample_weights=shares)
        error = F.binary_cross_entropy_with_logits(logits.squeeze(1), positive)
        total = error + config.l2 / 2 * weights.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return dict(zip(places, weights.squeeze(1).tolist(), strict=True))


if __name__ == "__main__":
    run_script(lambda: main(parse(PolarityConfig)))
