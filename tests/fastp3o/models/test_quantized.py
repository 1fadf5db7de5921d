"""LoRA over bases in 4 and 8 bits, by bitsandbytes' CPU build."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastp3o.config import TrainableConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.packed_model import labelled_logprobs, scores
from fastp3o.models.quantized import dequantized, quantized_layers, quantized_loading
from fastp3o.models.reference import adapters_off
from fastp3o.models.trainable import choose_trainable, whole_model
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.preferences import DPOConfig
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model, sft
from fastp3o.training.config import RewardModelConfig, SFTConfig
from fastp3o.training.loop import train
from tests.fastp3o.models.model_families import PAIRS, random_model
from tests.fastp3o.models.test_adapters import logits, saved, trained
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights

pytest.importorskip("bitsandbytes")

BITS = ("4bit", "8bit")
ROW = PAIRS.row()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, tokenizer) -> str:
    """Like the others' tiny model, with layers as wide as a block of 4-bit weights."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **ids)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("bits", BITS)
def test_layers_but_the_head_are_quantized(tiny_model, bits):
    plain, policy = load_policy(tiny_model), load_policy(tiny_model, trains=True, quantize=bits)
    layers = quantized_layers(policy)
    assert len(layers) == 14
    assert all("proj" in name for name in layers)
    # Half the widest step of NF4, from 0.696 to 1, and of 8 bits, to which fp16 is rounded: shares of a block's or a
    # row's largest number.
    steps = {"4bit": 0.152, "8bit": 0.5 / 127 + 2**-11}
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        error = (dequantized(layer) - weight).abs().max()
        assert 0 < error <= 1.02 * steps[bits] * weight.abs().max()
    embeddings = policy.model.get_input_embeddings().weight
    assert torch.equal(embeddings, plain.model.get_input_embeddings().weight)
    assert policy.head().weight is embeddings


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bits", BITS)
def test_the_merged_model_and_the_adapter_are_the_policy(tiny_model, tmp_path, bits, precision):
    base = load_policy(tiny_model, quantize=bits)
    with torch.no_grad():
        before = labelled_logprobs(base, ROW)
    optimizer = trained(base, precision)
    policy = optimizer.model
    with torch.no_grad():
        expected = labelled_logprobs(policy, ROW)
        with adapters_off(policy):
            off = labelled_logprobs(policy, ROW)
    half = {"fp32": 1e-6, "fp16": 1e-2, "bf16": 0.1}[precision]
    torch.testing.assert_close(off, before, atol=half, rtol=0)
    whole, tensors = whole_model(policy.model, optimizer.precision.weights)
    whole.save_pretrained(tmp_path / "merged", state_dict=tensors)
    merged = load_policy(str(tmp_path / "merged"))
    assert not hasattr(merged.model.config, "quantization_config")
    assert merged.model.state_dict().keys() == load_policy(tiny_model).model.state_dict().keys()
    with torch.no_grad():
        got = labelled_logprobs(merged, ROW)
    scale = (expected - before).abs().max()
    assert scale > 0.2
    assert (got - expected).abs().mean() <= half * scale
    if precision == "fp32":
        quantized = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, **quantized_loading(bits))
        by_peft = PeftModel.from_pretrained(quantized, saved(optimizer, tmp_path / "adapter")).train()
        with policy.with_own_attention() as own:
            torch.testing.assert_close(logits(by_peft), logits(own), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", BITS)
def test_a_reward_models_head_stays_whole(tiny_model, bits):
    model = load_reward_model(tiny_model, new_head=True, quantize=bits)
    assert len(quantized_layers(model)) == 14
    optimizer = trained(model)
    with torch.no_grad():
        expected = scores(optimizer.model, ROW)
    assert optimizer.model.model.score.weight.dtype == torch.float32
    assert expected.abs().max() > 0
    scores(optimizer.model, ROW).sum().backward()
    assert all(parameter.grad is not None for parameter in optimizer.parameters.values())


SUPERVISED = {"batch_size": 4, "epochs": 2, "max_response_tokens": 20, "report_to": "none", "precision": "fp32"}
SUPERVISED |= {"learning_rate": 3e-3, "lora_rank": 2}


@pytest.mark.parametrize("bits", BITS)
def test_every_stage_trains_and_resumes_exactly(workplace, tiny_model, bits):
    settings = SUPERVISED | {"model": tiny_model, "quantize": bits}
    tuned = settings | {"train_data": "sft.jsonl", "eval_data": "sft.jsonl", "gradient_checkpointing": True}
    tuned |= {"lora_dropout": 0.1}
    sft.train(SFTConfig(**tuned, output_dir="whole", save_every=3))
    copy_at_save_before("whole", "resumed")
    sft.train(SFTConfig(**tuned, output_dir="resumed", save_every=3, resume=True))
    assert metrics("resumed") == metrics("whole")
    assert_equal(weights("resumed"), weights("whole"))
    before, after = metrics("whole", "eval.jsonl")
    assert after["loss"] < before["loss"]
    # The saved model, which is not quantized, is the one that was evaluated.
    sft.train(
        SFTConfig(**(tuned | {"quantize": None, "model": "whole/model", "lora_dropout": 0.0}), output_dir="again")
    )
    assert metrics("again", "eval.jsonl")[0]["loss"] == pytest.approx(after["loss"], abs=1e-5)
    preferences = settings | {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    preference.train(DPOConfig(**preferences, output_dir="dpo"))
    assert metrics("dpo", "eval.jsonl")[0]["k2"] == 0
    reward_model.train(RewardModelConfig(**preferences, output_dir="rm"))
    online = {"lora_rank": 2, "quantize": bits, "eval_prompts": "prompts.jsonl", "learning_rate": 1e-2, "updates": 2}
    train(config(tiny_model, "p3o", P3OConfig, reward="rm/model", **online))
    assert metrics("p3o", "eval.jsonl")[0]["kl"] == 0
    assert metrics("p3o", "eval.jsonl")[-1]["kl"] != 0
    assert all(line["sampler_gap"] < 1e-4 for line in metrics("p3o"))
    assert Path("p3o/adapter/adapter_model.safetensors").exists()


@pytest.mark.parametrize("bits", BITS)
def test_a_run_in_bf16_autocast_saves_what_it_trained(workplace, tiny_model, bits):
    settings = SUPERVISED | {"train_data": "sft.jsonl", "eval_data": "sft.jsonl", "precision": "bf16-autocast"}
    sft.train(SFTConfig(**settings, model=tiny_model, output_dir="run", quantize=bits))
    sft.train(SFTConfig(**settings, model="run/model", output_dir="again"))
    begin, end = metrics("again", "eval.jsonl")[0], metrics("run", "eval.jsonl")[-1]
    assert begin["loss"] == pytest.approx(end["loss"], abs=1e-2)
    assert end["loss"] < metrics("run", "eval.jsonl")[0]["loss"] - 0.05


@pytest.mark.parametrize("bits", BITS)
def test_both_modes_give_the_same(tiny_model, bits):
    policy = load_policy(tiny_model, quantize=bits)
    assert all(len(layer._forward_pre_hooks) == 1 for layer in quantized_layers(policy).values())
    with torch.no_grad():
        assert torch.equal(labelled_logprobs(policy.train(), ROW), labelled_logprobs(policy.eval(), ROW))


def test_a_layer_with_rows_of_broken_blocks_is_refused(tmp_path):
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"a multiple of 64 inputs on a CPU, and model\.layers\.0.*_proj has 32"):
        load_policy(str(tmp_path), quantize="4bit")
    load_policy(str(tmp_path), quantize="8bit")


@pytest.mark.parametrize("bits", BITS)
def test_layers_without_adapters_are_saved_whole(tiny_model, bits):
    policy = load_policy(tiny_model, quantize=bits)
    choose_trainable(policy, TrainableConfig(lora_rank=2, lora_targets="q_proj", quantize=bits))
    weights = whole_model(policy.model)[1]
    assert weights.keys() == load_policy(tiny_model).model.state_dict().keys()
    for name, layer in quantized_layers(policy).items():
        saved_name = name.removeprefix("model.").replace(".base_layer", "") + ".weight"
        assert torch.equal(weights[saved_name].float(), dequantized(layer).float())


def test_layers_that_are_not_linear_are_refused(tmp_path):
    random_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"--quantize takes linear layers alone, and transformer.* is a Conv1D"):
        load_policy(str(tmp_path), quantize="8bit")


def test_it_is_refused_where_it_cannot_be(workplace, tiny_model):
    with pytest.raises(UserError, match="--quantize does nothing without --lora_rank"):
        TrainableConfig(quantize="4bit")
    settings = SUPERVISED | {"model": tiny_model, "train_data": "sft.jsonl"}
    with pytest.raises(UserError, match="--quantize and --compile_layers exclude each other"):
        SFTConfig(**settings, output_dir="run", quantize="4bit", compile_layers=True)
    with pytest.raises(UserError, match="--quantize and --sampler vllm exclude each other"):
        config(tiny_model, "run", lora_rank=2, quantize="4bit", sampler="vllm", vllm_url="http://localhost:1")
    sft.train(SFTConfig(**settings, output_dir="first"))
    with pytest.raises(UserError, match="--quantize needs a whole model, and first/adapter is an adapter"):
        sft.train(SFTConfig(**(settings | {"model": "first/adapter"}), output_dir="run", quantize="4bit"))
