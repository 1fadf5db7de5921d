"""verl's and OpenRLHF's own code trains on P3O. Each host has an environment of its own: scripts/test_hosts.sh."""

import copy
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from fastp3o.integrations.policy_loss import p3o_policy_loss
from fastp3o_kernels import P3OSettings, p3o_loss

pytestmark = pytest.mark.hosts
P, K, PROCESSES = 8, 4, 2
PAGE = (Path(__file__).parents[3] / "fastp3o/integrations/README.md").read_text()
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
        config = compose("ppo_trainer", [*options, *sizes, f"actor_rollout_ref.actor.ppo_mini_batch_size={P}"])
    generator = torch.Generator().manual_seed(0)
    rows = [f"{prompt:x}_{response}_0" for prompt in range(P) for response in range(K)]
    lengths = torch.randint(1, 9, (len(rows),), generator=generator).tolist()
    trainer = get_trainer_cls("p3o")(config)
    trainer.actor_rollout_wg, trainer.tokenizer = MagicMock(), MagicMock()
    trainer.actor_rollout_wg._dispatch_info, trainer.global_steps = {"actor": [*range(PROCESSES)]}, 1
    trainer.actor_rollout_wg.update_actor.return_value = {"metrics": {"mfu": [0.0]}}
    order = torch.randperm(len(rows), generator=generator).tolist()
    tags = [{"seq_len": 2 + lengths[row]} for row in order]
    batch = KVBatchMeta(keys=[rows[row] for row in order], tags=tags, partition_id="train", extra_info={})
    advantages = torch.randn(P, K, generator=generator).flatten()
    logprobs = [-torch.rand(2 + length, generator=generator) for length in lengths]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    return SimpleNamespace(**locals())


def verls_gradient(verl, processes: int, **given) -> torch.Tensor:
    """By log-probs, as verl's workers split the batch that its trainer has ordered, the mean over processes."""
    from verl.utils import tensordict_utils as tensors
    from verl.workers import engine_workers
    from verl.workers.engine.utils import prepare_micro_batches

    def nested(values):
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    policy = [values.clone().requires_grad_() for values in verl.logprobs]
    for rank in range(processes):
        part = len(verl.rows) // processes
        own = [verl.rows.index(key) for key in verl.batch.keys[rank * part : (rank + 1) * part]]
        ends = [torch.ones(verl.lengths[row]) for row in own]
        fields = {"prompts": nested([torch.ones(2) for _ in own]), "responses": nested(ends), "row": torch.tensor(own)}
        fields |= {"response_mask": nested([end.long() for end in ends])}
        fields |= {"old_log_probs": nested([-0.5 * end for end in ends]), "input_ids": nested([policy[r] for r in own])}
        fields["advantages"] = nested([verl.advantages[row] * end for row, end in zip(own, ends, strict=True)])
        data = tensors.get_tensordict(fields | {"uid": [verl.rows[row].split("_")[0] for row in own]})
        workers = {"dp_size": processes, "batch_num_tokens": None, "max_token_len_per_gpu": 60}
        workers |= {"use_dynamic_bsz": verl.config.actor_rollout_ref.actor.use_dynamic_bsz}
        micro = verl.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        workers |= {"micro_batch_size_per_gpu": micro, "global_batch_size": P * K} | verl.batch.extra_info | given
        tensors.assign_non_tensor(data, **workers)
        microbatches, _ = prepare_micro_batches(data)
        assert len(microbatches) > 1 or micro == P * K
        for microbatch in microbatches:
            output = {"log_probs": torch.cat([policy[row] for row in microbatch["row"].tolist()])}
            engine_workers.ppo_loss(verl.actor, output, microbatch)[0].div(processes).backward()
    return torch.cat([values.grad for values in policy])


def expected_gradient(verl) -> torch.Tensor:
    pad = torch.nn.utils.rnn.pad_sequence
    policy = [values.clone().requires_grad_() for values in verl.logprobs]
    mask = pad([torch.ones(length) for length in verl.lengths], batch_first=True)
    logprobs = pad([values[1:-1] for values in policy], batch_first=True)
    loss, _ = p3o_policy_loss(logprobs, -0.5 * mask, verl.advantages[:, None] * mask, mask, K, SETTINGS)
    loss.backward()
    return torch.cat([values.grad for values in policy])


@pytest.mark.parametrize("dynamic", [False, True])
def test_verls_default_trainer_keeps_whole_prompts_in_a_process(verl, dynamic):
    verl.config.actor_rollout_ref.actor.use_dynamic_bsz = dynamic
    verl.trainer._balance_batch(verl.batch, {})
    verl.trainer._update_actor(verl.batch, {})
    torch.testing.assert_close(verls_gradient(verl, PROCESSES), expected_gradient(verl))


def test_verl_parts_siblings_where_its_own_trainer_balances(verl):
    from verl.trainer.ppo.v1 import PPOTrainerSync

    PPOTrainerSync._balance_batch(verl.trainer, verl.batch, {})
    with pytest.raises(ValueError, match=r"do not have exactly 4 responses .*trainer_mode=p3o"):
        verls_gradient(verl, PROCESSES)
    # Order within a microbatch does not matter, and neither does a whole of unknown size.
    verl.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = P * K
    torch.testing.assert_close(verls_gradient(verl, 1, global_batch_size=None), expected_gradient(verl))
    verl.config.algorithm.norm_adv_by_std_in_grpo = True
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo=False"):
        type(verl.trainer)(verl.config)


class StandIns(MetaPathFinder, Loader):
    """Modules of packages that OpenRLHF imports and that need GPUs. All in them is a mock."""

    def find_spec(self, name, path=None, target=None):
        needs_gpus = name.split(".")[0] in ("deepspeed", "flash_attn", "vllm")
        return spec_from_loader(name, self, is_package=True) if needs_gpus else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: MagicMock()


def test_openrlhfs_training_steps_are_p3os(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, StandIns()])
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor
    from transformers import LlamaConfig, LlamaForCausalLM

    from fastp3o.integrations import openrlhf

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Experience, "to_device", lambda self, device: self)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    actor = Actor(LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)))
    sequences, mask = torch.randint(1, 32, (P * K, 9)), torch.arange(8) < torch.randint(3, 9, (P * K, 1))
    mask[:, :2] = False
    whole = torch.cat([torch.ones(P * K, 1, dtype=torch.bool), mask | (torch.arange(8) < 2)], dim=1).long()
    rewards = torch.randn(P, K)
    other = copy.deepcopy(actor)
    logprobs = other(sequences, mask, attention_mask=whole)
    old = logprobs.detach() - 0.1 * rewards.view(-1, 1) * mask
    sums = [(values * mask).sum(1).view(P, K) for values in (logprobs, old)]
    p3o_loss(sums[0], sums[1], sums[1], rewards, SETTINGS).loss.backward()

    optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
    strategy, args = MagicMock(accumulated_gradient=P // 2, ring_attn_group=None), MagicMock()
    args.train.dynamic_batch_enable = args.algo.kl.use_loss = args.algo.advantage.is_correction_enable = False
    args.algo.advantage.is_correction_level, args.algo.advantage.estimator = "off", "dr_grpo"
    args.algo.advantage.is_correction_type = "tis"
    args.algo.advantage.is_correction_mode, args.algo.advantage.is_correction_gating = "mask", "ratio"
    args.train.max_epochs, args.rollout.n_samples_per_prompt, args.actor.eps_clip_low_high = 1, K, (0.2, 0.2)
    args.actor.dual_clip = args.actor.entropy_coef = None
    args.actor.policy_loss_type, args.actor.aux_loss_coef, args.ds.packing_samples = "ppo", 0.0, False
    args.ds.tensor_parallel_size, strategy.args, strategy.all_reduce = 1, args, lambda values: values
    strategy.backward = lambda loss, *_: (loss / strategy.accumulated_gradient).backward()
    openrlhf.register()
    trainer = ppo_actor.ActorPPOTrainer(
        strategy, actor, None, optimizer, MagicMock(), micro_train_batch_size=2 * K, dataloader_pin_memory=False
    )
    order = torch.randperm(P * K)  # OpenRLHF has siblings as neighbours, and shuffles them one by one
    rows = dict(sequences=sequences, attention_mask=whole, action_mask=mask, action_log_probs=old)
    rows |= {"advantages": rewards.view(-1, 1) * mask, "rewards": rewards.flatten()}
    prompts = [str(row // K) for row in order.tolist()]
    experience = Experience(**{name: value[order] for name, value in rows.items()}, prompts=prompts, index=[0] * P * K)
    trainer.replay_buffer.append(experience)
    status = trainer.ppo_train(0.0)
    assert status["ppo_clip_ratio"] >= 0
    gradients = [[p.grad for p in model.parameters()] for model in (actor, other)]
    assert all(gradient.any() for gradient in chain(*gradients))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    args.train.dynamic_batch_enable = True
    with pytest.raises(ValueError, match="dynamic_batch_enable"):
        openrlhf.P3OActorTrainer(strategy, actor, None, optimizer, MagicMock())
