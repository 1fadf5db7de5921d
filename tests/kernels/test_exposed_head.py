"""The loss within a model's forward call: bare, with adapters, under DDP and FSDP2, and what is
refused.
"""

import warnings
from copy import deepcopy
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    RobertaForCausalLM,
)

from fastp3o_kernels import expose_head, linear_logprobs
from fastp3o_kernels.exposed_head import model_head
from tests.fastp3o.together import together
from tests.kernels import exposed_heads
from tests.kernels.exposed_heads import CONFIGS, IDS, SIZES, gradients, p3o_of, tiny_causal_lm


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_models_own_head(name):
    model = expose_head(tiny_causal_lm(name)).eval()
    model.get_output_embeddings().weight.data.mul_(20)  # a soft cap shows
    logits = model(IDS).logits
    expected = logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None]).squeeze(2)

    def head_loss(hidden, head):
        return linear_logprobs(hidden[:, :-1].flatten(0, 1), head, IDS[:, 1:].flatten())

    torch.testing.assert_close(model(IDS, head_loss=head_loss).view(expected.shape), expected)


@pytest.mark.parametrize(
    ("settings", "temperature", "softcap"),
    [
        *(({name: 4.0}, 4.0, None) for name in ("logits_scaling", "logits_mup_width_multiplier")),
        *(
            ({name: 4.0}, 0.25, None)
            for name in ("logit_scale", "lm_head_multiplier", "output_multiplier")
        ),
        *(
            ({name: 2.0}, 1.0, 2.0)
            for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        ),
        ({"output_multiplier": 4.0, "final_logit_softcapping": 2.0}, 0.25, 0.5),
        ({"logits_scaling": 4.0, "logits_soft_cap": 2.0}, 4.0, 8.0),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, 0.25, None),
    ],
    ids=str,
)
def test_scales_and_soft_caps_are_read_under_each_familys_names(settings, temperature, softcap):
    model = tiny_causal_lm("llama")
    for name, value in settings.items():
        setattr(model.config, name, value)
    head = model_head(model)
    assert (head.temperature, head.softcap) == (temperature, softcap)


class Doubled(LlamaForCausalLM):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = 2 * output.logits
        return output


class Capped(LlamaForCausalLM):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        # which the logits of a new model do not reach
        output.logits = 30 * (output.logits / 30).tanh()
        return output


class Moved(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda head, given: (given[0].roll(1, -1),))


class Pictured(LlamaForCausalLM):
    def forward(self, *arguments, pixels, **options):
        return super().forward(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Doubled, r"scales, caps or masks its logits .*\(soft cap None, divided by 1\)"),
        (Capped, "scales, caps or masks"),
        (Moved, "its head takes something else than the last hidden states"),
        (Pictured, "a trial on 3 tokens failed with: .*pixels"),
        (RobertaForCausalLM, "its head takes something else than the last hidden states"),
    ],
)
def test_logits_that_are_made_otherwise_are_refused(kind, reason):
    sizes = SIZES | {"intermediate_size": 24}
    model = kind(
        kind.config_class(
            **sizes, **({} if issubclass(kind, LlamaForCausalLM) else {"is_decoder": True})
        )
    )
    model = expose_head(model)
    with pytest.raises(
        ValueError, match=rf"losses would be wrong with {kind.__name__}: .*{reason}"
    ):
        model(**p3o_of(slice(0, 1)))
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_another_head(dtype):
    for name in ("gemma2", "granite", "gpt2"):
        assert expose_head(tiny_causal_lm(name).to(dtype))(**p3o_of(slice(0, 1))).isfinite()
        with torch.autocast("cpu", dtype):
            assert expose_head(tiny_causal_lm(name))(**p3o_of(slice(0, 1))).isfinite()


def test_the_trial_is_made_once_and_draws_no_random_numbers():
    config = CONFIGS["gpt2"]()
    config.resid_pdrop = 0.5
    model = expose_head(AutoModelForCausalLM.from_config(config)).train()
    calls, found = [], []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        torch.manual_seed(1)
        found.append(torch.stack([model(**p3o_of(slice(0, 4))), torch.rand(())]))
        assert all(module.training for module in model.modules())
        assert len(calls) == 1
    assert torch.equal(*found)


def test_exposing_twice_is_exposing_once():
    model = tiny_causal_lm("llama")
    expected = model(IDS).logits
    loss = expose_head(model)(**p3o_of(slice(0, 4)))

    # Some trainers wrap forward like this.
    def around(self, *arguments, before=model.forward, **options):
        return before(*arguments, **options)

    model.forward = MethodType(around, model)
    model._original_forward = model.forward  # prepared by accelerate since
    assert expose_head(model) is model
    assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(model(**p3o_of(slice(0, 4))), loss)


def test_adapters_learn_and_nothing_else():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(expose_head(tiny_causal_lm("llama")), config)
    adapted(**p3o_of(slice(0, 4))).backward()
    assert gradients(adapted).keys() == {
        name for name, _ in adapted.named_parameters() if "lora" in name
    }


def test_a_copy_computes_with_its_own_weights():
    model, batch = expose_head(tiny_causal_lm("llama")), p3o_of(slice(0, 4))
    copy = deepcopy(model)
    loss = copy(**batch)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(copy(**batch), loss)


def test_what_is_refused():
    peft = pytest.importorskip("peft")
    model = expose_head(tiny_causal_lm("llama"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is a peft.*plain linear layer"):
        adapted(**p3o_of(slice(0, 1)))

    class Quantized(nn.Linear):
        pass

    model = expose_head(tiny_causal_lm("llama"))
    model.lm_head = Quantized(16, 40)
    with pytest.raises(ValueError, match=r"Quantized.*quantization"):
        model(**p3o_of(slice(0, 1)))
    with pytest.raises(ValueError, match="got a Linear"):
        expose_head(nn.Linear(2, 2))
    prepared = tiny_causal_lm("llama")
    prepared._original_forward = prepared.forward
    with pytest.raises(ValueError, match=r"before accelerator\.prepare"):
        expose_head(prepared)


def test_two_processes_have_the_gradients_of_one(tmp_path):
    done = together(Path(exposed_heads.__file__), str(tmp_path))
    assert done.returncode == 0, done.stdout
    for kind, (name, tolerance) in exposed_heads.WRAPPERS.items():
        model = expose_head(tiny_causal_lm(name))
        model(**p3o_of(slice(0, 4))).backward()
        expected = gradients(model)
        found = load_file(tmp_path / f"{kind}.safetensors")
        assert found.keys() == expected.keys()
        for weight, gradient in expected.items():
            assert (found[weight] - gradient).norm() < tolerance * gradient.norm(), (kind, weight)
    weight = tiny_causal_lm("llama").lm_head.weight
    both = linear_logprobs(torch.ones(2, 16), weight, torch.tensor([3, 4])).mean()
    (expected,) = torch.autograd.grad(both, weight)
    for rank in range(2):
        assert "expose_head" in (tmp_path / f"a part refused by {rank}").read_text()
        assert "without grad_placements" in (tmp_path / f"gathered refused by {rank}").read_text()
        torch.testing.assert_close(
            load_file(tmp_path / f"gathered by {rank}.safetensors")["head"], expected
        )


def test_a_head_of_a_reward_model_is_its_score():
    model = AutoModelForSequenceClassification.from_config(CONFIGS["llama"]())
    assert model_head(model).weight is model.score.weight


def test_a_call_past_the_wrapper_of_several_processes_warns(monkeypatch):
    model = expose_head(tiny_causal_lm("llama"))
    given = {"input_ids": torch.tensor([[1, 2, 3]]), "head_loss": lambda hidden, head: hidden.sum()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**given)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        with torch.no_grad():
            model(**given)
        with monkeypatch.context() as reduced:
            reduced.setattr(DistributedDataParallel, "_active_ddp_module", object())
            model(**given)
    with pytest.warns(UserWarning, match="not ddp.module"):
        model(**given)
