"""verl's and OpenRLHF's own code trains on P3O. Each host has an environment of its own:
scripts/test_hosts.sh.
"""

import copy
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from fastp3o.integrations.policy_loss import p3o_policy_loss
from fastp3o_kernels import P3OSettings, p3o_loss

pytestmark = pytest.mark.hosts
P, K, PROCESSES = 8, 4, 2
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "fastp3o/integrations/README.md").read_text()
SETTINGS = P3OSettings(kl_coef=0.0)


@pytest.fixture
def verl(monkeypatch):
    """verl's trainer on the page's options, whose rows come as they end: without any order."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "fastp3o.integrations.verl")
    from hydra import compose, initialize_config_module
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass

    options = re.findall(r"[\w.]+=[\w.]+", PAGE.split("main_ppo")[1].split("```")[0])
    sizes = [f"actor_rollout_ref.rollout.n={K}", f"data.train_batch_size={P}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", [*options, *sizes, f"actor_rollout_ref.actor.ppo_mini_batch_size={P}"]
        )
    keys = [f"{prompt:x}_{response}_0" for prompt in range(P) for response in range(K)]
    torch.manual_seed(0)
    lengths = torch.randint(1, 9, (P * K,)).tolist()
    trainer = get_trainer_cls("p3o")(config)
    trainer.actor_rollout_wg, trainer.tokenizer, trainer.global_steps = MagicMock(), MagicMock(), 1
    trainer.actor_rollout_wg._dispatch_info = {"actor": [*range(PROCESSES)]}
    trainer.actor_rollout_wg.update_actor.return_value = {"metrics": {"mfu": [0.0]}}
    order = torch.randperm(P * K).tolist()
    tags = [{"seq_len": 2 + lengths[row]} for row in order]
    batch = KVBatchMeta(
        keys=[keys[row] for row in order], tags=tags, partition_id="train", extra_info={}
    )
    logprobs, advantages = -torch.rand(P * K, 10), torch.randn(P * K, 1).expand(P * K, 8)
    actor, actor_options = (
        omega_conf_to_dataclass(config.actor_rollout_ref.actor),
        config.actor_rollout_ref.actor,
    )
    return SimpleNamespace(**locals())


def gradients(verl, processes: int, **given) -> tuple[torch.Tensor, torch.Tensor]:
    """By log-probs, as verl's workers split the batch that its trainer has ordered; and of the
    whole batch at once.
    """
    from verl.utils import tensordict_utils
    from verl.workers import engine_workers
    from verl.workers.engine.utils import prepare_micro_batches

    policy, ones, old = (
        verl.logprobs.requires_grad_(),
        torch.ones(P * K, 10),
        torch.full((P * K, 10), -0.5),
    )
    loss, part = 0.0, P * K // processes
    for rank in range(processes):
        own = [verl.keys.index(key) for key in verl.batch.keys[rank * part : (rank + 1) * part]]
        fields = {
            "prompts": ones,
            "input_ids": ones,
            "responses": ones,
            "response_mask": ones.long(),
        }
        fields |= {"old_log_probs": old, "advantages": verl.advantages}
        widths = {"prompts": lambda length: 2, "input_ids": lambda length: 2 + length}
        for name, values in fields.items():
            rows = [values[row, : widths.get(name, int)(verl.lengths[row])] for row in own]
            fields[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields |= {"uid": [verl.keys[row].split("_")[0] for row in own], "row": torch.tensor(own)}
        data = tensordict_utils.get_tensordict(fields)
        engine = {"dp_size": processes, "batch_num_tokens": None, "max_token_len_per_gpu": 60}
        engine |= {
            "use_dynamic_bsz": verl.actor_options.use_dynamic_bsz,
            "global_batch_size": P * K,
        }
        engine |= {"micro_batch_size_per_gpu": verl.actor_options.ppo_micro_batch_size_per_gpu}
        tensordict_utils.assign_non_tensor(data, **engine | verl.batch.extra_info | given)
        for microbatch in prepare_micro_batches(data)[0]:
            assert len(microbatch) < part or processes == 1
            rows = [policy[row, : 2 + verl.lengths[row]] for row in microbatch["row"].tolist()]
            loss += (
                engine_workers.ppo_loss(verl.actor, {"log_probs": torch.cat(rows)}, microbatch)[0]
                / processes
            )
    mask = torch.arange(8) < torch.tensor(verl.lengths)[:, None]
    whole, _ = p3o_policy_loss(policy[:, 1:9], old[:, :8], verl.advantages, mask, K, SETTINGS)
    return torch.autograd.grad(loss, policy)[0], torch.autograd.grad(whole, policy)[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_verls_default_trainer_keeps_whole_prompts_in_a_process(verl, dynamic):
    verl.actor_options.use_dynamic_bsz = dynamic
    verl.trainer._balance_batch(verl.batch, metrics := {})
    tokens = (
        torch.tensor([tag["seq_len"] for tag in verl.batch.tags])
        .view(PROCESSES, -1)
        .sum(1)
        .tolist()
    )
    assert sorted(tokens) == [metrics[f"global_seqlen/balanced_{end}"] for end in ("min", "max")]
    verl.trainer._update_actor(verl.batch, {})
    torch.testing.assert_close(*gradients(verl, PROCESSES))


def test_verl_parts_siblings_where_its_own_trainer_balances(verl):
    from verl.trainer.ppo.v1 import PPOTrainerSync

    PPOTrainerSync._balance_batch(verl.trainer, verl.batch, {})
    with pytest.raises(ValueError, match=r"do not have exactly 4 responses .*trainer_mode=p3o"):
        gradients(verl, PROCESSES)
    # Order within a microbatch does not matter, and neither does a whole of unknown size.
    verl.actor_options.ppo_micro_batch_size_per_gpu = P * K
    torch.testing.assert_close(*gradients(verl, 1, global_batch_size=None))
    verl.config.algorithm.norm_adv_by_std_in_grpo = True
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo=False"):
        type(verl.trainer)(verl.config)


class StandIns(MetaPathFinder, Loader):
    """Packages that OpenRLHF imports and that need GPUs. All in them is a mock, except a kernel it
    can do without.
    """

    def find_spec(self, name, path=None, target=None):
        needs_gpus = name.split(".")[0] in ("deepspeed", "flash_attn", "vllm")
        return (
            spec_from_loader(name, self, is_package=True)
            if needs_gpus and name != "flash_attn.ops"
            else None
        )

    def exec_module(self, module):
        module.__getattr__ = lambda name: MagicMock()


def test_openrlhfs_training_steps_are_p3os(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns()])
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastp3o.integrations import openrlhf as p3o_in_openrlhf

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Experience, "to_device", lambda self, device: self)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)).save_pretrained(tmp_path)
    actor = Actor(str(tmp_path), attn_implementation="eager").float()
    sequences, mask = (
        torch.randint(1, 32, (P * K, 9)),
        torch.arange(8) < torch.randint(3, 9, (P * K, 1)),
    )
    mask[:, :2] = False
    whole = torch.cat(
        [torch.ones(P * K, 1, dtype=torch.bool), mask | (torch.arange(8) < 2)], dim=1
    ).long()
    rewards = torch.randn(P, K)
    other = copy.deepcopy(actor)
    logprobs = other(sequences, mask, attention_mask=whole)
    old = logprobs.detach() - 0.1 * rewards.view(-1, 1) * mask
    sums = [(values * mask).sum(1).view(P, K) for values in (logprobs, old)]
    p3o_loss(sums[0], sums[1], sums[1], rewards, SETTINGS).loss.backward()

    optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
    correction = {"enable": False, "level": "off", "type": "tis", "mode": "mask", "gating": "ratio"}
    options = {f"algo.advantage.is_correction_{name}": value for name, value in correction.items()}
    options |= {
        "algo.advantage.estimator": "dr_grpo",
        "algo.kl.use_loss": False,
        "train.dynamic_batch_enable": False,
    }
    options |= {
        "train.max_epochs": 1,
        "rollout.n_samples_per_prompt": K,
        "ds.packing_samples": False,
    }
    options |= {
        "ds.tensor_parallel_size": 1,
        "actor.eps_clip_low_high": (0.2, 0.2),
        "actor.policy_loss_type": "ppo",
    }
    args = MagicMock(
        **options
        | {"actor.dual_clip": None, "actor.entropy_coef": None, "actor.aux_loss_coef": 0.0}
    )
    strategy = MagicMock(
        args=args,
        accumulated_gradient=P // 2,
        ring_attn_group=None,
        all_reduce=lambda values: values,
    )
    strategy.backward = lambda loss, *_: (loss / strategy.accumulated_gradient).backward()
    p3o_in_openrlhf.register()
    trainer = ppo_actor.ActorPPOTrainer(
        strategy,
        actor,
        None,
        optimizer,
        MagicMock(),
        micro_train_batch_size=2 * K,
        dataloader_pin_memory=False,
    )
    # OpenRLHF has siblings as neighbors, and shuffles them one by one
    order = torch.randperm(P * K)
    rows = {
        "sequences": sequences,
        "attention_mask": whole,
        "action_mask": mask,
        "action_log_probs": old,
    }
    rows |= {"advantages": rewards.view(-1, 1) * mask, "rewards": rewards.flatten()}
    prompts = [str(row // K) for row in order.tolist()]
    experience = Experience(
        **{name: value[order] for name, value in rows.items()}, prompts=prompts, index=[0] * P * K
    )
    trainer.replay_buffer.append(experience)
    status = trainer.ppo_train(0.0)
    assert status["ppo_clip_ratio"] >= 0
    found, expected = ([p.grad for p in model.parameters()] for model in (actor, other))
    assert all(gradient.any() for gradient in expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    args.train.dynamic_batch_enable = True
    with pytest.raises(ValueError, match="dynamic_batch_enable"):
        p3o_in_openrlhf.P3OActorTrainer(strategy, actor, None, optimizer, MagicMock())
