"""What sampling works with, built from its configuration, and the folder that it goes on with."""

from pathlib import Path

from datasets import Dataset

from fastp3o.context import Context
from fastp3o.models.loading import load_policy
from fastp3o.models.sharding import FrozenModel, loading_device
from fastp3o.rewards.reward import Reward
from fastp3o.rollouts.sampler import Sampler
from fastp3o.stages.generate.config import GenerateConfig
from fastp3o.stages.generate.samples import SamplesFile
from fastp3o.stages.models import load_named_reward, with_copy
from fastp3o.stages.samplers import policy_sampler
from fastp3o.training.run_folder import clear_away, write_config
from fastp3o.training.states.fingerprints import fingerprints_of
from fastp3o.training.states.manifest import CorruptStateError, Manifest, plain, read_manifest, require_same_run


def load_models(context: Context, config: GenerateConfig, prompts: Dataset) -> tuple[Sampler, Reward]:
    """A sampler of the policy, and the reward. Each process has a part of the models.

    prompts: an endpoint is asked about the first one, before anything begins.
    """
    _, precision, tokenizer, mesh = context
    reward = load_named_reward(context, config, config.reward, prompts)
    policy = load_policy(
        config.model,
        device=loading_device(context.device, mesh),
        dtype=precision.weights,
        trust_remote_code=config.trust_remote_code,
    )
    policy.check_reach(config.longest_sequence)
    # What is spread: its own weights, and those of a reward model of its size.
    sampled = with_copy(policy, context, 2 * precision.weights.itemsize)
    FrozenModel(policy, context.device, mesh, offload=False)
    return policy_sampler(config, sampled, tokenizer, config.rollout_batch_size, config.sampling_settings()), reward


def begun(context: Context, config: GenerateConfig, prompts: Dataset, samples: SamplesFile) -> tuple[Manifest, int]:
    """What this run's samples are of, and how many prompts have theirs. Changes nothing.

    Raises ResumeError where those in the folder are of something else, and CorruptStateError where nothing says.
    """
    accelerator = context.accelerator
    fingerprints = fingerprints_of(config, {"prompts": prompts})
    manifest = Manifest(0, False, accelerator.num_processes, plain(config), fingerprints, {})
    done = samples.whole_batches(config.rollout_batch_size, len(prompts))
    if config.resume:
        lines = []
        if samples.path.exists():
            before = manifest_of(samples)
            lines += require_same_run(before, config, fingerprints, accelerator.num_processes)
        for line in [*lines, f"--resume: {done} of {len(prompts)} prompts have their responses in {samples.path}"]:
            accelerator.print(line)
    return manifest, done


def manifest_of(samples: SamplesFile) -> Manifest:
    folder = samples.path.parent
    try:
        return read_manifest(folder)
    except CorruptStateError as error:
        raise CorruptStateError(
            f"--resume: what the samples in {folder} are of cannot be told: {error}. Begin a new --output_dir"
        ) from error


def begin(config: GenerateConfig, folder: Path, manifest: Manifest, samples: SamplesFile, done: int) -> None:
    """Puts the folder in order for what comes next; every check is behind."""
    clear_away(folder)
    manifest.write(folder)
    samples.cut_behind(done)
    write_config(folder, config)
