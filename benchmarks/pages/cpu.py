"""benchmarks/README.md: what was measured on a CPU."""

from benchmarks.environment import machine
from benchmarks.goals import BOTH, BY_TORCH, CPU, speedups
from benchmarks.markdown import markdown
from benchmarks.pages.gpu import packing_speed
from benchmarks.pages.sources import HIDDEN, Records, rates, results, ways
from benchmarks.records import CPU_RECORDS, NOT_MEASURED, Results, figure, select, spread


def table(records: Records) -> str:
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
            [
                "the same, ragged pairs",
                ratio(measured, fp32 | {"passes": f"{BOTH}, ragged"}, "fastp3o"),
                "",
            ],
            [
                "the same through `linear_logprobs`, even pairs",
                ratio(measured, fp32, "fastp3o linear_logprobs"),
                "",
            ],
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
            extra_memory(measured),
            *updates(measured),
            *rollouts(measured),
            *iterations(measured),
        ]
    )


def ratio(measured: Results, wanted: dict, implementation: str) -> str:
    return figure(measured, "ratio_to_bare", **wanted, implementation=implementation)


def chosen(records: Records) -> str:
    """The head's time over three products: with the products that were chosen, with torch's, and
    PyTorch's.
    """
    measured = select(results(records, CPU), level="chosen products")
    lines = [
        ["P3O's loss, time × three products", "chosen", "torch's", "PyTorch", "chosen over torch's"]
    ]
    for N, D, V in dict.fromkeys((r["N"], r["D"], r["V"]) for r in measured):
        for kind in ("even", "ragged"):
            passes = f"{BOTH}, {kind}, over"
            at_shape = [
                r for r in select(measured, N=N, D=D, V=V) if r["passes"].startswith(passes)
            ]
            over_products = select(at_shape, passes=f"{passes} three products")
            names = ("fastp3o", BY_TORCH, "eager")
            cells = [figure(over_products, "ratio_to_bare", implementation=name) for name in names]
            own = figure(at_shape, "ratio_to_bare", passes=f"{passes} {BY_TORCH}")
            lines.append([f"{N:,} tokens, D {D}, V {V:,}, {kind}", *cells, own])
    if not lines[1:]:
        lines.append([NOT_MEASURED, "", "", "", ""])
    return markdown(lines)


def peers(measured: Results, wanted: dict) -> str:
    names = {
        "eager": "PyTorch",
        "torch.compile": "torch.compile",
        "CCE torch.compile": "CCE's torch.compile",
    }
    names |= {"TRL": "TRL's log-probs", "Liger GRPO": "Liger's GRPO"}
    return ", ".join(
        f"{name} {ratio(measured, wanted, implementation)}"
        for implementation, name in names.items()
    )


def extra_memory(measured: Results) -> list[str]:
    def megabytes(implementation: str) -> str:
        shape = {
            "N": 2048,
            "D": 256,
            "V": 16384,
            "dtype": "float32",
            "implementation": implementation,
        }
        return spread(
            (1e3 * result["extra_gb"] for result in select(measured, **HIDDEN, **shape)), "{:,.0f}"
        )

    ours = f"{megabytes('fastp3o')}, `linear_logprobs` {megabytes('fastp3o linear_logprobs')}"
    others = f"PyTorch {megabytes('eager')}, TRL's log-probs {megabytes('TRL')}"
    return ["extra memory, MB: 2,048 tokens, D 256, V 16,384", ours, others]


def updates(measured: Results) -> list[list[str]]:
    K2, K4 = (packing_speed(measured, "shared prompts", 350, K) for K in (2, 4))
    padded = [packing_speed(measured, "padded", 350, K) for K in (2, 4)]
    parts = packing_speed(measured, "a response at a time", 350, 4)
    in_parts, whole = (
        select(measured, level="training", implementation=layout, prompt=350, K=4)
        for layout in ("a response at a time", "plain packing")
    )
    memory = spread(
        (one["extra_gb"] / other["extra_gb"] for one in in_parts for other in whole), "{:.2f}"
    )
    model = select(measured, level="model")
    shares = [
        spread(rates(select(model, passes=f"{kind}, prompts of 350, 2 responses of 40")), "{:.0%}")
        for kind in ("update", "log-probs")
    ]
    noise = figure(measured, "ratio_to_bare", level="training", implementation="plain packing")
    turns = figure(measured, "bare_ms", "{:.0f}", level="training", prompt=350, K=4)
    return [
        [
            "update, (350, 40), × plain packing: K 2; 4",
            f"{K2}; {K4}",
            f"padded {padded[0]}; {padded[1]}",
        ],
        [
            "the same in parts of one response, as groups that no row holds, K 4",
            f"{parts}, {memory} of its memory",
            "",
        ],
        [
            "noise: plain packing against itself; its ms in the turns of (350, 40), K 4",
            f"{noise}; {turns}",
            "",
        ],
        [
            "update; log-probs, (350, 40), K 2: share of their products' rate",
            f"{shares[0]}; {shares[1]}",
            "",
        ],
    ]


def rollouts(measured: Results) -> list[list[str]]:
    def speeds(way: str) -> str:
        return spread(found["ratio"] for found in ways(measured, way))

    llama = [
        result
        for result in select(measured, level="rollouts", dtype="float32")
        if result["layers"] == 4
    ]
    llama = [result for result in llama if result["model"] in ("policy", "quickstart")]
    ours, theirs = (
        spread(
            (
                found["operations_per_step"]
                for found in ways(llama, way)
                if "operations_per_step" in found
            ),
            "{:.0f}",
        )
        for way in ("fastp3o engine", "generate")
    )
    return [
        [
            "rollouts, tokens a second × `generate`, all shapes",
            speeds("fastp3o engine"),
            f"static cache {speeds('generate, static cache')}, TRL {speeds('TRL GRPO')}, "
            f"`generate_batch` {speeds('generate_batch')}",
        ],
        [
            "operations of a decode step, with prefill and ends, Llama of 4 layers",
            ours,
            f"`generate` {theirs}",
        ],
    ]


def iterations(measured: Results) -> list[list[str]]:
    def ratios(trainer: str, small: bool) -> str:
        iterations = [
            r for r in select(measured, level="iteration") if (r["model"] == "small") == small
        ]
        return spread((r["trainers"].get(trainer, {}).get("ratio") for r in iterations), "{:.1f}")

    grpo, dpo = "TRL GRPO", "TRL online DPO"
    large = f"TRL's GRPO {ratios(grpo, False)}, online DPO {ratios(dpo, False)}"
    small = f"TRL's GRPO {ratios(grpo, True)}, online DPO {ratios(dpo, True)}"
    return [
        ["iteration of four epochs, processor time × fastp3o's", "1", large],
        ["the same with a model of 0.1 M parameters", "1", small],
    ]
