"""Sampling without training: responses to prompts, their rewards, and those kept as data to train
on.
"""

import json
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm

from fastp3o.config import LARGEST_INT
from fastp3o.data.encoding import Encoder
from fastp3o.data.loading import load_prompts
from fastp3o.data.tokens import Continuation
from fastp3o.errors import UserError
from fastp3o.evaluation.judge import load_judge
from fastp3o.generate.config import TOURNAMENT, GenerateConfig
from fastp3o.generate.read_back import reads_back
from fastp3o.generate.report import Generated, summary, write_kept
from fastp3o.generate.revision import read_principles, revising
from fastp3o.generate.samples import SamplesFile, make_samples
from fastp3o.models.attention import choose_attention
from fastp3o.models.ends import checkpoint_ends
from fastp3o.models.frozen import load_frozen_policy
from fastp3o.models.sharding import FrozenModel, process_mesh
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.comparisons import JudgedPairs, Knockout, RelativeReward
from fastp3o.rewards.load import choose_judged_pairs, load_named_reward
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.reward import Reward, asked_of_records, require_finite_rewards, rewarded
from fastp3o.rewards.rivals import compares
from fastp3o.rollouts.groups import Sampler, make_prompts
from fastp3o.rollouts.plan import policy_sampler, sampled_frozen
from fastp3o.rollouts.prefix import Prefix
from fastp3o.run.fingerprints import run_fingerprints
from fastp3o.run.folder import check_output_dir, claim, clear_away, release, write_config
from fastp3o.run.manifest import (
    CorruptStateError,
    Manifest,
    first_start,
    read_manifest,
    require_same_run,
)
from fastp3o.run.names import KEPT, SAMPLES
from fastp3o.run.phases import Phases
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision
from fastp3o.runtime.processes import on_main_process
from fastp3o.training.rivals import Anchors
from fastp3o.training.setup import make_accelerator


def generate(config: GenerateConfig) -> Generated:
    """Samples responses to all prompts and leaves in `config.output_dir`

    samples.jsonl a line a prompt: all responses with their rewards, see `Samples` kept.jsonl those
    that are kept, as demonstrations or as preferences

    A resumed run continues after the last whole batch, and has the bits of an unbroken one; so has
    one on another number of processes, which take whole batches in turns. It may keep other
    responses: nothing is sampled again. Without `rollout_memory`, free memory decides how many
    prompts are sampled at once if it has no room for a batch, and the bits are those of that
    number.

    With --keep judged also verdicts.jsonl, what an endpoint has answered. A resumed run does not
    ask for it again. Raises ValueError if nothing is kept, NotFiniteError if a reward is not
    finite, FunctionError if a reward function fails, EndpointError if an endpoint refuses or fails
    after all retries.
    """
    config.check_complete()
    precision = choose_precision(config.precision, automatic="fp16")
    accelerator = make_accelerator(config.seed, precision)
    choose_attention(config.attention, accelerator.device)
    check_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, **config.tokenizer_options)
    folders = [Path(config.output_dir)] if config.resume else []
    clock = on_main_process(accelerator, lambda: first_start(folders))
    context = Context(
        accelerator, precision, tokenizer, process_mesh(accelerator.device), clock=clock
    )
    asked = asked_of_records(config.scorers, config) | {"as_given": True}
    if config.principles:  # the requests of messages are a user's
        asked["observation_role"] = "user"
    prompts, report = load_prompts(
        config.prompts, tokenizer, clock=clock, **asked, **config.reading
    )
    accelerator.print(f"{config.prompts}: {report}")
    samples = SamplesFile(Path(config.output_dir) / SAMPLES)
    load_judge(config, None)  # what is wrong with it is said before anything is sampled
    manifest, done = on_main_process(
        accelerator, lambda: find_progress(context, config, prompts, samples)
    )
    models = load_models(context, config, prompts) if done < len(prompts) else None

    folder = claim(accelerator, config)
    try:
        on_main_process(accelerator, lambda: begin(config, folder, manifest, samples, done))
        speed = (
            0.0 if models is None else sample_rest(context, config, prompts, *models, samples, done)
        )
        generated = on_main_process(
            accelerator,
            lambda: write_kept(config, config, samples, folder / KEPT, seed=config.seed),
        )
        generated.tokens_per_second = speed
    finally:
        release(folder)
    accelerator.print(summary(generated, config, folder / KEPT))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return generated


def load_models(
    context: Context, config: GenerateConfig, prompts: Dataset
) -> tuple[Sampler, Reward | None]:
    """A sampler of the policy, and the reward. Each process has a part of the models. prompts: an
    endpoint is asked about the first one, before anything begins.
    """
    _, precision, tokenizer, mesh, *_ = context
    prefix, reward = Prefix(tokenizer, config.prefix), None
    if config.reward:
        reward = load_named_reward(
            context, config, config, config.reward, prompts, continues=config.resume
        )
        choose_judged_pairs({"reward": reward}, config.comparisons)
        if compares(reward) and config.responses_per_prompt < 2:
            raise UserError(
                f"--reward {config.reward} compares responses to a prompt: --responses_per_prompt must be at least 2"
            )
    if config.keep == TOURNAMENT:
        if not isinstance(reward, RelativeReward):
            raise UserError(
                f"--keep tournament needs a reward that compares responses, and {config.reward} scores them"
            )
        reward = Knockout(reward)
    policy = load_frozen_policy(context, config, config.model)
    policy.check_reach(config.longest_sequence + len(prefix.ids))
    if config.principles:
        chats = isinstance(json.loads(prompts[0]["given"])["prompt"], list)
        room = (policy.longest_sequence or LARGEST_INT) - config.max_prompt_tokens - len(prefix.ids)
        config = config.with_values(
            **revising(
                read_principles(config.principles),
                rounds=config.revisions,
                turn_tokens=config.max_response_tokens,
                chats=chats,
                room=room,
                seed=config.seed,
            )
        )
    # Its own weights are spread, and those of a reward model of its size.
    sampled = sampled_frozen(config, policy, context, 2 * precision.weights.itemsize)
    FrozenModel(policy, context.device, mesh, offload=False)
    sampler = prefix.before_each(
        policy_sampler(config, sampled, context, config.rollout_batch_size)
    )
    if config.comparisons == "anchor" and isinstance(reward, JudgedPairs):
        reward.anchor = Anchors(sampler, config.seed)
    return sampler, reward


def asked_together(reward: Reward) -> bool:
    """Whether each process has a part of a reward's models, or of the policy that a reward samples
    anchors from.
    """
    if isinstance(reward, JudgedPairs) and reward.anchor is not None:
        return True
    return isinstance(reward, ModelReward | Cascade) or getattr(reward, "together", False)


def find_progress(
    context: Context, config: GenerateConfig, prompts: Dataset, samples: SamplesFile
) -> tuple[Manifest, int]:
    """Returns the manifest of this run's samples, and the number of prompts that have theirs.
    Changes nothing. Raises ResumeError if the samples in the folder are of another run, and
    CorruptStateError if nothing tells.
    """
    accelerator, clock = context.accelerator, context.clock
    fingerprints = run_fingerprints(config.values(), {"prompts": prompts})
    begun = "" if clock is None else clock.moment.isoformat()
    manifest = Manifest(
        0, False, accelerator.num_processes, config.plain(), fingerprints, {}, begun
    )
    done = samples.whole_batches(config.rollout_batch_size, len(prompts))
    if config.resume:
        lines = []
        if samples.path.exists():
            try:
                before = read_manifest(samples.path.parent)
            except CorruptStateError as error:
                unknown = f"--resume: what the samples in {samples.path.parent} are of cannot be told: {error}"
                raise CorruptStateError(f"{unknown}. Begin a new --output_dir") from error
            lines += require_same_run(before, config, fingerprints, accelerator.num_processes)
        for line in [
            *lines,
            f"--resume: {done} of {len(prompts)} prompts have their responses in {samples.path}",
        ]:
            accelerator.print(line)
    return manifest, done


def begin(
    config: GenerateConfig, folder: Path, manifest: Manifest, samples: SamplesFile, done: int
) -> None:
    """Puts the folder in order for sampling, after all checks."""
    clear_away(folder)
    manifest.write(folder)
    samples.cut_after(done)
    write_config(folder, config)


def sample_rest(
    context: Context,
    config: GenerateConfig,
    prompts: Dataset,
    sampler: Sampler,
    reward: Reward | None,
    samples: SamplesFile,
    done: int,
) -> float:
    """Samples responses to all prompts after the first `done`. Returns tokens per second, over all
    processes.
    """
    accelerator, tokenizer = context.accelerator, context.tokenizer
    limits = (config.max_prompt_tokens, None, config.max_characters, config.template_settings)
    ends = checkpoint_ends(config.model, tokenizer, trust_remote_code=config.trust_remote_code)
    read = reads_back(Encoder(tokenizer, *limits, ends, context.clock))
    as_sample = partial(make_samples, continuation=Continuation(tokenizer), reads_back=read)
    size, total, phases, tokens = config.rollout_batch_size, len(prompts), Phases(), 0
    disable = None if accelerator.is_main_process else True
    with tqdm(total=total, initial=done, desc="generate", unit="prompt", disable=disable) as bar:
        for first in range(done, total, size * accelerator.num_processes):
            start = first + size * accelerator.process_index
            share = list(range(start, min(start + size, total)))
            # A process that has none left works on another's first prompt: each must make as many
            # passes.
            numbers = share or [first]
            examples = prompts[numbers]
            with phases("sampling"):
                groups = sampler(
                    make_prompts(examples, numbers), config.responses_per_prompt, config.seed
                )
            # A model that is spread over processes needs all of them; other rewards only see
            # samples that are kept.
            asked = {"reward": reward} if reward and (share or asked_together(reward)) else {}
            with accelerator.autocast():
                rewards = rewarded(asked, groups).get("reward", torch.zeros(len(groups), 0))
            if reward is not None:
                require_finite_rewards(accelerator, reward, groups, rewards)
            batch = gather_object(
                list(map(as_sample, groups, rewards.tolist(), examples["given"])) if share else []
            )
            on_main_process(accelerator, partial(samples.append, batch))
            tokens += sum(sum(sample.lengths) for sample in batch)
            bar.update(len(batch))
    return tokens / phases.read()["sampling"]
