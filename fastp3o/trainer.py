"""Stage 3, Pairwise Proximal Policy Optimization: arXiv 2310.00212, its algorithm box from top to bottom.

P pairs, N response tokens of a batch; sequence 2p is response 1 of pair p and sequence 2p + 1 its response 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.checkpoints import (
    FINISHED_MODEL,
    STATE,
    load_state,
    prepare_output_dir,
    save_model,
    save_state,
)
from fastp3o.config import P3OConfig
from fastp3o.data import load_prompts
from fastp3o.evaluation import evaluate
from fastp3o.models import load_policy, load_tokenizer, scored_logits, scored_logprobs
from fastp3o.optimization import make_optimizer
from fastp3o.padding import Batch, pad
from fastp3o.reporting import Phases, Reporter, peak_memory_gib
from fastp3o.reward_scaling import RewardScaler
from fastp3o.rewards import Reward, load_reward
from fastp3o.rollouts import Rollouts, sample
from fastp3o.sampling import rows_of_step, seed_of, share_of_process, shuffled
from fastp3o.setup import make_accelerator, share, start_trackers
from fastp3o_kernels import logits_p3o_loss, sequence_logprobs
