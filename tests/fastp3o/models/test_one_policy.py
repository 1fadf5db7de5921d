"""What trains with adapters is one policy in memory, in its files, on servers and in the copy that
is sampled.
"""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastp3o.config import TrainableConfig
from fastp3o.models import mergeable, merging, trainable
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.packed_model import PackedModel, labeled_logprobs, scores
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.models.save import (
    adapter_config,
    adapter_weights,
    hub_weights,
    write_adapter,
    write_model,
)
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rollouts.plan import sampled_model
from tests.fastp3o.models.model_families import (
    EXPERTS,
    FAMILIES,
    PAIRS,
    enlarge_trained,
    random_model,
)

ROW = PAIRS.row()
CPU = torch.device("cpu")
LORA_DELTA = merging.lora_delta
TIED = {"tie_word_embeddings": True}
CASES = [
    *((family, "all-linear", {}) for family in (*FAMILIES, *EXPERTS)),
    ("llama", "embed_tokens,q_proj", TIED),
    ("llama", "embed_tokens,q_proj", {"tie_word_embeddings": False}),
    ("qwen3_moe", "embed_tokens,gate_proj,up_proj,down_proj", TIED),
    ("mixtral", "w1,w2,w3", {}),
    ("mixtral", "gate", {}),
    ("gpt2", "wte,c_attn", {}),
    ("gpt2", "wte,wpe", {}),
    ("gemma2", "embed_tokens", {}),
    ("gemma3", "embed_tokens,up_proj", {}),
    ("gemma3n", "q_proj,up_proj,per_layer_input_gate,prediction_coefs", {}),
    ("gemma3n", "embed_tokens,embed_tokens_per_layer,q_proj", {}),
]


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None: ...


def adapted(model: PackedModel, targets: str, **changes) -> PackedModel:
    """A model with adapters that are far from zero."""
    choose_trainable(
        model, TrainableConfig(lora_rank=3, lora_alpha=6.0, lora_targets=targets, **changes)
    )
    enlarge_trained(model)
    return model


def packed(model: PreTrainedModel) -> PackedModel:
    return PackedModel(model.eval())


@torch.no_grad()
def logprobs(model: PackedModel) -> torch.Tensor:
    return labeled_logprobs(model, ROW)


@pytest.mark.parametrize(("family", "targets", "changes"), CASES)
def test_all_that_is_saved_served_and_sampled_is_the_policy_that_trains(
    family, targets, changes, tmp_path
):
    random_model(family, **changes).save_pretrained(tmp_path / "base")
    before = logprobs(load_policy(str(tmp_path / "base")))
    policy = adapted(load_policy(str(tmp_path / "base"), trains=True), targets)
    expected = logprobs(policy)
    assert (expected - before).abs().max() > 0.1
    found = {}
    write_model(Accelerator(cpu=True), policy, NoTokenizer(), tmp_path / "model", None)
    found["model/"] = logprobs(load_policy(str(tmp_path / "model")))
    write_adapter(
        tmp_path / "adapter",
        adapter_config(policy.model),
        adapter_weights(dict(policy.named_parameters())),
    )
    found["adapter/"] = logprobs(load_policy(str(tmp_path / "adapter")))
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation=policy.own_attention
    )
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    found["adapter/ by peft"] = logprobs(packed(by_peft.base_model.model))
    served = {
        name: weight
        for layer in hub_weights(policy.model, torch.float32)
        for name, weight in layer.items()
    }
    options = {
        "config": type(base.config).from_pretrained(tmp_path / "model"),
        "attn_implementation": "eager",
    }
    found["served"] = logprobs(
        packed(type(base).from_pretrained(None, state_dict=served, **options))
    )
    assert served.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    copied = SamplingCopy(policy, CPU, torch.float32, merges=True)
    with copied.gathered(policy):
        found["copy"] = logprobs(copied.model)
    off = {place: (values - expected).abs().max().item() for place, values in found.items()}
    assert {place: distance for place, distance in off.items() if not distance < 2e-5} == {}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_reward_models_can_be_read_again(family, tmp_path):
    random_model(family).save_pretrained(tmp_path / "base")
    model = adapted(load_reward_model(str(tmp_path / "base"), new_head=True), "all-linear")
    write_model(Accelerator(cpu=True), model, NoTokenizer(), tmp_path / "model", None)
    write_adapter(
        tmp_path / "adapter",
        adapter_config(model.model),
        adapter_weights(dict(model.named_parameters())),
    )
    with torch.no_grad():
        expected = scores(model, ROW)
        assert expected.std() > 0.1
        for place in ("model", "adapter"):
            torch.testing.assert_close(
                scores(load_reward_model(str(tmp_path / place)), ROW), expected, atol=1e-4, rtol=0
            )


def add_adapters(
    family: str, targets: str, monkeypatch: pytest.MonkeyPatch | None = None, **changes
) -> PackedModel:
    """New adapters, without the trial if there is a `monkeypatch` to leave it out."""
    if monkeypatch:
        monkeypatch.setattr(trainable, "require_mergeable", lambda *_: None)
    torch.manual_seed(3)
    model = PackedModel(random_model(family)).train()
    choose_trainable(model, TrainableConfig(lora_rank=3, lora_targets=targets, **changes))
    return model


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe"])
def test_the_trial_leaves_nothing_behind(family, monkeypatch):
    tried = add_adapters(family, "all-linear")
    state = torch.get_rng_state()
    expected = add_adapters(family, "all-linear", monkeypatch)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in tried.modules()] == [
        type(module) for module in expected.modules()
    ]
    assert all(module.training for module in tried.modules())
    weights, trained = (
        tried.state_dict(),
        {n for n, p in tried.named_parameters() if p.requires_grad},
    )
    assert trained == {name for name, p in expected.named_parameters() if p.requires_grad}
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.state_dict().items())
    replaced = [name for name, module in expected.named_modules() if "forward" in vars(module)]
    assert [name for name, module in tried.named_modules() if "forward" in vars(module)] == replaced


def test_adapters_that_a_model_reads_around_are_refused_by_name_or_never_merged():
    """Gemma 3n reads the weight of one layer without its adapter, in training mode."""
    said = "adapters of correction_coefs give other results .*; name other layers, or --lora_save adapter$"
    with pytest.raises(
        ValueError, match=f"^--lora_targets all-linear: merged into the weights, {said}"
    ):
        add_adapters("gemma3n", "all-linear")
    model = PackedModel(random_model("gemma3n"))
    model.model.name_or_path = "organization/model"
    choose_trainable(model, TrainableConfig(lora_rank=3, lora_save="adapter"))
    assert not model.mergeable
    config = P3OConfig(
        model="", output_dir="", prompts="", reward="", sampler="vllm", vllm_url="http://a:1"
    )
    with pytest.raises(
        ValueError,
        match="--sampler vllm gets merged adapters, and those of --lora_targets cannot be",
    ):
        sampled_model(config, model, None)


def test_servers_that_tie_what_is_two_matrices_by_now_are_refused():
    model = PackedModel(random_model("llama", tie_word_embeddings=True))
    choose_trainable(model, TrainableConfig(lora_rank=3, lora_targets="embed_tokens"))
    config = P3OConfig(
        model="", output_dir="", prompts="", reward="", sampler="vllm", vllm_url="http://a:1"
    )
    with pytest.raises(
        ValueError, match=r"^--sampler vllm: .* and --lora_targets adapts one of these: name other"
    ):
        sampled_model(config, model, None)


def test_layers_that_peft_takes_for_others_are_refused():
    """A router that is a linear layer with several results."""
    with pytest.raises(
        ValueError, match=r"^--lora_targets router: a trial failed with: .*; name other layers$"
    ):
        add_adapters("phimoe", "router")


@pytest.mark.parametrize(
    ("place", "name", "wrong", "said"),
    [
        (
            merging,
            "lora_delta",
            lambda *given: 2 * LORA_DELTA(*given),
            "adapters of q_proj give other results",
        ),
        (
            merging,
            "adapted_parameter",
            lambda _: "bias",
            "lora_A.default.weight cannot be merged into a weight",
        ),
        (merging, "wraps", lambda _: False, "merging would add, remove or resize the weight"),
        (
            mergeable,
            "revert_weight_conversion",
            lambda _, weights: {
                name.replace("mlp", "mlp.base_layer"): weight for name, weight in weights.items()
            },
            r"transformers would not read the merged weights as they are written: it lacks model\.layers\.0\.mlp",
        ),
    ],
)
def test_whatever_would_make_another_policy_is_found_when_adapters_are_added(
    monkeypatch, place, name, wrong, said
):
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(
        ValueError, match=f"^--lora_targets q_proj: .*{said}.*; name other layers, or --lora_save"
    ):
        add_adapters("llama", "q_proj")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_an_adapters_file_is_pefts_own_and_has_the_same_bytes_in_every_process(family, tmp_path):
    model = adapted(PackedModel(random_model(family)), "all-linear")
    config = adapter_config(model.model)
    for targets in (config.target_modules, config.target_parameters):
        assert targets is None or targets == sorted(targets)
    expected = get_peft_model_state_dict(model.model, save_embedding_layers=False)
    weights = adapter_weights(dict(model.named_parameters()))
    assert weights.keys() == {f"base_model.model.{name}" for name in expected}
    assert all(
        torch.equal(weights[f"base_model.model.{name}"], weight)
        for name, weight in expected.items()
    )
    write_adapter(tmp_path, config, weights)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    if family == "qwen3_moe":  # gate and up are one parameter
        assert written["rank_pattern"] == {r".*\.gate_up_proj": 6}
        assert written["alpha_pattern"] == {r".*\.gate_up_proj": 12.0}


TOKENS = torch.tensor([[5, 9, 40, 17, 31, 9, 12]])
KINDS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 9}},
    "some layers": {"layers_to_transform": [1]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "DoRA of embeddings": {"use_dora": True, "target_modules": ["embed_tokens"]},
    "trained tokens": {"trainable_token_indices": [5, 9]},
    "trained tokens, others in the head": {
        "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 12]}
    },
    "trained tokens of the embeddings": {"trainable_token_indices": {"embed_tokens": [5, 9]}},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole embeddings": {"modules_to_save": ["embed_tokens"]},
    "norms": {"modules_to_save": ["norm"]},
}


def adapter_by_peft(model: PreTrainedModel, config: PeftConfig, folder: Path) -> str:
    """Adapters of another program, far from zero."""
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return str(folder)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_other_programs_give_what_peft_gives(kind, tied, tmp_path):
    random_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | KINDS[kind])
    folder = adapter_by_peft(base(tmp_path / "base"), config, tmp_path / "adapter")
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base(tmp_path / "base"), folder).eval()(TOKENS).logits
        policy = load_policy(folder)
        with policy.with_own_attention() as own:
            torch.testing.assert_close(own(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
        write_model(Accelerator(cpu=True), policy, NoTokenizer(), tmp_path / "model", None)
        saved, report = base(tmp_path / "model", output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(saved(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
        (VeraConfig(r=2, target_modules=["q_proj"]), "VERA"),
        (AdaLoraConfig(init_r=3, target_r=2, total_step=10, target_modules=["q_proj"]), "ADALORA"),
    ],
)
def test_other_kinds_of_adapters_are_refused_for_what_they_are(config, kind, tmp_path):
    random_model("llama").save_pretrained(tmp_path / "base")
    folder = adapter_by_peft(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config, tmp_path / "adapter"
    )
    with pytest.raises(
        ValueError,
        match=f"cannot load {folder}: it is an adapter of the kind {kind}, and only those",
    ):
        load_policy(folder)


def test_adapters_that_no_weights_stand_for_are_refused(tmp_path):
    """As those that begin to act at certain tokens."""
    random_model("llama").save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=2, target_modules=["q_proj"], alora_invocation_tokens=[7, 2], task_type="CAUSAL_LM"
    )
    folder = adapter_by_peft(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config, tmp_path / "adapter"
    )
    with pytest.raises(ValueError, match=f"cannot load {folder}: "):
        load_policy(folder)


def test_modules_that_were_trained_whole_are_missed(tmp_path):
    random_model("llama").save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder = adapter_by_peft(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config, tmp_path / "adapter"
    )
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(
        {name: weight for name, weight in load_file(file).items() if "lm_head" not in name}, file
    )
    with pytest.raises(
        ValueError, match=f"cannot load {folder}: {file} lacks base_model.model.lm_head.weight$"
    ):
        load_policy(folder)
