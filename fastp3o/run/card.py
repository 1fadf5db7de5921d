"""The README.md of a saved model: what it began as, what trained it, and how it did in the last
evaluation.

It holds no paths but the last part of a local name, no addresses and no keys, so it can be
published. A resumed run writes the same bytes as an unbroken one.
"""

import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from fastp3o import __version__
from fastp3o.config import Flags, ModelConfig
from fastp3o.data.sources import FILE_SUFFIXES
from fastp3o.rewards.config import RewardConfig, cascaded, is_endpoint, is_function
from fastp3o.run.log import read
from fastp3o.sources import Source

CARD = "README.md"
CITATION = """@article{wu2023pairwise,
  title = {Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for {LLM} Alignment},
  author = {Wu, Tianhao and Zhu, Banghua and Zhang, Ruoyu and Wen, Zhaojin and Ramchandran, Kannan and Jiao, Jiantao},
  journal = {arXiv preprint arXiv:2310.00212},
  year = {2023}
}"""
# Of a model, or of a data set and its configuration.
HUB_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::[\w.-]+)?")
PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")
LICENSE = ("license", "license_name", "license_link")  # in a card's metadata
DATA = ("train_data", "prompts", "ptx_data")
ALWAYS = {
    *(
        "learning_rate",
        "batch_size",
        "epochs",
        "updates",
        "prompts_per_update",
        "responses_per_prompt",
    ),
    *("inner_epochs", "kl_coef", "beta", "max_response_tokens", "seed"),
}


@dataclass(frozen=True)
class Training:
    """The facts about a run for its model card. stage: the loop's label. step: the last one, of
    `steps`. evaluations: eval.jsonl.
    """

    config: ModelConfig
    stage: str
    step: int
    steps: int
    precision: str
    evaluations: Path

    def card(self, *, classifies: bool, adapter: bool) -> str:
        """The card of a model, or of a LoRA adapter alone. classifies: whether it is a reward
        model.
        """
        config, start = self.config, str(self.config.model)
        objective = str(config.values().get("objective", self.stage))
        base, license = ancestry(start)
        more_tags = [*([] if self.stage == "SFT" else ["rlhf"]), *(["lora"] if adapter else [])]
        data = ModelCardData(
            base_model=base,
            base_model_relation=base and ("adapter" if adapter else "finetune"),
            library_name="peft" if adapter else "transformers",
            pipeline_tag="text-classification" if classifies else "text-generation",
            datasets=sorted({name for source in data_names(config) if (name := hub_name(source))})
            or None,
            tags=["fastp3o", re.sub(r"\W|_", "-", objective.lower()), *more_tags],
            **license,
        )
        title = f"{base or plain(Path(start).name)}, trained with {objective}"
        text = "\n\n".join(
            filter(
                None,
                [
                    f"# {title}",
                    self.origin(objective, base, license, adapter),
                    *self.tables(),
                    usage(classifies, adapter),
                ],
            )
        )
        return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n"))

    def origin(
        self, objective: str, base: str | None, license: dict[str, Any], adapter: bool
    ) -> str:
        """A list of what the model comes from. base, license: of `ancestry`."""
        config = self.config
        summary = type(config).summary.split("\n")[0]
        paper = PAPER.search(summary)
        name, _, what = summary.partition(": ")
        objective = f"{objective}, {name}: {what.split('. ')[0].rstrip('.')}" if what else objective
        rewards = named_rewards(config)
        through = "" if hub_name(str(config.model)) or base is None else f"{base}, by way of "
        terms = license.get("license_name") or license.get("license")
        named = {
            "base model": [through + public_name(str(config.model))],
            "its license": [" ".join(filter(None, [terms, license.get("license_link")]))]
            if terms
            else [],
            "its revision": [config.model_revision] if config.model_revision else [],
            "objective": [objective]
            + ([f"[paper](https://arxiv.org/abs/{paper[1]})"] if paper else []),
            "data": [public_name(name) for name in data_names(config)],
            "reward": rewards,
            "steps": [f"{self.step} of {self.steps}, in precision {self.precision}"],
            "made by": [f"fastp3o {__version__}"],
        }
        kind = (
            "A LoRA adapter, which peft loads over its base."
            if adapter
            else "A whole model, trained from its base."
        )
        return "\n".join(
            [
                kind,
                "",
                *(f"- {name}: {', '.join(values)}" for name, values in named.items() if values),
            ]
        )

    def tables(self) -> list[str]:
        evaluation: dict[str, Any] = [{}, *read(self.evaluations)][-1]
        step = evaluation.pop("step", None)
        evaluated = {
            name: f"{value:.4g}" for name, value in evaluation.items() if value is not None
        }
        return [
            "## Options\n\n" + table("option", "value", options(self.config)),
            f"## Evaluation after step {step}\n\n" + table("metric", "value", evaluated)
            if evaluated
            else "",
        ]


def options(config: Flags) -> dict[str, Any]:
    """The numbers and choices that matter, where they are not the default. No text, which may name
    paths or keys.
    """
    chosen = {}
    values = config.values()
    for flag in fields(config):
        value = values[flag.name]
        plain = isinstance(value, int | float) or (
            isinstance(value, str) and "choices" in flag.metadata
        )
        matters = flag.name in ALWAYS or (flag.default is not MISSING and value != flag.default)
        if plain and matters and flag.name not in ("resume", "precision"):
            # The precision stands above.
            chosen[flag.name] = value
    return chosen


def named_rewards(config: Flags) -> list[str]:
    """The rewards that were maximized: their public names, and their weights where there are
    several.
    """
    if not isinstance(config, RewardConfig) or not config.rewards:
        return []
    names = [" else ".join(map(public_reward, cascaded(name))) for name in config.rewards]
    if config.weights == [1.0]:
        return names
    return [f"{weight:g} × {name}" for name, weight in zip(names, config.weights, strict=True)]


def public_reward(name: Source) -> str:
    return (
        f"the Python function `{plain(Path(str(name)).name)}`"
        if is_function(name)
        else public_name(str(name))
    )


def usage(classifies: bool, adapter: bool) -> str:
    """Code that loads what is saved, and the paper to cite."""
    task = "SequenceClassification" if classifies else "CausalLM"
    library, loader = (
        ("peft", f"AutoPeftModelFor{task}") if adapter else ("transformers", f"AutoModelFor{task}")
    )
    code = [
        f"from {library} import {loader}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {loader}.from_pretrained("FOLDER OR NAME")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER OR NAME")',
    ]
    return "\n".join(
        [
            "## Use",
            "",
            "```python",
            *code,
            "```",
            "",
            "## Citation",
            "",
            "```bibtex",
            CITATION,
            "```",
        ]
    )


def table(first: str, second: str, rows: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"| {first} | {second} |",
            "| --- | --- |",
            *(f"| `{key}` | {rows[key]} |" for key in rows),
        ]
    )


def data_names(config: Flags) -> list[str]:
    values = [str(value) for option in DATA if (value := config.values().get(option))]
    return [
        name.strip()
        for value in values
        for name in ([value] if Path(value).exists() else value.split(","))
    ]


def hub_name(name: str) -> str | None:
    """The name of a model or a data set on the hub; None for what is a file, a folder or an
    endpoint.
    """
    match = HUB_NAME.fullmatch(name)
    return (
        None if match is None or name.endswith(FILE_SUFFIXES) or Path(name).exists() else match[1]
    )


def ancestry(model: str) -> tuple[str | None, dict[str, Any]]:
    """The model of the hub that a model was trained from, through any chain of runs, and the
    license that binds all of them: `license`, `license_name` and `license_link`, as far as the card
    in the model's folder says so. Terms such as Gemma's and Llama's travel with whatever is made of
    the model.
    """
    if name := hub_name(model):
        return name, {}
    try:
        stated = metadata_load(Path(model) / CARD)
    except (
        OSError,
        ValueError,
        yaml.YAMLError,
    ):
        # No folder, no card, or one that is not in the hub's form.
        stated = None
    stated = stated if isinstance(stated, dict) else {}
    base = stated.get("base_model")
    bases = [base] if isinstance(base, str) else base if isinstance(base, list) else []
    names = [name for name in bases if isinstance(name, str) and HUB_NAME.fullmatch(name)]
    license: dict[str, Any] = {name: str(stated[name]) for name in LICENSE if stated.get(name)}
    return (names[0] if len(names) == 1 else None), license


def public_name(name: str) -> str:
    """The name to publish: without what only its owner should know."""
    if is_endpoint(name):
        return "an endpoint"
    return hub_name(name) or f"`{plain(Path(name).name)}`, a local one"


def plain(name: str) -> str:
    """A name on one line, without marks of HTML and Markdown."""
    return re.sub(r"[^\w.,:+-]+", " ", name).strip() or "unnamed"
