"""Cards of saved models: what they say, what they must not, and that they load as the hub's."""

from pathlib import Path

from huggingface_hub import ModelCard

from fastp3o import __version__
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.run.card import Training
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import config


def card(folder: str) -> ModelCard:
    return ModelCard.load(Path(folder) / "README.md")


def made(settings: RewardModelConfig | P3OConfig, stage: str = "SFT", **kind: bool) -> str:
    training = Training(settings, stage, 3, 7, "fp32", Path("eval.jsonl"))
    return training.card(**({"classifies": False, "adapter": False} | kind))


def test_a_run_leaves_a_card_with_each_model(workplace, tiny_model):
    settings = {"updates": 2, "lora_rank": 2, "save_every": 1, "eval_prompts": "prompts.jsonl", "kl_coef": 0.125}
    train(config(tiny_model, "run", **settings))
    for folder in ("model", "adapter", "checkpoint-000001", "checkpoint-000001/adapter"):
        adapter = folder.endswith("adapter")
        found = card(f"run/{folder}")
        assert found.data.tags == ["fastp3o", "p3o", "rlhf", *(["lora"] if adapter else [])]
        assert found.data.library_name == ("peft" if adapter else "transformers")
        assert found.data.pipeline_tag == "text-generation"
        assert (found.data.base_model, found.data.datasets, found.data.license) == (None, None, None)
        step = 1 if "checkpoint" in folder else 2
        assert f"- steps: {step} of 2, in precision fp32" in found.text
        assert (
            "- objective: p3o, P3O (arXiv 2310.00212): clipped differences of rewards, "
            "[paper](https://arxiv.org/abs/2310.00212)\n" in found.text
        )
        assert "- reward: a Python function" in found.text
        assert f"fastp3o {__version__}" in found.text
        assert "| `kl_coef` | 0.125 |" in found.text
        assert ("## Evaluation after step 2" in found.text) == (step == 2)
        assert "| `reward` | " in found.text
        # Names alone.
        assert f"`{Path(tiny_model).name}`" in found.text
        assert "`prompts.jsonl`" in found.text
        assert str(Path(tiny_model).parent) not in str(found)
        assert "/tmp" not in str(found)
        assert "run/" not in str(found)


def test_names_of_the_hub_are_metadata(workplace):
    settings = {"model": "organisation/model", "output_dir": "secret", "prompts": "b/data:config,prompts.jsonl,a/data"}
    settings |= {"reward": "organisation/judge"}
    found = ModelCard(made(P3OConfig(**settings), adapter=True))
    assert found.data.base_model == "organisation/model"
    assert found.data.base_model_relation == "adapter"
    assert found.data.datasets == ["a/data", "b/data"]
    assert "- reward: organisation/judge" in found.text
    assert "`prompts.jsonl`, a local one" in found.text
    whole = ModelCard(made(P3OConfig(**settings)))
    assert whole.data.base_model_relation == "finetune"
    assert whole.data.pipeline_tag == "text-generation"
    judging = RewardModelConfig(model="m", output_dir="o", train_data="t", centring=0.5)
    judge = ModelCard(made(judging, "reward model", classifies=True))
    assert judge.data.pipeline_tag == "text-classification"
    assert judge.data.tags == ["fastp3o", "reward-model", "rlhf"]
    assert "| `centring` | 0.5 |" in judge.text


def test_addresses_keys_and_folders_stay_out(workplace):
    settings = {"model": "/home/me/base", "output_dir": "/home/me/secret", "prompts": "/home/me/data.jsonl"}
    settings |= {"reward": "https://me:hunter2@internal.example/score?key=hunter2", "reward_timeout": 7.0}
    settings |= {"sampler": "vllm", "vllm_url": "http://internal.example:8000", "report_to": "none"}
    text = made(P3OConfig(**settings))
    assert not any(secret in text for secret in ("hunter2", "internal.example", "home", "secret"))
    assert "- reward: an endpoint" in text
    assert "`data.jsonl`" in text
    assert "vllm" in text  # the sampler, a choice
