"""Sampling without training: responses to prompts, their rewards, and what of them is kept as data to train on."""

import json
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fastp3o.config import RunConfig, option, required
from fastp3o.data import load_prompts
from fastp3o.models.frozen import FrozenModel
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.models.sharding import loading_device, process_mesh
from fastp3o.precision import PRECISIONS, Precision, precision_of
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rewards.reward import Reward, columns_of, load_reward
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rollouts.config import SamplingConfig
from fastp3o.rollouts.gathered_sampler import GatheredSampler
from fastp3o.rollouts.named_sampler import named_sampler
from fastp3o.rollouts.sampler import Sampler, sample
from fastp3o.stages.online_models import whole_copy
from fastp3o.stages.samples import SamplesFile, samples_of
from fastp3o.stages.selection import FLAGS_OF, PAIRS, SelectionConfig, records_of
from fastp3o.stages.setup import new_accelerator
from fastp3o.training.durable import whole_file
from fastp3o.training.finite import require_finite
from fastp3o.training.processes import on_main_process
from fastp3o.training.reporting import Phases
from fastp3o.training.run_folder import KEPT, SAMPLES, check_output_dir, claim, clear_away, release, write_config
from fastp3o.training.states.changes import plain, require_same_run
from fastp3o.training.states.fingerprints import fingerprints_of
from fastp3o.training.states.manifest import Manifest, read_manifest


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RemoteConfig, SelectionConfig, SamplingConfig, RunConfig):
    """Samples responses, rewards them, and keeps some as data: best-of-n, rejection sampling, preference pairs."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("trust_remote_code", "offload")

    model: str = required("The policy that is sampled: a Hugging Face causal LM, as a hub name or a folder.")
    reward: str = required(
        "What responses are kept by: a reward model (folder or hub name), a function, as module:function, or a URL."
    )
    responses_per_prompt: int = option(8, "n: responses to each prompt.")
    precision: str = field(
        default="auto",
        metadata={
            "help": "Arithmetic of policy and reward model. auto: on a GPU fp16, as P3O samples, else fp32.",
            "choices": list(PRECISIONS),
        },
    )
    offload: bool = option(False, "Keep the reward model on the CPU between uses.")

    def __post_init__(self) -> None:
        self.check_values()
        self.check_run()
        self.check_sampling()
        self.check_selection()
        self.check_remote(self.reward)
        self.check_at_least(2 if self.keep in PAIRS else 1, "responses_per_prompt")
        if "accept" in FLAGS_OF[self.keep] and self.accept >= self.responses_per_prompt:
            raise ValueError(
                f"--accept ({self.accept}) must be below --responses_per_prompt ({self.responses_per_prompt}): "
                "all of them would be accepted"
            )

    @classmethod
    def changeable(cls) -> set[str]:
        """A batch is what a resumed run samples again, and in another one it would be rounded otherwise."""
        return super().changeable() - {"rollout_batch_size"}


class Generated(NamedTuple):
    """What a start of `generate` has to say.

    prompts, responses, mean_reward, empty, unfinished: of all that was sampled, before this start too. records,
    records_of_prompts: kept, and to how many prompts; mean_kept: their mean reward, of pairs their mean margin.
    tokens_per_second: sampled in this start, rewards not included; 0 where there was nothing left to sample.
    """

    prompts: int
    responses: int
    mean_reward: float
    empty: int
    unfinished: int
    records: int
    records_of_prompts: int
    mean_kept: float
    tokens_per_second: float = 0.0


def generate(config: GenerateConfig) -> Generated:
    """Samples responses to all prompts and leaves in `config.output_dir`

        samples.jsonl    a line a prompt: all responses with their rewards, see `Samples`
        kept.jsonl       what is kept of them, as demonstrations or as preferences

    A resumed run goes on behind the last whole batch, and has the bits of an unbroken one; so has one on another number
    of processes, which take whole batches in turns. What is kept may be another then: nothing is sampled again.

    Raises ValueError where nothing is kept, NotFiniteError where a reward is not finite.
    """
    precision = precision_of(config.precision, automatic="fp16")
    accelerator = new_accelerator(config.seed, precision)
    check_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    prompts, report = load_prompts(
        config.prompts,
        tokenizer,
        split=config.split,
        limit=config.limit,
        max_prompt_tokens=config.max_prompt_tokens,
        max_characters=config.max_characters,
        skip_bad_records=config.skip_bad_records,
        columns=columns_of([config.reward], config),
        as_given=True,
    )
    accelerator.print(f"{config.prompts}: {report}")
    samples = SamplesFile(Path(config.output_dir) / SAMPLES)
    manifest, done = on_main_process(accelerator, lambda: begun(accelerator, config, prompts, samples))
    models = None
    if done < len(prompts):
        models = load_models(config, accelerator, precision, tokenizer)

    folder = claim(accelerator, config)
    try:
        on_main_process(accelerator, lambda: begin(config, folder, manifest, samples, done))
        speed = 0.0
        if models is not None:
            speed = sample_rest(config, accelerator, prompts, *models, samples, done)
        generated = on_main_process(accelerator, lambda: write_kept(config, samples, folder / KEPT))
        generated = generated._replace(tokens_per_second=speed)
    finally:
        release(folder)
    accelerator.print(told(generated, config, folder / KEPT))
    return generated


def begun(
    accelerator: Accelerator, config: GenerateConfig, prompts: Dataset, samples: SamplesFile
) -> tuple[Manifest, int]:
    """What this run's samples are of, and how many prompts have theirs. Changes nothing.

    Raises ResumeError where those in the folder are of something else, and CorruptStateError where nothing says.
    """
    fingerprints = fingerprints_of(config, {"prompts": prompts})
    manifest = Manifest(0, False, accelerator.num_processes, plain(config), fingerprints, {})
    done = samples.whole_batches(config.rollout_batch_size, len(prompts))
    if config.resume:
        lines = []
        if samples.path.exists():
            before = read_manifest(samples.path.parent)
            lines += require_same_run(before, config, fingerprints, accelerator.num_processes)
        for line in [*lines, f"--resume: {done} of {len(prompts)} prompts have their responses in {samples.path}"]:
            accelerator.print(line)
    return manifest, done


def begin(config: GenerateConfig, folder: Path, manifest: Manifest, samples: SamplesFile, done: int) -> None:
    """Puts the folder in order for what comes next; every check is behind."""
    clear_away(folder)
    manifest.write(folder)
    samples.cut_behind(done)
    write_config(folder, config)


def load_models(
    config: GenerateConfig, accelerator: Accelerator, precision: Precision, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sampler, Reward]:
    """A sampler of the policy and the reward; of several processes each has a part of the models."""
    device, mesh = accelerator.device, process_mesh(accelerator.device)
    loading: dict[str, Any] = {"dtype": precision.weights, "trust_remote_code": config.trust_remote_code}
    reward = load_reward(
        config.reward,
        tokenizer,
        device=device,
        packing=config.packing,
        mesh=mesh,
        offload=config.offload,
        remote=config,
        **loading,
    )
    if isinstance(reward, ModelReward) and reward.shares_vocabulary:
        reward.model.model.check_reach(config.longest_sequence)
    policy = load_policy(config.model, device=loading_device(device, mesh), **loading)
    policy.check_reach(config.longest_sequence)
    copy = None
    if mesh is not None:
        # Its own part and one of a reward model of its size.
        copy = whole_copy(policy, accelerator, precision, mesh, 2 * precision.weights.itemsize)
    FrozenModel(policy, device, mesh, offload=False)
    sampler = named_sampler(
        config.sampler,
        policy if copy is None else copy.model,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.rollout_batch_size,
        memory_gb=config.rollout_memory,
        compiles=config.compile_rollouts,
        settings=config.sampling_settings(),
        graph=False if copy is not None and copy.by_layer else None,
    )
    return sampler if copy is None else GatheredSampler(sampler, policy, copy), reward


def sample_rest(
    config: GenerateConfig,
    accelerator: Accelerator,
    prompts: Dataset,
    sampler: Sampler,
    reward: Reward,
    samples: SamplesFile,
    done: int,
) -> float:
    """Samples the responses to all prompts but the first `done`. Returns tokens per second, over all processes."""
    size, total, phases, tokens = config.rollout_batch_size, len(prompts), Phases(), 0
    disable = None if accelerator.is_main_process else True
    with tqdm(total=total, initial=done, desc="generate", unit="prompt", disable=disable) as bar:
        for first in range(done, total, size * accelerator.num_processes):
            begin = first + size * accelerator.process_index
            numbers = list(range(begin, min(begin + size, total)))
            # A process that has none left works on another's first prompt: each must make as many passes.
            examples = prompts[numbers or [first]]
            with phases("sampling"):
                rollouts = sample(
                    sampler,
                    examples,
                    numbers or [first],
                    responses_per_prompt=config.responses_per_prompt,
                    seed=config.seed,
                )
            with accelerator.autocast():
                rewards = reward(rollouts)
            require_finite(accelerator, "a reward", rewards)
            own = samples_of(rollouts, rewards, numbers, examples["given"]) if numbers else []
            of_all = list(chain.from_iterable(gather_object([own])))
            on_main_process(accelerator, partial(samples.append, of_all))
            tokens += sum(sum(one.lengths) for one in of_all)
            bar.update(len(of_all))
    return tokens / phases.read()["sampling"]


def write_kept(config: GenerateConfig, samples: SamplesFile, path: Path) -> Generated:
    """Writes the records that are kept, in the order of the prompts. Raises ValueError where there are none."""
    rewards, kept = [], []
    prompts = with_records = empty = unfinished = 0
    with whole_file(path) as file:
        for one in samples:
            records = records_of(one, config, config.seed)
            for record in records:
                file.write(f"{json.dumps(record, ensure_ascii=False, allow_nan=False)}\n".encode())
                kept.append(record["margin" if config.keep in PAIRS else "reward"])
            prompts += 1
            with_records += bool(records)
            rewards += one.rewards
            empty += sum(not text.strip() for text in one.responses)
            unfinished += len(one.finished) - sum(one.finished)
        if not kept:
            raise ValueError(
                f"nothing of {len(rewards)} responses is kept by --keep {config.keep}: rewards go from "
                f"{min(rewards):.4g} to {max(rewards):.4g}, {unfinished} responses have no end-of-sequence and {empty} "
                f"no text. All are in {samples.path}: --resume with other settings keeps others"
            )
    means = (sum(values) / len(values) for values in (rewards, kept))
    mean_reward, mean_kept = means
    return Generated(prompts, len(rewards), mean_reward, empty, unfinished, len(kept), with_records, mean_kept)


def told(generated: Generated, config: GenerateConfig, path: Path) -> str:
    g = generated
    speed = f", {g.tokens_per_second:.0f} tokens per second" if g.tokens_per_second else ""
    unfinished = "cut at --max_response_tokens" + ("" if config.keep_unfinished else " and left out")
    return (
        f"{g.responses} responses to {g.prompts} prompts, mean reward {g.mean_reward:.4g}{speed}; {g.unfinished} "
        f"{unfinished}, {g.empty} without text and left out\n"
        f"{path} ({config.keep}): {g.records} {'pairs' if config.keep in PAIRS else 'responses'} of "
        f"{g.records_of_prompts} prompts, mean {'margin' if config.keep in PAIRS else 'reward'} {g.mean_kept:.4g}"
    )
