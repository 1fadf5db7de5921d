"""Sampling without training: responses to prompts, their rewards, and what of them is kept as data to train on."""

from functools import partial
from itertools import chain
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm

from fastp3o.context import Context
from fastp3o.data import load_prompts
from fastp3o.models.loading import load_tokenizer
from fastp3o.models.sharding import process_mesh
from fastp3o.precision import precision_of
from fastp3o.rewards.reward import Reward, columns_of
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rewards.scoring import scored
from fastp3o.rollouts.sampler import Sampler, sample
from fastp3o.stages.generate.config import GenerateConfig
from fastp3o.stages.generate.report import Generated, told, write_kept
from fastp3o.stages.generate.samples import SamplesFile, samples_of
from fastp3o.stages.generate.setup import begin, begun, load_models
from fastp3o.stages.setup import make_accelerator
from fastp3o.training.processes import on_main_process, require_finite
from fastp3o.training.reporting import Phases
from fastp3o.training.run_folder import KEPT, SAMPLES, check_output_dir, claim, release


def generate(config: GenerateConfig) -> Generated:
    """Samples responses to all prompts and leaves in `config.output_dir`

        samples.jsonl    a line a prompt: all responses with their rewards, see `Samples`
        kept.jsonl       what is kept of them, as demonstrations or as preferences

    A resumed run goes on behind the last whole batch, and has the bits of an unbroken one; so has one on another number
    of processes, which take whole batches in turns. What is kept may be another then: nothing is sampled again. Without
    `rollout_memory`, free memory decides how many prompts are sampled at once where it has no room for a batch, and the
    bits are those of that number.

    Raises ValueError where nothing is kept, NotFiniteError where a reward is not finite, FunctionError where a reward
    function fails, EndpointError where an endpoint refuses or fails after all retries.
    """
    precision = precision_of(config.precision, automatic="fp16")
    accelerator = make_accelerator(config.seed, precision)
    check_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    context = Context(accelerator, precision, tokenizer, process_mesh(accelerator.device))
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
    manifest, done = on_main_process(accelerator, lambda: begun(context, config, prompts, samples))
    models = None
    if done < len(prompts):
        models = load_models(context, config, prompts)

    folder = claim(accelerator, config)
    try:
        on_main_process(accelerator, lambda: begin(config, folder, manifest, samples, done))
        speed = 0.0
        if models is not None:
            speed = sample_rest(context, config, prompts, *models, samples, done)
        generated = on_main_process(accelerator, lambda: write_kept(config, samples, folder / KEPT))
        generated = generated._replace(tokens_per_second=speed)
    finally:
        release(folder)
    accelerator.print(told(generated, config, folder / KEPT))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return generated


def sample_rest(
    context: Context,
    config: GenerateConfig,
    prompts: Dataset,
    sampler: Sampler,
    reward: Reward,
    samples: SamplesFile,
    done: int,
) -> float:
    """Samples the responses to all prompts but the first `done`. Returns tokens per second, over all processes."""
    accelerator = context.accelerator
    size, total, phases, tokens = config.rollout_batch_size, len(prompts), Phases(), 0
    disable = None if accelerator.is_main_process else True
    with tqdm(total=total, initial=done, desc="generate", unit="prompt", disable=disable) as bar:
        for first in range(done, total, size * accelerator.num_processes):
            own_first = first + size * accelerator.process_index
            numbers = list(range(own_first, min(own_first + size, total)))
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
            # A model that is spread over processes needs all of them; others are not asked for what is thrown away.
            asked = {"reward": reward} if numbers or isinstance(reward, ModelReward) else {}
            with accelerator.autocast():
                rewards = scored(accelerator, asked, rollouts).get("reward", torch.zeros(0))
            require_finite(accelerator, "a reward", rewards)
            own = samples_of(rollouts, rewards, numbers, examples["given"]) if numbers else []
            of_all = list(chain.from_iterable(gather_object([own])))
            on_main_process(accelerator, partial(samples.append, of_all))
            tokens += sum(sum(one.lengths) for one in of_all)
            bar.update(len(of_all))
    return tokens / phases.read()["sampling"]
