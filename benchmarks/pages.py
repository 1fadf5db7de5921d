"""Records -> the sections of pages that state their figures: none is typed.

`python -m benchmarks.report --write` writes them between their marks, and a test compares them.
"""

import json
import re
import statistics
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.environment import described, machine, origin
from benchmarks.goals import BOTH, CPU, GOALS, GPU, goals_table, speedups
from benchmarks.markdown import between_markers, bullet, markdown
from benchmarks.modelled import MEASURED, modelled
from benchmarks.predicted_iteration import predicted_iterations
from benchmarks.records import (
    CPU_RECORDS,
    GPU_RECORD,
    NOT_MEASURED,
    RESULTS,
    Results,
    figure,
    load,
    results_of,
    select,
    spread,
)
from benchmarks.results_file import name_of
from benchmarks.shapes import LARGE_HEADS

Records = dict[str, Any]  # by the names of their files; the quickstart's seeds together
Section = Callable[[Records], str]
ROOT = Path(__file__).parents[1]
# The number of tokens at which every implementation is measured on a GPU.
N = 8192
# Of 95%, by degrees of freedom.
STUDENT = {3: 3.182, 7: 2.365}
SEEDS, EXPLOITED = "quickstart/seed_*.txt", "quickstart/exploited.eval.jsonl"
HIDDEN = {"level": "hidden", "passes": BOTH}
LOGITS = {"level": "logits", "passes": BOTH}
FROZEN = {"level": "hidden", "passes": f"frozen head, {BOTH}"}


def records() -> Records:
    found: Records = {path.name: load(path) for path in sorted(RESULTS.glob("*.json"))}
    printed = sorted((RESULTS / "quickstart").glob("seed_*.txt"))
    found[SEEDS] = [quickstart_figures(path.read_text()) for path in printed]
    lines = (RESULTS / EXPLOITED).read_text().splitlines()
    return found | {EXPLOITED: [json.loads(line) for line in lines]}


def quickstart_figures(printed: str) -> dict[str, float]:
    """What a run of scripts/quickstart.sh printed of its reward model and of the taste before and after."""
    number = r"(-?\d+\.?\d*)"
    (accuracy,) = re.findall(rf"accuracy {number},", printed)
    figures = {"accuracy": float(accuracy)}
    for when in ("before", "after"):
        (found,) = re.findall(rf"^  {when} +sampled +{number} ± {number} +greedy +{number}$", printed, re.MULTILINE)
        names = (f"sampled {when}", f"deviation {when}", f"greedy {when}")
        figures |= dict(zip(names, map(float, found), strict=True))
    return figures


def results(records: Records, device: str) -> Results:
    return results_of(records[name] for name in ((GPU_RECORD,) if device == GPU else CPU_RECORDS))


def link(name: str, text: str = "record") -> str:
    return f"[{text}](results/{name})"


# --- benchmarks/README.md


def devices(records: Records) -> str:
    """What was measured on which machine, and how many goals are met."""
    gpu, cpu = records[GPU_RECORD], [records[name]["environment"] for name in CPU_RECORDS]
    links: dict[str, list[str]] = {}
    for name in CPU_RECORDS:
        links.setdefault(origin(records[name]["environment"]), []).append(link(name, name.partition(".")[0]))
    sources = "; ".join(f"{', '.join(names)} at {found}" for found, names in links.items())
    packages = ", ".join(f"{name} {version}" for name, version in cpu[0]["packages"].items() if version)
    lines = [
        f"**GPU**: {described(gpu['environment'])} ({link(GPU_RECORD)}). {goals_met(records, GPU)}. "
        f"{tests_passed(gpu)}.",
        f"**CPU**: {' and '.join(dict.fromkeys(map(machine, cpu)))}; {packages}; {sources}. {goals_met(records, CPU)}.",
    ]
    return "\n".join(map(bullet, lines))


def goals_met(records: Records, device: str) -> str:
    verdicts = [goal.verdict(results(records, device)).met for goal in GOALS if goal.device == device]
    measured = [verdict for verdict in verdicts if verdict != NOT_MEASURED]
    met = f"{measured.count('met')} of {len(measured)} goals that were measured are met"
    return f"{met}, {len(verdicts)} were set ([table](#goals))"


def tests_passed(record: dict) -> str:
    """An old record names the tests that failed and does not count the others."""
    if "tests" in record:
        passed, failed = f"{record['tests']['passed']:,} tests passed there", record["tests"]["failed"]
    else:
        passed = "How many tests passed there is not recorded"
        failed = [entry["name"] for entry in record["not_measured"] if entry["reason"] == "failed"]
    names = dict.fromkeys(name_of(test).partition("[")[0] for test in failed)
    return f"{passed}, {len(failed)} failed" + (f" (`{'`, `'.join(names)}`)" if failed else "")


def products_news(records: Records) -> str:
    """The largest piece of news about GPUs."""
    found = select(results(records, GPU), level="model")
    update, logprobs = (
        [r for r in found if r["passes"] == f"{kind}, prompts of 350, 2 responses of 40"]
        for kind in ("update", "log-probs")
    )
    layouts = select(results(records, GPU), level="training")
    packing = "plain packing was timed there too" if layouts else "packing was not timed there"
    return bullet(
        f"**On a GPU** one update of 1 B parameters takes {figure(update, 'ratio_to_bare')} × the time of its own "
        f"matrix products ({spread(rates(update), '{:.0%}')} of their rate), log-probs "
        f"{figure(logprobs, 'ratio_to_bare')} × ({spread(rates(logprobs), '{:.0%}')}); {packing}."
    )


def rates(results: Results) -> list[float]:
    return [1 / result["ratio_to_bare"] for result in results]


def gpu_head(records: Records) -> str:
    """P3O's loss from hidden states at each head."""
    measured = results(records, GPU)
    device, shapes = records[GPU_RECORD]["environment"]["device"], [f"D {D}, V {V:,}" for D, V in LARGE_HEADS]
    lines = [[f"{device}, {N:,} tokens: ms (× bare products; extra GB)", *shapes]]
    for what, wanted in {
        "P3O's loss, fp16, the default": HIDDEN | {"implementation": "fastp3o", "dtype": "float16"},
        "PyTorch, fp16": HIDDEN | {"implementation": "eager", "dtype": "float16"},
        "P3O's loss, bf16": HIDDEN | {"implementation": "fastp3o", "dtype": "bfloat16"},
        "PyTorch, bf16": HIDDEN | {"implementation": "eager", "dtype": "bfloat16"},
        "`linear_logprobs` and P3O's loss, bf16": HIDDEN
        | {"implementation": "fastp3o linear_logprobs", "dtype": "bfloat16"},
        "TRL's log-probs and P3O's loss, bf16": HIDDEN | {"implementation": "TRL", "dtype": "bfloat16"},
        "CCE and P3O's loss, bf16": HIDDEN | {"implementation": "CCE", "dtype": "bfloat16"},
        "frozen head, fp16, × two products": FROZEN | {"implementation": "fastp3o", "dtype": "float16"},
        "frozen head, bf16, × two products": FROZEN | {"implementation": "fastp3o", "dtype": "bfloat16"},
    }.items():
        at_heads = [select(measured, N=N, D=D, V=V, **wanted) for D, V in LARGE_HEADS]
        lines.append([what, *map(time_ratio_and_memory, at_heads)])
    return markdown(lines)


def time_ratio_and_memory(found: Results) -> str:
    if not found:
        return NOT_MEASURED
    (result,) = found
    return f"{result['ms']:.1f} ({result['ratio_to_bare']:.2f}; {result['extra_gb']:.1f})"


def gpu_others(records: Records) -> str:
    """What else was measured on a GPU."""
    measured = results(records, GPU)
    model, objectives = select(measured, level="model"), select(measured, level="objectives")
    ratio = "ratio_to_bare"
    lines = [[records[GPU_RECORD]["environment"]["device"], "fastp3o", "others"]]
    lines.append(
        [
            "the loss from logits, time × a copy",
            figure(measured, ratio, **LOGITS, implementation="fastp3o"),
            f"with TRL's log-probs {figure(measured, ratio, **LOGITS, implementation='TRL')}, "
            f"PyTorch {figure(measured, ratio, **LOGITS, implementation='eager')}",
        ]
    )
    names = {result["objective"] for result in select(objectives, implementation="fastp3o")}
    lines.append(
        [
            f"losses of {len(names)} objectives, first head, bf16, time × bare products",
            figure(objectives, ratio, implementation="fastp3o"),
            "",
        ]
    )
    for kind in ("update", "log-probs"):
        found = [result for result in model if result["passes"].startswith(kind)]
        lines.append([f"{kind} of 1 B, all lengths, time × its products", figure(found, ratio), ""])
    lines.append(["update of 1 B, × plain packing", packing_speed(measured, "shared prompts", 350, 2), ""])
    engines = ways(measured, "fastp3o engine")
    shares = spread((way["floor_ms"] / way["ms"] for way in engines), "{:.0%}")
    sampled = f"{spread(way['ratio'] for way in engines)}, {shares} of the floor"
    lines.append(["rollouts of 1 B, 64 prompts of 350, 2 × 40 tokens, tokens a second × `generate`", sampled, ""])
    return markdown(lines)


def ways(measured: Results, name: str, **wanted: object) -> list[dict]:
    """What a way of sampling took in each rollout."""
    rollouts = select(measured, level="rollouts", **wanted)
    return [result["ways"][name] for result in rollouts if "ratio" in result["ways"].get(name, {})]


def packing_speed(measured: Results, layout: str, prompt: int, K: int) -> str:
    updates = select(measured, level="training", implementation=layout, prompt=prompt, K=K)
    return spread(1 / result["ratio_to_bare"] for result in updates)


def cpu_table(records: Records) -> str:
    """What was measured on a CPU."""
    measured = results(records, CPU)
    fp32 = HIDDEN | {"dtype": "float32"}
    return markdown(
        [
            [machine(records[CPU_RECORDS[0]]["environment"]), "fastp3o", "others"],
            [
                "P3O's loss, fp32, time × torch's three products",
                ratio(measured, fp32, "fastp3o"),
                peers(measured, fp32),
            ],
            ["the same, ragged pairs", ratio(measured, fp32 | {"passes": f"{BOTH}, ragged"}, "fastp3o"), ""],
            ["the same through `linear_logprobs`, even pairs", ratio(measured, fp32, "fastp3o linear_logprobs"), ""],
            [
                "P3O's loss, bf16; PyTorch rounds logits",
                ratio(measured, HIDDEN | {"dtype": "bfloat16"}, "fastp3o"),
                f"PyTorch {ratio(measured, HIDDEN | {'dtype': 'bfloat16'}, 'eager')}",
            ],
            [
                "P3O's loss from logits, time × PyTorch's",
                spread(1 / speedup for speedup in speedups("logits", "eager".__eq__)(measured)),
                "1",
            ],
            [
                "every objective's loss, time × three products",
                ratio(measured, {"level": "objectives"}, "fastp3o"),
                f"PyTorch {ratio(measured, {'level': 'objectives'}, 'eager')}, "
                f"Liger {ratio(measured, {'level': 'objectives'}, 'Liger')}, "
                f"TRL's log-probs {ratio(measured, {'level': 'objectives'}, 'TRL')}",
            ],
            cpu_memory(measured),
            *cpu_updates(measured),
            *cpu_rollouts(measured),
            *cpu_iterations(measured),
        ]
    )


def ratio(measured: Results, wanted: dict, implementation: str) -> str:
    return figure(measured, "ratio_to_bare", **wanted, implementation=implementation)


def peers(measured: Results, wanted: dict) -> str:
    names = {"eager": "PyTorch", "torch.compile": "torch.compile", "CCE torch.compile": "CCE's torch.compile"}
    names |= {"TRL": "TRL's log-probs", "Liger GRPO": "Liger's GRPO"}
    return ", ".join(f"{name} {ratio(measured, wanted, implementation)}" for implementation, name in names.items())


def cpu_memory(measured: Results) -> list[str]:
    def megabytes(implementation: str) -> str:
        shape = {"N": 2048, "D": 256, "V": 16384, "dtype": "float32", "implementation": implementation}
        return spread((1e3 * result["extra_gb"] for result in select(measured, **HIDDEN, **shape)), "{:,.0f}")

    ours = f"{megabytes('fastp3o')}, `linear_logprobs` {megabytes('fastp3o linear_logprobs')}"
    others = f"PyTorch {megabytes('eager')}, TRL's log-probs {megabytes('TRL')}"
    return ["extra memory, MB: 2,048 tokens, D 256, V 16,384", ours, others]


def cpu_updates(measured: Results) -> list[list[str]]:
    K2, K4 = (packing_speed(measured, "shared prompts", 350, K) for K in (2, 4))
    padded = [packing_speed(measured, "padded", 350, K) for K in (2, 4)]
    parts = packing_speed(measured, "a response at a time", 350, 4)
    in_parts, whole = (
        select(measured, level="training", implementation=layout, prompt=350, K=4)
        for layout in ("a response at a time", "plain packing")
    )
    memory = spread((one["extra_gb"] / other["extra_gb"] for one in in_parts for other in whole), "{:.2f}")
    model = select(measured, level="model")
    shares = [
        spread(rates(select(model, passes=f"{kind}, prompts of 350, 2 responses of 40")), "{:.0%}")
        for kind in ("update", "log-probs")
    ]
    noise = figure(measured, "ratio_to_bare", level="training", implementation="plain packing")
    turns = figure(measured, "bare_ms", "{:.0f}", level="training", prompt=350, K=4)
    return [
        ["update, (350, 40), × plain packing: K 2; 4", f"{K2}; {K4}", f"padded {padded[0]}; {padded[1]}"],
        ["the same in parts of one response, as groups that no row holds, K 4", f"{parts}, {memory} of its memory", ""],
        ["noise: plain packing against itself; its ms in the turns of (350, 40), K 4", f"{noise}; {turns}", ""],
        ["update; log-probs, (350, 40), K 2: share of their products' rate", f"{shares[0]}; {shares[1]}", ""],
    ]


def cpu_rollouts(measured: Results) -> list[list[str]]:
    def speeds(way: str) -> str:
        return spread(found["ratio"] for found in ways(measured, way))

    llama = [result for result in select(measured, level="rollouts", dtype="float32") if result["layers"] == 4]
    llama = [result for result in llama if result["model"] in ("policy", "quickstart")]
    ours, theirs = (
        spread((found["operations_per_step"] for found in ways(llama, way) if "operations_per_step" in found), "{:.0f}")
        for way in ("fastp3o engine", "generate")
    )
    return [
        [
            "rollouts, tokens a second × `generate`, all shapes",
            speeds("fastp3o engine"),
            f"static cache {speeds('generate, static cache')}, TRL {speeds('TRL GRPO')}, "
            f"`generate_batch` {speeds('generate_batch')}",
        ],
        ["operations of a decode step, with prefill and ends, Llama of 4 layers", ours, f"`generate` {theirs}"],
    ]


def cpu_iterations(measured: Results) -> list[list[str]]:
    def ratios(trainer: str, small: bool) -> str:
        iterations = [r for r in select(measured, level="iteration") if (r["model"] == "small") == small]
        return spread((r["trainers"].get(trainer, {}).get("ratio") for r in iterations), "{:.1f}")

    grpo, dpo = "TRL GRPO", "TRL online DPO"
    large = f"TRL's GRPO {ratios(grpo, False)}, online DPO {ratios(dpo, False)}"
    small = f"TRL's GRPO {ratios(grpo, True)}, online DPO {ratios(dpo, True)}"
    return [
        ["iteration of four epochs, processor time × fastp3o's", "1", large],
        ["the same with a model of 0.1 M parameters", "1", small],
    ]


def goals(records: Records) -> str:
    return markdown(goals_table(results(records, GPU) + results(records, CPU)))


def modelled_table(records: Records) -> str:
    """The model, and what was measured of its first row."""
    header, first, *rest = modelled()
    found = select(results(records, GPU), **HIDDEN, N=N, implementation="fastp3o", dtype="bfloat16")
    measured = [figure(found, "ratio_to_bare", D=D, V=V) for D, V in LARGE_HEADS]
    assert first[0] == MEASURED
    return markdown([header, first, ["*measured* on the GPU, with 4 GB", first[1], *measured], *rest])


def launches(phase: str) -> Section:
    """Of an update or its log-probs, over the precisions."""

    def section(records: Records) -> str:
        counts = records["update_counts.json"]
        every = (counts[precision]["launches"][phase] for precision in ("fp32", "bf16", "bf16-autocast", "fp16"))
        return spread(every, "{:,}")

    return section


def served(records: Records) -> str:
    rates = records["served.json"]["speed"]["tokens_per_second"]
    named = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    return f"{named} ({described(records['served.json'].get('environment'))})."


def turns(records: Records) -> str:
    lines = [["prompt, turns × tokens, observation", "rounds, ms a token of the policy", "kept", "gain"]]
    for one in records["turns.json"]["benchmarks"]:
        shape = f"{one['prompt']}, {one['turns']} × {one['turn']}, {one['observation']}"
        lines.append([shape, f"{one['rounds']:.2f}", f"{one['kept']:.2f}", f"{one['gain']:.1f}"])
    return markdown(lines)


def turns_machine(records: Records) -> str:
    return described(records["turns.json"].get("environment"))


# --- benchmarks/NOTES.md


def notes_measured(records: Records) -> str:
    measured = results(records, GPU)
    head = select(measured, N=N, implementation="fastp3o", **HIDDEN)
    smaller = [r for r in select(head, dtype="bfloat16") if r["V"] < 256000]
    larger = [r for r in select(head, dtype="bfloat16") if r["V"] >= 256000]
    bf16 = [r for r in select(measured, level="hidden", dtype="bfloat16") if r["passes"] == BOTH]
    frozen = select(measured, N=N, implementation="fastp3o", **FROZEN)
    (engine,) = ways(measured, "fastp3o engine", K=2)
    products = spread((r["operations"] / r["bare_ms"] / 1e9 for r in bf16), "{:.0f}")
    lines = [
        f"Bare products of the head ran at {products} TFLOP/s in bf16, and P3O's loss at "
        f"{figure(select(head, dtype='bfloat16'), 'tflop_per_s', '{:.0f}')}.",
        f"The loss from hidden states takes {figure(smaller, 'ratio_to_bare')} × three bare products in bf16 with V up "
        f"to 152,064, and {figure(larger, 'ratio_to_bare')} × with V from 256,000 on, where a budget of "
        "4 GB needs two fillings of the gradient.",
        f"A frozen head takes {figure(select(frozen, dtype='bfloat16'), 'ratio_to_bare')} × two products. The weight's "
        f"gradient costs what its product takes and {exposed(measured)} ms more, one head after the other: where there "
        "are two fillings, the traffic of their sum in fp32 and of its cast is exposed, not hidden.",
        f"The engine samples 128 responses of 40 tokens from 1 B parameters in {engine['ms']:.0f} ms. Its floor is "
        f"{engine['floor_ms']:.0f} ms: {engine['floor_prefill_ms']:.0f} for the prompts, "
        f"{engine['floor_decode_ms']:.0f} for the tokens.",
        *(model_note(measured, kind) for kind in ("update", "log-probs")),
    ]
    return "\n".join(map(bullet, lines))


def exposed(measured: Results) -> str:
    """Of each head the time that its weight's gradient adds, less that of its product: a third of three."""
    found = []
    for D, V in LARGE_HEADS:
        shape = {"N": N, "D": D, "V": V, "dtype": "bfloat16", "implementation": "fastp3o"}
        (full,), (frozen,) = (select(measured, **wanted, **shape) for wanted in (HIDDEN, FROZEN))
        found.append(full["ms"] - frozen["ms"] - full["bare_ms"] / 3)
    return "; ".join(f"{ms:.1f}" for ms in found)


def model_note(measured: Results, kind: str) -> str:
    found = [r for r in select(measured, level="model") if r["passes"].startswith(f"{kind}, ")]
    each = "; ".join(
        f"{r['passes'].removeprefix(f'{kind}, ')}: {r['ms']:.0f} ms, {r['ratio_to_bare']:.2f} ×" for r in found
    )
    return f"{kind.capitalize()} of 1 B, with the time over that of its own products: {each}."


def notes_compiled(records: Records) -> str:
    kernels = records["compiled_kernels.json"]["kernels"]
    stacks = [kernel["stack"] for kernel in kernels if kernel["spills"]]
    return f"{len(stacks):,} of {len(kernels):,} spill" + (f", {spread(stacks, '{} bytes')}" if stacks else "")


def notes_registers(records: Records) -> str:
    """Of the log-probs' kernels on sm_90, and how many programs their registers leave room for."""
    kernels = select(records["compiled_kernels.json"]["kernels"], kernel="logprobs_kernel", architecture="sm_90")
    programs = [min(65536 // (256 * kernel["warps"] * ceil(kernel["registers"] / 8)), 8) for kernel in kernels]
    registers = spread((kernel["registers"] for kernel in kernels), "{}")
    return f"{registers} registers, so {spread(programs, '{}')} programs"


# --- README.md and pages of the trainer


def memory_claim(records: Records) -> str:
    """Of P3O's loss at all heads, beside PyTorch and TRL's chunks."""
    measured = select(results(records, GPU), N=N, **HIDDEN)
    ours, pytorch, trl = (
        figure(measured, "extra_gb", "{:.1f}", implementation=name) for name in ("fastp3o", "eager", "TRL")
    )
    longer = spread(speedups("hidden", "TRL".__eq__)(measured))
    return f"{ours} GB on an H100, PyTorch {pytorch}, TRL's\nchunks {trl} at {longer} × the time"


def front_gpu(records: Records) -> str:
    found = select(results(records, GPU), level="model", passes="update, prompts of 350, 2 responses of 40")
    device, ratio = records[GPU_RECORD]["environment"]["device"], figure(found, "ratio_to_bare")
    return f"one {device.removeprefix('NVIDIA ')}; an update takes {ratio} × its products' time"


def calculator(records: Records) -> str:
    """Of all updates, which tests/scripts/test_memory.py compares with the formula."""
    updates = [r for r in select(results(records, GPU), level="model") if r["passes"].startswith("update, ")]
    return f"{len(updates)} updates of 1 B took {spread((r['extra_gb'] for r in updates), '{:.1f}')} GB"


def mean_and_interval(values: list[float]) -> str:
    """With half of the interval of 95%, by Student's t."""
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def precision(records: Records) -> str:
    record = records["policy_precision.json"]
    rates = "1e-06", "1e-05", "0.0001"
    lines = [["policy", "lr 1e-06", "lr 1e-05", "lr 1e-04", "ratio/noise"]]
    for one in record["results"]:
        errors = [f"{one['errors'][rate]:.2g}" for rate in rates]
        noise = one.get("ratio/noise")
        lines.append([one["precision"], *errors, "" if noise is None else f"{noise:.2g}"])
    return markdown(lines)


def trpo(records: Records) -> str:
    """Four seeds each: a difference with its interval of 95% by Student's t."""
    runs = records["trpo.json"]["runs"]
    key = "reward_less_0.1_kl"
    ahead, behind = (
        [own[key] - ppo[key] for own, ppo in zip(runs[name], runs["ppo"], strict=True)]
        for name in ("trpo, max_kl 0.01", "trpo, max_kl 0.003")
    )
    kl, ppo_kl = (statistics.mean(run["kl"] for run in runs[name]) for name in ("trpo, max_kl 0.01", "ppo"))
    return (
        f"{mean_and_interval(ahead)} (95%) ahead of tuned PPO "
        f"in\nreward − 0.1 KL, at a KL of {kl:.1f} instead of {ppo_kl:.1f}; 0.003 was "
        f"{-statistics.mean(behind):.2f} behind"
    )


def seeds(records: Records) -> str:
    held_out = "held-out labels that the reward model has right"
    lines = [["seed", held_out, "sampled before", "sampled after", "greedy before", "greedy after"]]
    for seed, found in enumerate(records[SEEDS]):
        sampled = [f"{found[f'sampled {when}']:.2f} ± {found[f'deviation {when}']:.2f}" for when in ("before", "after")]
        greedy = [f"{found[f'greedy {when}']:.2f}" for when in ("before", "after")]
        lines.append([str(seed), f"{found['accuracy']:g}", *sampled, *greedy])
    return markdown(lines)


def exploited(records: Records) -> str:
    lines = [["update", "reward of the reward model", "overlap with the true summaries", "response, tokens"]]
    lines[0] += ["without an end", "KL, nats"]
    for one in records[EXPLOITED]:
        figures = [f"{one['reward']:.2f}", f"{one['gold']:.3f}", f"{one['response_length']:.1f}"]
        lines.append([str(one["step"]), *figures, f"{one['missing_eos']:.0%}", f"{one['kl']:.1f}"])
    return markdown(lines)


PPO, AT_THE_END = "PPO", "PPO, rewards at the end"
# As the page has them.
GAME_NAMES = {
    PPO: "PPO, rewards of turns where they come",
    AT_THE_END: "PPO, all at the end (`--process_rewards false`)",
}


def game(records: Records) -> str:
    """Means over seeds with their intervals."""
    lines = [["algorithm", "start", "40 updates", "80", "160", "160, likeliest guesses"]]
    for run in records["game.json"]["runs"]:
        found = [mean_and_interval(digits_found(run, updates)) for updates in ("40", "80", "160")]
        start = "" if len(lines) > 1 else f"{statistics.mean(digits_found(run, '0')):.3f}"
        greedy = statistics.mean(seed["greedy"]["160"] for seed in run["seeds"])
        lines.append([GAME_NAMES.get(run["algorithm"], run["algorithm"]), start, *found, f"{greedy:.3f}"])
    return markdown(lines)


def digits_found(run: dict, updates: str) -> list[float]:
    return [seed["found"][updates] for seed in run["seeds"]]


def game_lead(leader: str, other: str) -> Section:
    """After 80 updates, seed by seed."""

    def section(records: Records) -> str:
        runs = {run["algorithm"]: digits_found(run, "80") for run in records["game.json"]["runs"]}
        return mean_and_interval([mine - theirs for mine, theirs in zip(runs[leader], runs[other], strict=True)])

    return section


SECTIONS: dict[str, dict[str, Section]] = {
    "benchmarks/README.md": {
        "devices": devices,
        "products": products_news,
        "head": gpu_head,
        "gpu": gpu_others,
        "cpu": cpu_table,
        "goals": goals,
        "modelled": modelled_table,
        "update launches": launches("update"),
        "log-probs launches": launches("logprobs"),
        "served": served,
        "turns machine": turns_machine,
        "turns": turns,
        "predicted": lambda records: markdown(predicted_iterations()),
    },
    "benchmarks/NOTES.md": {"measured": notes_measured, "compiled": notes_compiled, "registers": notes_registers},
    "README.md": {"memory": memory_claim, "gpu": front_gpu},
    "fastp3o/objectives/README.md": {"trpo": trpo},
    "fastp3o/training/memory.md": {"h100": calculator},
    "fastp3o/training/precision.md": {"precision": precision},
    "scripts/README.md": {
        "seeds": seeds,
        "exploited": exploited,
        "game": game,
        "critic": game_lead(PPO, "P3O"),
        "rewards by turn": game_lead(PPO, AT_THE_END),
    },
}


def written(page: str, records: Records) -> str:
    """A page with all of its sections as the records give them. page: its path in the project."""
    text = (ROOT / page).read_text()
    for name, section in SECTIONS[page].items():
        text = between_markers(text, name, section(records))
    return text


def write() -> None:
    found = records()
    for page in SECTIONS:
        (ROOT / page).write_text(written(page, found))
