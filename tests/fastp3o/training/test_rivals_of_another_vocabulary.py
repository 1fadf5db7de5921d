"""A rival with another tokenizer answers as it does alone, and its texts are compared."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fastp3o import UserError, train
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.preferences import DPOConfig
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import WITH_TEMPLATE, save_family
from tests.fastp3o.runs import config, metrics

BY_NAME = {family.name: family for family in WITH_TEMPLATE}
WORDS = ["tree", "house", "river", "cloud"]
TEXTS = [{"prompt": f"Say {word}:"} for word in WORDS]
MESSAGES = [{"prompt": [{"role": "user", "content": f"Say {word}."}]} for word in WORDS]


class Noted:
    """A reward that compares, and remembers what it was asked about."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def better(self, prompts, firsts, seconds):
        self.pairs += zip(firsts, seconds, strict=True)
        return [
            0.5 + (len(a) > len(b)) / 4 - (len(a) < len(b)) / 4
            for a, b in zip(firsts, seconds, strict=True)
        ]


def models(folder: Path) -> tuple[str, str]:
    """A policy and a rival of two families, whose tokens, ends and templates differ."""
    return save_family(BY_NAME["qwen3"], folder / "policy")[0], save_family(
        BY_NAME["llama2"], folder / "rival"
    )[0]


def asked(model: str, folder: str, prompts: str, **changes) -> P3OConfig:
    settings = {
        "reward": "",
        "updates": 1,
        "prompts": prompts,
        "eval_prompts": prompts,
        "max_prompt_tokens": 100,
    }
    return config(model, folder, **(settings | changes))


def responses_alone(model: str, folder: str, prompts: str) -> list[str]:
    """What a model answers at a run's first evaluation, which has the seed of a rival's."""
    said: list[str] = []

    def score(prompts, responses):
        said.extend(responses)
        return [0.0] * len(responses)

    settings = asked(model, folder, prompts)
    train(settings, reward=score)
    return said[1 : 1 + len(WORDS)]  # after the trial before the run


@pytest.mark.parametrize("records", [TEXTS, MESSAGES], ids=["texts", "messages"])
def test_it_says_what_it_says_alone_by_its_own_template(workplace, records, capsys):
    policy, rival = models(workplace)
    prompts, noted = jsonl(workplace, records, "asked.jsonl"), Noted()
    settings = asked(policy, "run", prompts, rival=rival)
    train(settings, reward=noted.better)
    met = noted.pairs[1 : 1 + len(WORDS)]
    assert [second for _, second in met] == responses_alone(rival, "alone", prompts)
    assert [first for first, _ in met] == responses_alone(policy, "itself", prompts)
    assert {first for first, _ in met} != {second for _, second in met}
    start = metrics("run", "eval.jsonl")[0]
    points = [0.5 + (len(a) > len(b)) / 4 - (len(a) < len(b)) / 4 for a, b in met]
    assert start["win_rate"] == pytest.approx(sum(points) / len(points))
    assert "has another vocabulary: it reads prompts in its own tokens" in capsys.readouterr().out


def test_rewards_that_read_tokens_get_its_texts_in_the_policys(workplace):
    """The rival's values, and those of the policy, are of one tokenizer."""
    policy, rival = models(workplace)
    prompts, seen = jsonl(workplace, MESSAGES, "asked.jsonl"), []

    def by_tokens(prompts, responses, completion_ids):
        seen.extend(zip(responses, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    settings = asked(policy, "run", prompts, rival=rival)
    train(settings, reward=by_tokens)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    ours = seen[1 : 1 + len(WORDS)]
    assert [text for text, _ in ours] == responses_alone(rival, "alone", prompts)
    for text, ids in ours:
        assert (
            tokenizer.decode([number for number in ids if number != tokenizer.eos_token_id]) == text
        )
    assert any(ids for _, ids in ours)


def test_fixed_preferences_are_evaluated_against_it(workplace):
    policy, rival = models(workplace)
    pairs = [record | {"chosen": " a", "rejected": " b"} for record in TEXTS]
    settings = DPOConfig(
        model=policy,
        output_dir="dpo",
        train_data=jsonl(workplace, pairs, "pairs.jsonl"),
        epochs=1,
        batch_size=4,
        eval_prompts=jsonl(workplace, MESSAGES, "asked.jsonl"),
        max_prompt_tokens=100,
        max_response_tokens=6,
        precision="fp32",
        report_to="none",
        rival=rival,
        seed=3,
    )
    noted = Noted()
    train(settings, reward=noted.better)
    assert [second for _, second in noted.pairs[1:5]] == responses_alone(
        rival, "alone", settings.eval_prompts
    )


def test_an_environment_excludes_it(workplace):
    policy, rival = models(workplace)
    prompts = jsonl(workplace, MESSAGES, "asked.jsonl")

    class Echo:
        def reset(self, prompt):
            pass

        def step(self, text):
            return None, 0.0, True

    settings = asked(policy, "run", prompts, rival=rival, environment="a:B", max_turn_tokens=6)
    with pytest.raises(
        UserError, match=r"has another vocabulary than the policy .*, which --environment excludes"
    ):
        train(settings, environment=Echo, reward="environment")
    assert not Path("run/metrics.jsonl").exists()
