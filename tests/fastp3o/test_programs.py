"""Programs that call `train`: their handlers, forks and models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from fastp3o import UserError, train
from tests.fastp3o.runs import config, vowels

PROMPTS = [
    {"prompt": f"Say {word}:"}
    for word in ("tree", "house", "river", "cloud", "stone", "apple", "eagle", "ö")
]


def run(tiny_model, folder, reward, **changes):
    settings = {"prompts": "", "reward": "", "updates": 2, "samples_every": 1} | changes
    return train(config(tiny_model, folder, **settings), prompts=PROMPTS, reward=reward)


def test_a_model_of_which_a_copy_would_lack_code_or_compute_or_train_otherwise_is_refused(
    tiny_model, workplace
):
    class Mine(LlamaForCausalLM):
        pass

    def begin(kind=AutoModelForCausalLM, change=lambda model: None, reward=vowels, **settings):
        model = kind.from_pretrained(tiny_model)
        change(model)
        train(
            config("", "run", prompts="", reward="", **settings),
            model=model,
            prompts=PROMPTS,
            reward=reward,
        )

    changes = {
        r"a forward method of its own in model\.layers\.0": lambda model: setattr(
            layer(model), "forward", print
        ),
        "a hook in lm_head": lambda model: model.lm_head.register_forward_hook(print),
        r"a Tanh of its own in model\.layers\.0": lambda model: setattr(
            layer(model).mlp, "act_fn", torch.nn.Tanh()
        ),
        r"another scaling in model\.layers\.0": lambda model: setattr(
            layer(model).self_attn, "scaling", 0.1
        ),
        r"a hook in model\..*norm\.weight": lambda model: layer(
            model
        ).input_layernorm.weight.register_hook(torch.abs),
        "frozen weights beside others": lambda model: layer(model).requires_grad_(False),
    }
    for what, change in changes.items():
        with pytest.raises(UserError, match=f"model has {what}"):
            begin(change=change)
    with pytest.raises(UserError, match="model has a class of its own, Mine"):
        begin(Mine)
    judge = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    judge.score.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(UserError, match="model has a hook in score"):
        begin(reward=judge)
    # transformers' hook changes nothing
    begin(change=lambda model: model.gradient_checkpointing_enable(), updates=1)


def layer(model):
    return model.model.layers[0]
