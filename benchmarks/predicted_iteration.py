"""Predicted seconds of an iteration of large policies on several nodes, by formula: no figure here
was measured.

One half of the GPUs trains, in nodes of eight with FSDP2 over all and tensor parallelism within a
node, the other half samples on vLLM servers. Prompts are computed once a group, activations again
in the backward pass. One pass an update; old and reference log-probs are two further ones. `python
-m benchmarks.report` prints the table.
"""

from typing import NamedTuple

# An H100 with NVLink and a 400 Gb/s card: datasheets, in one direction. The shares of them that
# programs reach.
FLOPS, MEMORY, NVLINK, CARD, GPU_BYTES = 989e12, 3.35e12, 450e9, 50e9, 80e9
USED_FLOPS, USED_MEMORY, USED_LINKS = 0.45, 0.6, 0.75
# bytes a second of a folder of weights in memory or on a fast file system
WRITTEN, READ = (1.5e9, 3e9)
LAUNCHES = 0.002  # seconds of a decode step that no byte explains
MOST_RUNNING = 512  # responses that a server samples at once
ROW = 65536  # tokens of a packed row, or of the part of a group that is too long for one
HALF = 2  # bytes of a number in bf16
STATES = 16  # bytes of a parameter that trains: weights, masters, gradients and moments


class Policy(NamedTuple):
    """A Llama 3.1. training, serving: GPUs that compute a layer together."""

    parameters: float
    layers: int
    hidden: int
    training: int
    serving: int
    vocabulary: int = 128256
    keys: int = 1024

    @property
    def bytes(self) -> float:
        return HALF * self.parameters


POLICIES = {"8 B": Policy(8.03e9, 32, 4096, 1, 1), "70 B": Policy(70.6e9, 80, 8192, 8, 4)}
GPUS = (16, 64)
# Prompts, responses to each, tokens of a prompt and of a response.
ROUNDS = ((256, 8, 512, 1024), (64, 16, 1024, 31744))


class Seconds(NamedTuple):
    rollouts: float
    logprobs: float
    update: float
    folder: float
    nccl: float


def predicted(policy: Policy, gpus: int, P: int, K: int, prompt: int, response: int) -> Seconds:
    trainers = servers = gpus // 2
    R, tokens = P * K, P * (prompt + K * response)
    pairs = P * prompt**2 / 2 + R * response * (prompt + response / 2)  # of a query and a key
    body = 2 * (policy.parameters - 2 * policy.vocabulary * policy.hidden) * tokens
    body += 4 * policy.layers * policy.hidden * pairs
    head = 2 * policy.vocabulary * policy.hidden * R * response
    rate = trainers * FLOPS * USED_FLOPS
    # FSDP2 gathers the layers in each pass, and adds up gradients in fp32; products hide it, or it
    # hides them.
    passes = max(1.0, tokens * policy.training / trainers / ROW)
    link = NVLINK if trainers <= 8 and policy.training == 1 else CARD
    gather = passes * policy.bytes / policy.training / (link * USED_LINKS)
    # Tensor parallelism adds up hidden states twice a layer and pass, which nothing hides.
    sums = (
        4
        * policy.layers
        * policy.hidden
        * HALF
        * tokens
        * policy.training
        / trainers
        / (NVLINK * USED_LINKS)
    )
    sums *= (policy.training - 1) / policy.training
    logprobs = 2 * (max((body + head) / rate, gather) + sums)
    update = max((4 * body + 3 * head) / rate, 4 * gather) + 3 * sums
    # A server reads its weights, and the cache of what runs on it, once a step. Waves follow one
    # another.
    groups = servers / policy.serving
    token_bytes = 2 * policy.layers * policy.keys * HALF
    room = 0.9 * GPU_BYTES * policy.serving - policy.bytes
    running = min(R / groups, room / (token_bytes * (prompt + response / 2)), MOST_RUNNING)
    read = policy.bytes + running * token_bytes * (prompt + response / 2)
    step = (
        max(read / (MEMORY * USED_MEMORY), 2 * policy.parameters * running / (FLOPS * USED_FLOPS))
        / policy.serving
    )
    rollouts = R / groups / running * response * (step + LAUNCHES)
    rollouts += 2 * policy.parameters * P * prompt / (servers * FLOPS * USED_FLOPS)
    gathered = policy.bytes / (link * USED_LINKS)
    folder = gathered + policy.bytes / WRITTEN + policy.bytes / READ
    return Seconds(
        rollouts, logprobs, update, folder, gathered + policy.bytes / (CARD * USED_LINKS)
    )


def predicted_iterations() -> list[list[str]]:
    """Seconds; weights and iteration by a folder in whole rounds, and by NCCL one round ahead.
    Header first.
    """
    lines = [["predicted, s", "rollouts", "log-probs", "update", "weights", "iteration"]]
    for name, policy in POLICIES.items():
        for gpus in GPUS:
            for P, K, prompt, response in ROUNDS:
                s = predicted(policy, gpus, P, K, prompt, response)
                trains = s.logprobs + s.update
                totals = s.rollouts + trains + s.folder, max(s.rollouts, trains) + s.nccl
                pairs = (
                    f"{first:.0f} / {second:.{int(second < 10)}f}"
                    for first, second in ((s.folder, s.nccl), totals)
                )
                cells = [*(f"{value:.0f}" for value in (s.rollouts, s.logprobs, s.update)), *pairs]
                if STATES * policy.parameters / (gpus // 2) > GPU_BYTES:
                    cells[1:] = ["–"] * 4
                lines.append([f"{name}, {gpus}: {P}×{K}, {prompt}+{response}", *cells])
    return lines
