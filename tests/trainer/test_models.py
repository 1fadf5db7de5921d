import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from fastp3o.models import load_policy, load_reward_model, scored_logprobs, scores
from fastp3o.padding import pad

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
RESPONSES = [[14, 0], [15, 16, 17, 18, 0], [19]]
sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}


def random_models(tiny_model):
    torch.manual_seed(1)
    yield load_policy(tiny_model)
    yield GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()
    yield GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).eval()
    # Its logits are soft-capped after the head.
    yield Gemma2ForCausalLM(
        Gemma2Config(**sizes, head_dim=16, num_key_value_heads=1, final_logit_softcapping=0.5)
    ).eval()


def test_logprobs_of_a_padded_batch_equal_one_row_at_a_time(tiny_model):
    for model in random_models(tiny_model):
        batch = pad(PROMPTS, RESPONSES, pad_token_id=1)
        logprobs = scored_logprobs(model, batch)
        for s, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
            of_sequence = logprobs[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]]
            torch.testing.assert_close(of_sequence, expected, atol=2e-6, rtol=1e-5)


def test_logprobs_reach_every_parameter(tiny_model):
    model = load_policy(tiny_model)
    scored_logprobs(model, pad(PROMPTS, RESPONSES, pad_token_id=1)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_logits_stay_fp32_under_autocast(tiny_model):
    model = load_policy(tiny_model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs = scored_logprobs(model, pad(PROMPTS, RESPONSES, pad_token_id=1))
    assert logprobs.dtype == torch.float32
    assert not torch.equal(logprobs, logprobs.bfloat16().float())


def test_scores_equal_transformers_on_single_rows(tiny_model, tmp_path):
    model = load_reward_model(tiny_model)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    got = scores(load_reward_model(str(tmp_path)), pad(PROMPTS, RESPONSES, pad_token_id=1))
    expected = [classifier(torch.tensor([p + r])).logits.item() for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_reward_model_from_a_language_model_starts_at_zero(tiny_model):
    assert scores(load_reward_model(tiny_model), pad(PROMPTS, RESPONSES, pad_token_id=1)).tolist() == [0, 0, 0]


def test_a_policy_has_no_dropout(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path)).train()
    assert all(module.p == 0 for module in policy.modules() if isinstance(module, torch.nn.Dropout))


def test_a_classifier_with_two_outputs_is_refused(tmp_path, tiny_model):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises((ValueError, RuntimeError)):
        load_reward_model(str(tmp_path))
