from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from fastp3o.models import attention
from fastp3o.models.loading import load_policy, noise_off
from fastp3o.models.packable import (
    TOLERANCE,
    require_packable,
    require_trainable,
    run_trial,
    within_vocabulary,
)
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.packing.packed_row import Segments, offsets
from tests.fastp3o.models.model_families import (
    GROUPED,
    PAIRS,
    UNGROUPED,
    VOCABULARY,
    enlarge,
    random_model,
)

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
REFUSED = {
    "bloom": (
        lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2),
        "its attention does not go through transformers' AttentionInterface",
    ),
    "recurrent_gemma": (
        lambda: hf.RecurrentGemmaConfig(**UNGROUPED | {"num_hidden_layers": 3, "lru_width": 32}),
        "are not plain or sliding attention",
    ),
    "nemotron": (lambda: hf.NemotronConfig(**GROUPED), "it does not pass its keyword arguments"),
    "doge": (lambda: hf.DogeConfig(**GROUPED), "it builds its own attention mask"),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_models_that_do_not_keep_sequences_apart_are_refused(config, reason):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    enlarge(model)
    with pytest.raises(
        ValueError,
        match=rf"some/model \({type(model).__name__}\) cannot be run on packed.*{reason}",
    ):
        require_packable(PackedModel(model), "some/model")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("scores", [False, True])
def test_attention_over_the_whole_row_is_noticed(monkeypatch, family, scores):
    """A reward model is tried by its scores. Models are left as they were."""
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = PackedModel(random_model(family, auto, **({"num_labels": 1} if scores else {}))).train()
    trial = run_trial(require_packable(model, family))
    assert (trial.packed.shape == (4, 1)) == scores
    torch.testing.assert_close(trial.packed, trial.single, atol=2e-5, rtol=1e-5)
    attend = attention.sdpa_per_segment

    def over_the_row(query, key, value, segments, *options):
        lengths = (len(query),), (len(key),)
        return attend(query, key, value, Segments(*map(offsets, lengths), *lengths, None), *options)

    monkeypatch.setattr(attention, "sdpa_per_segment", over_the_row)
    with pytest.raises(ValueError, match="they get other results than alone"):
        require_packable(model, "leaking")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_leak_and_values_that_are_not_finite_are_named(dtype):
    model = PackedModel(random_model("llama").to(dtype))
    trial = run_trial(require_packable(model, "llama"))
    assert 0 < (trial.packed - trial.single).abs().mean() < TOLERANCE[dtype]
    with torch.no_grad():
        model.layers()[0].mlp.down_proj.weight.fill_(torch.finfo(dtype).max)
    told = {
        torch.bfloat16: f"too large gives values that are not finite in {dtype}: model.layers.0.mlp.down_proj is the",
        torch.float16: r"too large overflows fp16: model.layers.0.mlp.down_proj reaches .*'s maximum is 65,504",
    }
    with pytest.raises(ValueError, match=told[dtype]):
        require_packable(model, "too large")


def with_noise(family: type[hf.PretrainedConfig], folder: Path, **noise: float) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family(**GROUPED, **EXPERTS, **noise))
    enlarge(model)
    model.save_pretrained(folder)
    return str(folder)


def test_noise_that_a_configuration_names_is_off_and_any_other_is_refused(tmp_path):
    folder = with_noise(hf.MixtralConfig, tmp_path, router_jitter_noise=0.5, attention_dropout=0.5)
    policy = load_policy(folder, trains=True).train()
    rows = [labeled_logprobs(policy, PAIRS.row()) for _ in range(2)]
    assert torch.equal(*rows)
    assert torch.equal(rows[0], labeled_logprobs(policy.eval(), PAIRS.row()))
    inside = {"top_k": 2, "moe_jitter_eps": 0.5}
    off = {"embd_pdrop": 0.0, "ffn_config": {"top_k": 2, "moe_jitter_eps": 0.0}}
    assert (
        noise_off(
            {
                "embd_pdrop": 0.1,
                "eps": 0.1,
                "dropout": None,
                "ffn_config": inside,
                "plain": {"n": 1},
            }
        )
        == off
    )
    # A training mode that is random all the same is refused.
    folder = with_noise(
        hf.PhimoeConfig, tmp_path / "all_the_same", router_jitter_noise=0.1, input_jitter_noise=0.1
    )
    with pytest.raises(
        ValueError, match=rf"{folder} \(PhimoeForCausalLM\) cannot be trained: its training mode"
    ):
        load_policy(folder, trains=True)
    load_policy(folder)


def test_a_trial_leaves_the_generator_as_it_was_and_takes_a_small_vocabulary_with_padding():
    model = PackedModel(random_model("opt"))  # which draws a number for each layer in training mode
    before = torch.get_rng_state()
    require_trainable(require_packable(model, "opt"), "opt")
    assert torch.equal(torch.get_rng_state(), before)
    small = LlamaForCausalLM(hf.LlamaConfig(**(GROUPED | {"vocab_size": 5, "pad_token_id": 3})))
    assert within_vocabulary(small, [2, 3, 11]) == [2, 4, 4]
    require_packable(PackedModel(small), "small")


def test_a_window_must_be_seen_unless_no_sequence_leaves_it():
    for family in ("mistral", "gemma2"):  # a window that is longer than the trial
        model = PackedModel(random_model(family, sliding_window=32))
        assert run_trial(require_packable(model, family)).windows == {32}
    sizes = GROUPED | EXPERTS | {"sliding_window": 128}
    short, long = (
        PackedModel(
            AutoModelForCausalLM.from_config(
                hf.PhimoeConfig(**(sizes | {"max_position_embeddings": reach}))
            )
        )
        for reach in (128, 256)
    )
    require_packable(short, "phimoe")
    with pytest.raises(ValueError, match="does not pass its sliding window"):
        require_packable(long, "phimoe")
