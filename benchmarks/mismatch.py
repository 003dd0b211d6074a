"""Measure the benefit and the cost of replay.

    .venv/bin/python -m benchmarks.mismatch                                all experiments
    .venv/bin/python -m benchmarks.mismatch --experiments E12 --seeds 1    one part
    .venv/bin/python -m benchmarks.mismatch --redraw                       rewrite table and picture

The experiments are E5 (paired mismatch), E6 (wrong routes) and E12 (usefulness and cost). E5 and E6
are the cases of tests/e2e/mismatch_cases.py and tests/ranks/dose_cases.py with more tokens. E12
consists of runs of train.py. Measurements that mismatch.json already has are skipped. The script
writes mismatch.json, mismatch.md and mismatch.png to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.learning_curve import BLUE, ENVIRONMENT, GREY, PACKAGES, RED, ROOT, hardware, source
from r3 import assets
from r3.run.folder import RunDir, read_jsonl, read_metrics
from r3.tools.dumps import read_rollouts
from tests.e2e.mismatch_cases import near_tie_checkpoint, paired
from tests.ranks.dose_cases import DOSES, dose_response
from tests.world import run_world

# policy, engine
PRECISIONS = (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"))
BATCHES, PROMPTS, GROUP, MAX_TOKENS = 20, 16, 8, 40
MODES, UPDATES = ("off", "r2", "r3"), (1, 8)
ROUTER_NOISE = "0.3"  # changes the experts of a third of the slots
STEPS, COST_STEPS, ENDURANCE_STEPS = 15, 12, 100
ONE_RANK = "--parallel.ep 1 --checkpoint.every 0 --checkpoint.export false --log.tensorboard false"

Row = Mapping[str, Any]
Measures = dict[str, Callable[[], Any]]


def main() -> None:
    """Measure, merge with the existing figures, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--experiments", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS)
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs of E12"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--redraw", action="store_true", help="run nothing")
    args = parser.parse_args()
    file = args.out / "mismatch.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="r3-mismatch-") as folder:
        for name in () if args.redraw else args.experiments:
            section = results.setdefault(name, {})
            for what, measure in EXPERIMENTS[name](Path(folder), args.seeds).items():
                if what in section:
                    print(f"{name} {what}: is there already", flush=True)
                    continue
                section[what] = measure()
                print(f"{name} {what}", flush=True)
                results["about"] = about()
                args.out.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(tables(results)) + "\n"
    (args.out / "mismatch.md").write_text(text, encoding="utf-8")
    print(text)
    draw(results, args.out / "mismatch.png")


def about() -> dict[str, Any]:
    """Return the commit, versions and hardware of the figures."""
    return {
        "what": "experiments E5, E6 and E12: what replay is worth and what it costs",
        "made_by": "python -m benchmarks.mismatch",
        "date": date.today().isoformat(),
        "source": source(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "environment": ENVIRONMENT,
    }


# ------------------------------------------------------------------------------------------------
# E5 and E6: an engine and a policy, no training


def e5(folder: Path, _seeds: Sequence[int]) -> Measures:
    """Score the same tokens with replayed and with live routes (E5).

    The models are one with near ties, a dense model of the same size and the shipped model.
    """
    models = {
        "near ties": near_tie_checkpoint(folder / "moe"),
        "dense twin": near_tie_checkpoint(folder / "dense", dense=True),
        "shipped": assets.TINY_MOE,
    }
    sizes = dict(batches=BATCHES, prompts=PROMPTS, group=GROUP, max_tokens=MAX_TOKENS)

    def measure(model: Path, policy: str, engine: str) -> list[Row]:
        (made,) = run_world(
            paired,
            1,
            timeout_s=600,
            model=str(model),
            policy_dtype=policy,
            engine_dtype=engine,
            **sizes,
        )
        return [
            {name: value for name, value in vars(row).items() if value is not None} for row in made
        ]

    return {
        f"{name} | {policy} | {engine}": partial(measure, model, policy, engine)
        for name, model in models.items()
        for policy, engine in PRECISIONS
    }


def _row(dose: SimpleNamespace) -> Row:
    rest = dict(vars(dose))
    return rest.pop("figures") | rest


def e6(folder: Path, _seeds: Sequence[int]) -> Measures:
    """Score with wrong routes: a share of swapped experts, and misaligned rows (E6)."""
    models = {"near ties": str(near_tie_checkpoint(folder / "ties")), "shipped": ""}

    def measure(model: str, engine: str) -> Row:
        (made,) = run_world(dose_response, 1, timeout_s=600, engine_dtype=engine, model=model)
        doses, misaligned = (
            {name: _row(dose) for name, dose in some.items()}
            for some in (made.doses, made.misaligned)
        )
        one_layer = [_row(dose) for dose in made.one_layer]
        return {
            "live": made.live.figures,
            "doses": doses,
            "one_layer": one_layer,
            "misaligned": misaligned,
        }

    return {
        f"{name} | {engine}": partial(measure, model, engine)
        for name, model in models.items()
        for engine in ("float32", "bfloat16")
    }


# ------------------------------------------------------------------------------------------------
# E12: runs of train.py


def e12(folder: Path, seeds: Sequence[int]) -> Measures:
    """Train with noisy engine routers, and measure the cost of replay (E12).

    The modes are no replay, recorded routes (R2) and captured routes (R3).
    """

    def learn(seed: int, updates: int, mode: str) -> Row:
        flags = (
            "--train.seed",
            str(seed),
            "--train.updates_per_step",
            str(updates),
            "--replay.mode",
            mode,
        )
        rows, run_dir = train(
            folder / f"{seed}-{updates}-{mode}", STEPS, *flags, noise=ROUTER_NOISE
        )
        return {
            "accuracy": rows[-1]["eval/heldout/accuracy"],
            "right": "".join(
                "01"[answer["reward"] >= 1.0] for answer in read_jsonl(run_dir.eval(STEPS))
            ),
            **columns(rows, "mismatch/k3", "mismatch/f2", "optim/grad_norm", "reward/mean"),
        }

    def cost(seed: int, mode: str) -> Row:
        # The same tokens in all modes: nothing is learnt at this rate.
        flags = (
            "--train.seed",
            str(seed),
            "--train.lr",
            "1e-12",
            "--replay.mode",
            mode,
            "--eval.path",
            "",
        )
        rows, run_dir = train(folder / f"cost-{seed}-{mode}", COST_STEPS, *flags)
        names = ("time/step_s", "time/generate_s", "time/train_s", "rollout/tokens")
        return columns(rows, *names) | {"routes": route_bytes(run_dir)}

    def endurance() -> Row:
        rows, _ = train(folder / "long", ENDURANCE_STEPS, "--replay.mode", "r3", "--eval.path", "")
        memory = [name for name in rows[-1] if name.startswith("memory/")]
        return columns(rows, "time/step_s", "routing/coverage", "rollout/tokens", *memory)

    measures: Measures = {}
    for seed in seeds:
        for updates in UPDATES:
            for mode in MODES:
                measures[f"learn | {seed} | {updates} | {mode}"] = partial(
                    learn, seed, updates, mode
                )
        for mode in ("off", "r3"):  # one after the other: the machine is shared
            measures[f"cost | {seed} | {mode}"] = partial(cost, seed, mode)
    return measures | {"endurance": endurance}


def train(folder: Path, steps: int, *flags: str, noise: str = "") -> tuple[list[Row], RunDir]:
    """Rows of the training steps of one run of tiny-smoke on one rank."""
    module = ["-m", "benchmarks.noisy_engine"] if noise else ["train.py"]
    settings = [
        "--train.steps",
        str(steps),
        "--replay.shadow_every",
        "0",
        *ONE_RANK.split(),
        *flags,
    ]
    command = [*module, "tiny-smoke", *settings, "--log.dir", str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "ROUTER_NOISE": noise},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{shlex.join(command)}\nended with exit code {done.returncode}")
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0], RunDir(
        folder
    )


def columns(rows: Sequence[Row], *names: str) -> dict[str, list[float]]:
    """The named metrics over the steps that have them."""
    return {name: [row[name] for row in rows if name in row] for name in names}


def route_bytes(run_dir: RunDir) -> dict[str, int]:
    """Return the bytes of the routes of the dumped step 1, and (T - 1) * L * K * b."""
    rollouts, _, _ = read_rollouts(run_dir.rollouts(1))
    routes = [rollout.routed_experts for rollout in rollouts]
    _, layers, topk = routes[0].shape
    rows = sum(len(rollout.tokens_T) - 1 for rollout in rollouts)
    return {
        "bytes": sum(r.nbytes for r in routes),
        "formula": rows * layers * topk * routes[0].itemsize,
    }


EXPERIMENTS = {"E5": e5, "E6": e6, "E12": e12}


# ------------------------------------------------------------------------------------------------
# Tables


def tables(results: Mapping[str, Any]) -> list[str]:
    """Return all tables as Markdown."""
    lines = [
        "# Mismatch: E5, E6, E12",
        "",
        "Written by `python -m benchmarks.mismatch`; figures in mismatch.json.",
    ]
    for name, write in (("E5", e5_table), ("E6", e6_table), ("E12", e12_table)):
        if name in results:
            lines += ["", *write(results[name])]
    return lines


def mean(rows: Sequence[Row], arm: str, figure: str) -> float:
    return fmean(row[arm][figure] for row in rows)


def e5_table(results: Mapping[str, Any]) -> list[str]:
    """Return one line per model and precision, each value as replayed / live."""
    lines = [
        f"## E5: {BATCHES} batches of {PROMPTS * GROUP} answers, replayed / live routes of the "
        "same tokens",
        "",
        "Live of the dense twin is the floor. `k3 <= 0.6` and `f2 <= 0.1` count batches where "
        "replayed is at most that part of"
        " live.",
        "",
        "| model, policy, engine | k3 | ratio | k3 lower | k3 <= 0.6 | f2 | f2 lower or equal | f2 "
        "<= 0.1 | p99 | max |"
        " slots differ | tokens differ | replayed / floor |",
        "|---" * 13 + "|",
    ]
    for name, rows in results.items():
        model, *precision = name.split(" | ")
        if "replay" not in rows[0]:
            cells = [
                f"- / {mean(rows, 'live', 'k3'):.2e}",
                "",
                "",
                "",
                f"- / {mean(rows, 'live', 'f2'):.1e}",
                "",
                "",
            ]
            cells += [
                f"- / {mean(rows, 'live', figure):.2g}" for figure in ("abs_p99", "abs_max")
            ] + ["", "", ""]
        else:
            pairs = {
                f: [(row["replay"][f], row["live"][f]) for row in rows] for f in rows[0]["replay"]
            }
            on, off = mean(rows, "replay", "k3"), mean(rows, "live", "k3")
            floor = (
                mean(results[" | ".join(["dense twin", *precision])], "live", "k3")
                if model == "near ties"
                else 0.0
            )
            cells = [
                f"{on:.2e} / {off:.2e}",
                f"{on / off:.3f}",
                f"{sum(a < b for a, b in pairs['k3'])}",
                f"{sum(a <= 0.6 * b for a, b in pairs['k3'])}",
                f"{mean(rows, 'replay', 'f2'):.1e} / {mean(rows, 'live', 'f2'):.1e}",
                f"{sum(a <= b for a, b in pairs['f2'])}",
                f"{sum(a <= 0.1 * b for a, b in pairs['f2'])}",
                *(
                    f"{mean(rows, 'replay', f):.2g} / {mean(rows, 'live', f):.2g}"
                    for f in ("abs_p99", "abs_max")
                ),
                f"{100 * fmean(row['slots_differ'] for row in rows):.2g} %",
                f"{100 * fmean(row['tokens_differ'] for row in rows):.2g} %",
                f"{on / floor:.2f}" if floor else "",
            ]
        lines.append(f"| {', '.join([model, *precision])} | {' | '.join(cells)} |")
    return lines


def e6_table(results: Mapping[str, Any]) -> list[str]:
    """Return the tables of swapped experts and of misaligned rows."""
    lines = [
        "## E6: ranks K and K + 1 swapped in a share p of (token, layer) slots; float32 policy",
        "",
        "`agreement` is of the first layer, which no other flip reaches: 1 - p up to sampling. "
        "`used` is the share of slots"
        " whose tokens went where the installed route says.",
        "",
        "| model, engine | p | slots hit | agreement | used | k3 | k3 of live routes |",
        "|---" * 7 + "|",
    ]
    for name, made in results.items():
        for share in DOSES:
            dose = made["doses"][str(share)]
            hit = sum(dose["hits"]) / (dose["rows"] * len(dose["hits"]))
            used = 1 - dose["wrong"] / (dose["rows"] * len(dose["hits"]))
            cells = [
                f"{share:.1%}",
                f"{hit:.2%}",
                f"{dose['agreed'][0] / dose['rows']:.4f}",
                f"{used:.0%}",
            ]
            cells += [f"{dose['k3']:.2e}", f"{made['live']['k3']:.2e}"]
            lines.append(f"| {name.replace(' | ', ', ')} | {' | '.join(cells)} |")
    names = list(next(iter(results.values()))["misaligned"])
    lines += ["", "Misaligned routes with a bfloat16 engine: k3 over that of correct routes.", ""]
    lines += [f"| model | correct k3 | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name, made in results.items():
        if name.endswith("bfloat16"):
            right = made["doses"]["0.0"]["k3"]
            cells = [
                f"{right:.1e}",
                *(f"{made['misaligned'][wrong]['k3'] / right:,.0f} x" for wrong in names),
            ]
            lines.append(f"| {name.split(' | ')[0]} | {' | '.join(cells)} |")
    return lines


def e12_table(results: Mapping[str, Any]) -> list[str]:
    """Return the tables of learning per seed, of the paired comparison and of the cost."""
    lines = [
        f"## E12: tiny-smoke, {STEPS} steps, engine routers with noise {ROUTER_NOISE}",
        "",
        "Means over the steps; accuracy is greedy, on held-out questions, without noise.",
        "",
        "| updates a step | seed | k3 off / r2 / r3 | f2 off / r2 / r3 | grad norm p99 off / r2 / "
        "r3 |"
        " accuracy off / r2 / r3 |",
        "|---" * 6 + "|",
    ]
    started = sorted({int(name.split(" | ")[1]) for name in results if name.startswith("learn")})
    seeds = [seed for seed in started if f"cost | {seed} | r3" in results]  # the last run of a seed
    if not seeds:
        return ["## E12: no seed is complete"]
    for updates in UPDATES:
        for seed in seeds:
            runs = [results[f"learn | {seed} | {updates} | {mode}"] for mode in MODES]
            cells = [
                " / ".join(f"{fmean(run['mismatch/k3']):.1e}" for run in runs),
                " / ".join(f"{fmean(run['mismatch/f2']):.1e}" for run in runs),
                " / ".join(f"{grad_p99(run):.2f}" for run in runs),
                " / ".join(f"{run['accuracy']:.3f}" for run in runs),
            ]
            lines.append(f"| {updates} | {seed} | {' | '.join(cells)} |")
    lines += ["", "| updates a step | pre-registered | found | holds |", "|---" * 4 + "|"]
    for updates in UPDATES:
        pairs = [
            tuple(results[f"learn | {seed} | {updates} | {mode}"] for mode in ("off", "r3"))
            for seed in seeds
        ]
        for text, name in (
            ("k3 lower in every seed", "mismatch/k3"),
            ("f2 lower in every seed", "mismatch/f2"),
        ):
            lower = [fmean(on[name]) < fmean(off[name]) for off, on in pairs]
            lines.append(
                f"| {updates} | {text} | {sum(lower)} of {len(lower)} | {yes(all(lower))} |"
            )
        lower = [grad_p99(on) < grad_p99(off) for off, on in pairs]
        lines.append(
            f"| {updates} | grad norm p99 lower in every seed | {sum(lower)} of {len(lower)} | "
            f"{yes(all(lower))} |"
        )
        gain, low, high = bootstrap([(on["right"], off["right"]) for off, on in pairs])
        said = f"{gain:+.3f}, 95 % in [{low:+.3f}, {high:+.3f}]"
        lines.append(
            f"| {updates} | accuracy r3 - off not worse (paired bootstrap) | {said} | "
            f"{yes(high >= 0)} |"
        )
    lines += ["", *cost_table(results, seeds)]
    return lines


def cost_table(results: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Return the cost of mode r3 relative to off, on the same tokens."""

    def pooled(mode: str, name: str) -> list[float]:
        # The first step is a warm-up.
        return [value for seed in seeds for value in results[f"cost | {seed} | {mode}"][name][1:]]

    def rates(mode: str) -> list[float]:
        tokens, seconds = pooled(mode, "rollout/tokens"), pooled(mode, "time/generate_s")
        return [t / s for t, s in zip(tokens, seconds, strict=True)]

    def ratio(of: Callable[[list[float]], float], name: str) -> float:
        return of(pooled("r3", name)) / of(pooled("off", name))

    step, training = ratio(median, "time/step_s"), ratio(median, "time/train_s")
    times = f"{step:.3f}; training alone {training:.3f}; fastest {ratio(min, 'time/step_s'):.3f}"
    routes = [results[f"cost | {seed} | r3"]["routes"] for seed in seeds]
    exact = all(r["bytes"] == r["formula"] for r in routes)
    speed, best = (of(rates("r3")) / of(rates("off")) for of in (median, max))
    lines = [
        f"Cost, the same tokens in both modes, medians over {len(seeds)} x {COST_STEPS - 1} steps "
        "without noise. Others use the"
        " machine, which only ever adds time: the fastest step of each mode is beside the median.",
        "",
        "| pre-registered | found | holds |",
        "|---" * 3 + "|",
        f"| route bytes == (T - 1) L K b | {routes[0]['bytes']:,} of {routes[0]['formula']:,} | "
        f"{yes(exact)} |",
        f"| rollout tokens/s, r3 / off >= 0.95 | {speed:.3f}; fastest {best:.3f} | "
        f"{yes(speed >= 0.95)} |",
        f"| step time, r3 / off <= 1.05 | {times} | {yes(step <= 1.05)} |",
    ]
    if long := results.get("endurance"):
        early = {name: values[9] for name, values in long.items() if name.startswith("memory/")}
        grown = max(long[name][-1] - value for name, value in early.items())
        name = "memory/peak_gib"
        per_token = [
            s / t for s, t in zip(long["time/step_s"], long["rollout/tokens"], strict=True)
        ]
        slower = median(per_token[-30:]) / median(per_token[9:39])
        lines += [
            f"| no growth over {ENDURANCE_STEPS} steps (from step 10) | memory {grown:+.3f} GiB of "
            f"{long[name][-1]:.2f}; "
            f"seconds a token, last 30 / steps 10 to 39: {slower:.2f} | "
            f"{yes(grown < 0.02 and slower <= 1.05)} |"
        ]
    return lines


def grad_p99(run: Row) -> float:
    return float(np.quantile(run["optim/grad_norm"], 0.99))


def bootstrap(pairs: Sequence[tuple[str, str]], draws: int = 10_000) -> tuple[float, float, float]:
    """Return the mean difference of paired 0/1 scores and its 95 % bootstrap interval.

    Questions are resampled within each seed.
    """
    rng = np.random.default_rng(0)
    differences = [
        np.array([int(a) - int(b) for a, b in zip(one, other, strict=True)]) for one, other in pairs
    ]
    means = np.mean([rng.choice(d, (draws, len(d))).mean(1) for d in differences], axis=0)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.mean([d.mean() for d in differences])), float(low), float(high)


def yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


# ------------------------------------------------------------------------------------------------
# Picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw E5 as pairs, E6 as a curve and E12 as k3 over steps."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (pairs, doses, learning) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    if made := results.get("E5"):
        names = [name for name in made if "dense" not in name and not name.endswith("float32")]
        for place, name in enumerate(names):
            for row in made[name]:
                values = [row["live"]["k3"], row["replay"]["k3"]]
                pairs.plot([place - 0.2, place + 0.2], values, color=GREY, linewidth=0.4, alpha=0.6)
                for where, value, color in zip(
                    (place - 0.2, place + 0.2), values, (RED, BLUE), strict=True
                ):
                    pairs.plot(where, value, "o", color=color, markersize=3)
            if twin := made.get(name.replace("near ties", "dense twin") if "near" in name else ""):
                floor = mean(twin, "live", "k3")
                pairs.plot([place - 0.35, place + 0.35], [floor] * 2, color="black", linewidth=1)
                pairs.text(place + 0.35, floor, " dense\n twin", fontsize=7, va="center")
        pairs.set_xticks(
            range(len(names)), [name.replace(" | ", "\n") for name in names], fontsize=7
        )
        pairs.set(
            yscale="log", title="E5: live (red), replayed (blue); a line is a batch", ylabel="k3"
        )
    for (name, made), color in zip(
        results.get("E6", {}).items(), (BLUE, RED, "#2e8b57", "#d9822b"), strict=False
    ):
        k3 = [made["doses"][str(share)]["k3"] for share in DOSES]
        doses.plot(
            [max(share, 1e-4) for share in DOSES],
            k3,
            "o-",
            color=color,
            label=name.replace(" | ", ", engine "),
        )
    doses.set(
        xscale="log",
        yscale="log",
        title="E6: k3 by share of flipped slots (0 drawn at 1e-4)",
        xlabel="p",
    )
    doses.legend(frameon=False, fontsize=7)
    for name, run in results.get("E12", {}).items():
        kind, *what = name.split(" | ")
        if kind == "learn" and what[1] == str(UPDATES[0]):
            color = {"off": RED, "r2": GREY, "r3": BLUE}[what[2]]
            label = what[2] if what[0] == "0" else None
            learning.plot(
                range(1, STEPS + 1), run["mismatch/k3"], color=color, label=label, linewidth=1
            )
    learning.set(
        yscale="log",
        title=f"E12: k3 in training, router noise {ROUTER_NOISE}, 3 seeds",
        xlabel="step",
    )
    if results.get("E12"):
        learning.legend(frameon=False)
    for axes in (pairs, doses, learning):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
