"""LoRA over bases in 4 and 8 bits, by bitsandbytes' CPU build."""

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from fastp3o.config import TrainableConfig
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.merging import whole_model
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.models.quantized import dequantized, quantized_layers
from fastp3o.models.reference import WithoutAdapters
from fastp3o.models.trainable import choose_trainable
from tests.fastp3o.models.model_families import PAIRS
from tests.fastp3o.models.test_adapters import trained

pytest.importorskip("bitsandbytes")

ROW = PAIRS.row()
every_kind = pytest.mark.parametrize("bits", ["4bit", "8bit"])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, tiny_model) -> str:
    """The others' tiny model with layers as wide as a block of 4-bit weights, without a tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model, **sizes)).save_pretrained(folder)
    return str(folder)


@every_kind
def test_layers_but_the_head_are_quantized_and_saved_whole(tiny_model, bits):
    plain, policy = load_policy(tiny_model), load_policy(tiny_model, trains=True, quantize=bits)
    layers = quantized_layers(policy)
    assert len(layers) == 14
    assert all("proj" in name for name in layers)
    # Half the widest step of NF4, from 0.696 to 1, and of 8 bits, to which fp16 is rounded: shares
    # of a block's or a row's largest number.
    steps = {"4bit": 0.152, "8bit": 0.5 / 127 + 2**-11}
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        error = (dequantized(layer) - weight).abs().max()
        assert 0 < error <= 1.02 * steps[bits] * weight.abs().max()
    embeddings = policy.model.get_input_embeddings().weight
    assert torch.equal(embeddings, plain.model.get_input_embeddings().weight)
    assert policy.head().weight is embeddings
    reward_model = load_reward_model(tiny_model, new_head=True, quantize=bits)
    assert len(quantized_layers(reward_model)) == 14
    assert reward_model.model.score.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(
            labeled_logprobs(policy.train(), ROW), labeled_logprobs(policy.eval(), ROW)
        )
    choose_trainable(policy, TrainableConfig(lora_rank=2, lora_targets="q_proj", quantize=bits))
    saved_weights = whole_model(policy.model)[1]
    assert saved_weights.keys() == plain.model.state_dict().keys()


@every_kind
def test_the_merged_model_and_the_adapter_are_the_policy(tiny_model, tmp_path, bits):
    base = load_policy(tiny_model, quantize=bits)
    with torch.no_grad():
        before = labeled_logprobs(base, ROW)
    policy = trained(base).model
    with torch.no_grad():
        expected = labeled_logprobs(policy, ROW)
    torch.testing.assert_close(WithoutAdapters(policy)([ROW]), [before], atol=1e-6, rtol=0)
    whole, tensors = whole_model(policy.model)
    whole.save_pretrained(tmp_path / "merged", state_dict=tensors)
    merged = load_policy(str(tmp_path / "merged"))
    assert not hasattr(merged.model.config, "quantization_config")
    with torch.no_grad():
        got = labeled_logprobs(merged, ROW)
    scale = (expected - before).abs().max()
    assert scale > 0.2
    assert (got - expected).abs().mean() <= 1e-6 * scale
