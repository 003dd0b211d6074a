"""Compare policy gradients of the same samples: replayed routes, live routes, importance weights.

    .venv/bin/python -m benchmarks.gradient_oracle              128 prompts of 8 samples
    .venv/bin/python -m benchmarks.gradient_oracle --short      16 prompts, about a minute
    .venv/bin/python -m benchmarks.gradient_oracle --after 40   weights after 40 steps of training

An engine that rounds activations (rounded_engine.py) samples one step, and a plain model in float64
takes the gradient of each prompt's samples,

    g = -1/G sum_i A_i sum_t w_t grad log pi(y_t),     A_i of rloo, which is unbiased,

once for each arm. The target is that of the distribution that sampled: the same rounding in the
forward pass (the backward pass takes it as the identity) and the experts that the engine chose.
The arms round nothing; they differ in the experts and in the weights w. Prompts are independent, in
blocks of prompts / 32. Of blocks b, means over pairs of different blocks estimate products of
expectations without bias:

    apart      sum_b |g - g_target|^2 / sum_b |g_target|^2: on the same samples
    bias^2     |E g - E g_target|^2 / |E g_target|^2, which may come out below 0
    cosine     of E g and E g_target
    variance   trace of the covariance of g over that of g_target

Intervals are those of the jackknife over blocks, 95 %. Where the noise of the mean of g_target is
above half of its square (a part of the model with little gradient), bias and cosine are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.learning_curve import ENVIRONMENT, PACKAGES, ROOT, hardware, source
from benchmarks.rounding import rounded
from r3.algo.advantage import rloo
from r3.algo.loss import (
    CORRECTIONS,
    Bounds,
    Correction,
    LossInputs,
    Sequences,
    correct,
    ppo_clip,
)
from r3.run.folder import RunDir
from r3.tools.dumps import read_rollouts
from r3.types import Rollout

RESULTS = ROOT / "benchmarks" / "results" / "gradient_oracle.jsonl"
TARGET = "engine"
BLOCKS = 32
STALE = ("live", "r2", "r3")
LR = 5e-4
WHOLE = "live, whole-response weights"


@dataclass(frozen=True)
class Arm:
    """One way to compute the gradient.

    Attributes:
        routes: the engine's experts, or those that the arm's own scores choose.
        rounds: whether activations are rounded as in the engine.
        correction: importance weights.
    """

    routes: Literal["engine", "live"]
    rounds: bool = False
    correction: Correction | None = None


ARMS = {
    TARGET: Arm("engine", rounds=True),
    "replayed": Arm("engine"),
    "replayed + TIS": Arm("engine", correction=CORRECTIONS["token_tis"]),
    "live": Arm("live"),
    "live + TIS": Arm("live", correction=CORRECTIONS["token_tis"]),
    "live + IcePop": Arm("live", correction=CORRECTIONS["icepop"]),
    "live + MIS": Arm("live", correction=CORRECTIONS["token_mis"]),
    # Unbiased for the gradient of the live policy's own expected reward.
    WHOLE: Arm("live", correction=Correction("sequence", "truncate", True, 0.0, math.inf)),
}


# ------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class Oracle:
    """A Qwen3-MoE in float64, in plain torch.

    Attributes:
        weights: of a Hugging Face folder, by name; the leaves of all gradients.
        heads, kv_heads, top_k: numbers of heads and of experts per token.
    """

    weights: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    top_k: int
    eps: float = 1e-6
    theta: float = 10000.0

    @classmethod
    def load(cls, folder: Path) -> Oracle:
        """Read a folder of one file of weights."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert config["norm_topk_prob"] and config["model_type"] == "qwen3_moe", folder
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        return cls(
            {name: weight.double().requires_grad_() for name, weight in weights.items()},
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["num_experts_per_tok"],
            config["rms_norm_eps"],
            config["rope_parameters"]["rope_theta"],
        )

    @property
    def layers(self) -> int:
        """Number of layers; each has experts."""
        return sum(name.endswith("mlp.gate.weight") for name in self.weights)

    def parts(self) -> dict[str, list[str]]:
        """Return the names of weights by part of the model, in order of depth."""
        parts: dict[str, list[str]] = {"embedding": ["model.embed_tokens.weight"]}
        for layer in range(self.layers):
            of_layer = [name for name in self.weights if f".layers.{layer}." in name]
            for part in ("attention", "router", "experts"):
                parts[f"layer {layer} {part}"] = []
            for name in of_layer:
                router, experts = ".mlp.gate." in name, ".mlp.experts." in name
                part = "router" if router else "experts" if experts else "attention"
                parts[f"layer {layer} {part}"].append(name)
        return {**parts, "output": ["model.norm.weight", "lm_head.weight"]}

    def __call__(
        self, tokens_BT: Tensor, routes_BTLK: Tensor | None, bits: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each next token, and the experts that were used.

        Args:
            tokens_BT: sequences; what stands behind the end of one changes nothing before it.
            routes_BTLK: experts of each token; None chooses by score.
            bits: of mantissa, at the places where rounded_engine.py rounds; None rounds nothing.

        Returns:
            [B, T - 1] and [B, T, L, K].
        """
        near = partial(_straight_through, bits=bits)
        w = self.weights
        x_BTD = w["model.embed_tokens.weight"][tokens_BT]
        used = []
        for layer in range(self.layers):
            of = f"model.layers.{layer}."
            h_BTD = near(self._norm(x_BTD, w[of + "input_layernorm.weight"]))
            x_BTD = x_BTD + near(self._attention(h_BTD, of + "self_attn.")) @ (
                w[of + "self_attn.o_proj.weight"].T
            )
            h_BTD = near(self._norm(x_BTD, w[of + "post_attention_layernorm.weight"]))
            scores_BTE = h_BTD @ w[of + "mlp.gate.weight"].T
            if routes_BTLK is None:
                chosen_BTK = scores_BTE.topk(self.top_k, dim=-1).indices
            else:
                chosen_BTK = routes_BTLK[:, :, layer]
            used.append(chosen_BTK)
            gates_BTK = scores_BTE.gather(-1, chosen_BTK).softmax(-1)
            x_BTD = x_BTD + self._experts(h_BTD, chosen_BTK, gates_BTK, of + "mlp.experts.")
        logits_BTV = self._norm(x_BTD, w["model.norm.weight"]) @ w["lm_head.weight"].T
        next_BT1 = tokens_BT[:, 1:, None]
        logprobs_BT = logits_BTV[:, :-1].log_softmax(-1).gather(-1, next_BT1)[..., 0]
        return logprobs_BT, torch.stack(used, dim=2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight

    def _attention(self, h_BTD: Tensor, of: str) -> Tensor:
        w, (B, T, _) = self.weights, h_BTD.shape
        q, k, v = (
            (h_BTD @ w[f"{of}{name}_proj.weight"].T).view(B, T, heads, -1)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = self._norm(q, w[of + "q_norm.weight"]), self._norm(k, w[of + "k_norm.weight"])
        q, k = self._turn(q), self._turn(k)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(B, T, -1)

    def _turn(self, x_BTHD: Tensor) -> Tensor:
        half = x_BTHD.shape[-1] // 2
        turns = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x_BTHD.shape[1], dtype=torch.float64)[:, None, None] * turns
        a, b = x_BTHD.split(half, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )

    def _experts(self, h_BTD: Tensor, chosen_BTK: Tensor, gates_BTK: Tensor, of: str) -> Tensor:
        h_ND, chosen_NK, gates_NK = (x.flatten(0, 1) for x in (h_BTD, chosen_BTK, gates_BTK))
        out_ND = torch.zeros_like(h_ND)
        for expert in chosen_NK.unique().tolist():
            gate, up, down = (
                self.weights[f"{of}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            rows, slots = (chosen_NK == expert).nonzero(as_tuple=True)
            inner = torch.nn.functional.silu(h_ND[rows] @ gate.T) * (h_ND[rows] @ up.T)
            out_ND = out_ND.index_add(0, rows, gates_NK[rows, slots, None] * (inner @ down.T))
        return out_ND.view_as(h_BTD)


def _straight_through(x: Tensor, bits: int | None) -> Tensor:
    return x if bits is None else x + (rounded(x, bits) - x).detach()


# ------------------------------------------------------------------------------------------------
# Gradients


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    Attributes:
        tokens_BT: right-padded.
        sampled_BT, mu_BT: mask and engine's log-probability of each next token, [B, T - 1].
        routes_BTLK: experts; 0 where there is no token to predict.
        advantages_B: one per sample.
    """

    tokens_BT: Tensor
    sampled_BT: Tensor
    mu_BT: Tensor
    routes_BTLK: Tensor
    advantages_B: Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> Group:
        """Pad the rollouts of one prompt; advantages are those of `rloo`."""
        longest = max(len(rollout.tokens_T) for rollout in rollouts)
        layers, top_k = rollouts[0].routed_experts.shape[1:]
        tokens = torch.zeros(len(rollouts), longest, dtype=torch.int64)
        sampled, mu = torch.zeros(2, len(rollouts), longest, dtype=torch.float64)
        routes = torch.zeros(len(rollouts), longest, layers, top_k, dtype=torch.int64)
        for row, rollout in enumerate(rollouts):
            assert rollout.routed_experts.min() >= 0, "a route is missing"
            end = len(rollout.tokens_T)
            tokens[row, :end] = torch.from_numpy(rollout.tokens_T)
            sampled[row, :end] = torch.from_numpy(rollout.loss_mask_T)
            mu[row, :end] = torch.from_numpy(rollout.logprobs_T)
            routes[row, : end - 1] = torch.from_numpy(rollout.routed_experts.astype(np.int64))
        advantages = rloo(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64))
        return cls(tokens, sampled[:, 1:], mu[:, 1:], routes, advantages.double())


def gradients(
    oracle: Oracle, group: Group, arms: Mapping[str, Arm], bits: int | None
) -> dict[str, list[Tensor]]:
    """Return the gradient of each arm, in the order of the oracle's weights."""
    leaves = [*oracle.weights.values()]
    passes: dict[tuple[str, bool], Tensor] = {}
    made: dict[str, list[Tensor]] = {}
    for name, arm in arms.items():
        which = (arm.routes, arm.rounds)
        if which not in passes:
            routes = group.routes_BTLK if arm.routes == "engine" else None
            passes[which] = oracle(group.tokens_BT, routes, bits if arm.rounds else None)[0]
        loss = _loss(passes[which], group, arm.correction)
        made[name] = [
            *torch.autograd.grad(
                loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        ]
    return made


def _inputs(logprobs_BT: Tensor, old_BT: Tensor, group: Group) -> LossInputs:
    samples, length = logprobs_BT.shape
    return LossInputs(
        logprobs_N=logprobs_BT.flatten(),
        old_logprobs_N=old_BT.detach().flatten(),
        rollout_logprobs_N=group.mu_BT.flatten(),
        advantages_N=group.advantages_B[:, None].expand(-1, length).flatten(),
        loss_mask_N=group.sampled_BT.flatten(),
        sequences=Sequences(tuple(range(0, samples * length + 1, length))),
    )


def _loss(logprobs_BT: Tensor, group: Group, correction: Correction | None) -> Tensor:
    inputs = _inputs(logprobs_BT, logprobs_BT, group)
    weights_N = correct(correction, inputs).weights_N.double() if correction else 1.0
    terms_N = weights_N * inputs.advantages_N * inputs.logprobs_N * inputs.loss_mask_N
    return -terms_N.sum() / len(logprobs_BT)


# ------------------------------------------------------------------------------------------------
# Statistics


def products(vectors_ANW: Tensor) -> Tensor:
    """Return the inner products of all gradients, [A, A, N, N], in float64."""
    arms, groups, _ = vectors_ANW.shape
    flat = vectors_ANW.double().flatten(0, 1)
    return (flat @ flat.T).view(arms, groups, arms, groups).permute(0, 2, 1, 3)


def figures(products_AANN: Tensor) -> dict[str, Tensor]:
    """Return bias squared, cosine and variance of every arm against the first, each [A]."""
    groups = products_AANN.shape[-1]
    same = products_AANN.diagonal(dim1=-2, dim2=-1).sum(-1)  # of one prompt with itself
    every = products_AANN.sum((-2, -1))
    means = (every - same) / (groups * (groups - 1))
    variances = ((same - every / groups) / (groups - 1)).diagonal()
    norms = means.diagonal()
    return {
        "apart": ((same.diagonal() - 2 * same[0] + same[0, 0]) / same[0, 0]),
        "bias2": (norms - 2 * means[0] + norms[0]) / norms[0],
        "cosine": means[0] / (norms * norms[0]).clamp(min=0).sqrt(),
        "variance": variances / variances[0],
        "noise": variances / groups / norms[0],
    }


def with_intervals(products_AANN: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each figure with half of its 95 % interval, by the jackknife over prompts."""
    groups = products_AANN.shape[-1]
    whole = figures(products_AANN)
    kept = [[*range(i), *range(i + 1, groups)] for i in range(groups)]
    without = [figures(products_AANN[..., rows, :][..., rows]) for rows in kept]
    result = {}
    for name, value in whole.items():
        spread = torch.stack([gradients[name] for gradients in without])
        error = ((groups - 1) * spread.var(0, correction=0)).sqrt()
        result[name] = (value, 1.96 * error)
    return result


# ------------------------------------------------------------------------------------------------
# The command


def main() -> None:
    """Sample, compute, print and keep a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="16 prompts; nothing is kept")
    parser.add_argument("--prompts", type=int, default=128, help="a multiple of 32, or fewer")
    parser.add_argument("--model", default="tiny-moe-ties", help="an embedded model of r3/assets")
    parser.add_argument("--bits", type=int, default=3, help="of mantissa, in the engine")
    parser.add_argument("--after", type=int, default=0, help="steps of training before, with r3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.short:
        args.prompts = 16
    with tempfile.TemporaryDirectory(prefix="r3-oracle-") as folder:
        weights = ROOT / "r3" / "assets" / args.model
        if args.after:
            steps = {"train.steps": args.after, "checkpoint.every": args.after}
            made = train(Path(folder) / "before", weights, args, steps)
            weights = made / "hf" / f"step_{args.after:06d}"
        steps = {"train.steps": 1, "rollout.prompts_per_step": args.prompts}
        run = train(Path(folder) / "sampled", weights, args, steps | {"checkpoint.every": 0})
        rollouts, rewards, _ = read_rollouts(RunDir(run).rollouts(1))
        oracle = Oracle.load(weights)
    line = {
        **{name: getattr(args, name) for name in ("model", "bits", "after", "seed", "prompts")},
        **measure(oracle, groups_of(rollouts, rewards), args.bits),
        "date": date.today().isoformat(),
        "source": source(),
        "cpu": hardware()["simd"],
        "versions": {name: version(name) for name in PACKAGES},
    }
    print("\n".join(table(line)))
    if not args.short:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def train(folder: Path, model: Path, args: argparse.Namespace, steps: Mapping[str, int]) -> Path:
    """Run the rounded engine with the settings of the map's first cell; return the run's folder.

    Engine and policy are float32, so that rounding to `bits` is all that the oracle must follow.
    """
    flags = {
        "model.path": model,
        "model.dtype": "float32",
        "model.fp32_head": "false",
        "engine.dtype": "float32",
        "parallel.ep": 1,
        "train.seed": args.seed,
        "train.lr": LR,
        "train.updates_per_step": 4,
        "log.dir": folder,
        "log.rollouts_every": steps["train.steps"],
        "log.tensorboard": "false",
        "eval.every": 0,
        "replay.shadow_every": 0,
        **steps,
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.rounded_engine", "tiny"),
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "MANTISSA_BITS": str(args.bits)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe run ended with exit code {done.returncode}")
    return folder


def groups_of(rollouts: Iterable[Rollout], rewards: Iterable[float]) -> list[Group]:
    """Return the samples by prompt."""
    members: dict[int, list[tuple[Rollout, float]]] = {}
    for rollout, reward in zip(rollouts, rewards, strict=True):
        members.setdefault(rollout.group, []).append((rollout, reward))
    return [Group.of(*zip(*group, strict=True)) for group in members.values()]


def measure(oracle: Oracle, groups: Sequence[Group], bits: int) -> dict[str, Any]:
    """Return how well the oracle follows the engine, and the figures of each part and arm."""
    parts = oracle.parts()
    places = {name: place for place, name in enumerate(oracle.weights)}
    sizes = {
        part: sum(oracle.weights[name].numel() for name in names) for part, names in parts.items()
    }
    blocks = min(BLOCKS, len(groups))
    assert len(groups) % blocks == 0, f"{len(groups)} prompts are not {blocks} equal blocks"
    vectors = {part: torch.zeros(len(ARMS), blocks, size) for part, size in sizes.items()}
    for number, group in enumerate(groups):
        for arm, made in enumerate(gradients(oracle, group, ARMS, bits).values()):
            for part, names in parts.items():
                flat = [made[places[name]].flatten() for name in names]
                vectors[part][arm, number % blocks] += torch.cat(flat)
    of_part = {part: products(products_of_part) for part, products_of_part in vectors.items()}
    of_part["all"] = torch.stack([*of_part.values()]).sum(0)
    result: dict[str, Any] = fidelity(oracle, groups, bits)
    result["stale"] = stale(oracle, groups, LR)
    for part, part_products in of_part.items():
        result[part] = {
            figure: {
                arm: [float(f"{number:.4g}") for number in (value[place], half[place])]
                for place, arm in enumerate(ARMS)
            }
            for figure, (value, half) in with_intervals(part_products).items()
        }
    return result


def stale(oracle: Oracle, groups: Sequence[Group], lr: float) -> dict[str, dict[str, float]]:
    """Move all weights by one update and return what the ratios and gradients of a second one are.

    The update is Adam's first, lr times the sign of the gradient. The arms are live routes in both
    passes, the live routes of the first pass in both (r2), and the engine's in both (r3).

    Returns:
        Of each arm: the share of (token, layer) slots whose experts changed, the largest ratio
        pi / pi_old of a token, and of the prompts' gradients of ppo_clip the median norm and the
        largest.
    """
    names, totals = [*oracle.weights], [torch.zeros_like(w) for w in oracle.weights.values()]
    for group in groups:
        (made,) = gradients(oracle, group, {"replayed": ARMS["replayed"]}, None).values()
        for total, addend in zip(totals, made, strict=True):
            total += addend
    moved = replace(
        oracle,
        weights={
            name: (oracle.weights[name].detach() - lr * total.sign()).requires_grad_()
            for name, total in zip(names, totals, strict=True)
        },
    )
    changed, slots = dict.fromkeys(STALE, 0.0), 0.0
    ratios: dict[str, float] = dict.fromkeys(STALE, 0.0)
    norms: dict[str, list[float]] = {arm: [] for arm in STALE}
    for group in groups:
        with torch.no_grad():
            old_live, live_routes = oracle(group.tokens_BT, None, None)
            old_replayed, _ = oracle(group.tokens_BT, group.routes_BTLK, None)
        on = group.sampled_BT
        slots += float(on.sum()) * oracle.layers
        passes = zip(
            STALE,
            (None, live_routes, group.routes_BTLK),
            (old_live, old_live, old_replayed),
            strict=True,
        )
        for arm, routes, old in passes:
            now, used = moved(group.tokens_BT, routes, None)
            before = live_routes if routes is None else routes
            other = (used.sort(-1).values != before.sort(-1).values).any(-1)[:, :-1]
            changed[arm] += float((other * on[..., None]).sum())
            ratios[arm] = max(ratios[arm], float(((now - old).detach() * on).max().exp()))
            inputs = _inputs(now, old, group)
            loss_N, _ = ppo_clip(inputs, Bounds(0.2, 0.28))
            loss = (loss_N * inputs.loss_mask_N).sum() / len(on)
            parts = torch.autograd.grad(
                loss, [*moved.weights.values()], allow_unused=True, materialize_grads=True
            )
            norms[arm].append(math.sqrt(sum(float(part.square().sum()) for part in parts)))
    return {
        arm: {
            "changed": float(f"{changed[arm] / slots:.4g}"),
            "largest_ratio": float(f"{ratios[arm]:.4g}"),
            "median_norm": float(f"{np.median([n for n in norms[arm] if n > 0]):.4g}"),
            "largest_norm": float(f"{max(norms[arm]):.4g}"),
        }
        for arm in STALE
    }


@torch.no_grad()
def fidelity(oracle: Oracle, groups: Sequence[Group], bits: int) -> dict[str, float]:
    """Return the distance of the oracle with rounding from the engine, and the live agreement."""
    far, near, own, live, whole, tokens, slots = (0.0 for _ in range(7))
    for group in groups:
        on = group.sampled_BT
        for routes, rounds in ((group.routes_BTLK, bits), (None, bits), (None, None)):
            logprobs, used = oracle(group.tokens_BT, routes, rounds)
            same = used.sort(-1).values == group.routes_BTLK.sort(-1).values
            agree = float((same.all(-1)[:, :-1].double() * on[..., None]).sum())
            if routes is not None:
                distance = ((logprobs - group.mu_BT).abs() * on).sum()
                far, tokens = far + float(distance), tokens + float(on.sum())
                slots += float(on.sum()) * used.shape[2]
            elif rounds:
                own += agree
            else:
                live += agree
                whole += float((same.all(-1).all(-1)[:, :-1].double() * on).sum())
                near += float(((logprobs - group.mu_BT).abs() * on).sum())
    return {
        "engine_distance": float(f"{far / tokens:.3g}"),
        "live_distance": float(f"{near / tokens:.3g}"),
        "engine_agreement": float(f"{own / slots:.4g}"),
        "live_agreement": float(f"{live / slots:.4g}"),
        "live_agreement_in_all_layers": float(f"{whole / tokens:.4g}"),
        "tokens": tokens,
    }


def table(line: Mapping[str, Any]) -> list[str]:
    """Return the figures of a line as Markdown."""
    rows = [
        f"{line['model']}, {line['bits']} bits, after {line['after']} steps, seed {line['seed']}, "
        f"{line['prompts']} prompts, {line['tokens']:.0f} tokens. Mean |log-probability - "
        f"engine's|: {line['engine_distance']} with its rounding and experts, "
        f"{line['live_distance']} live. Agreement of the experts: {line['engine_agreement']} with "
        f"its rounding, {line['live_agreement']} live; in all layers of a token "
        f"{line['live_agreement_in_all_layers']}.",
        "",
        "| part | arm | apart | bias^2 | cosine | variance |",
        "|---|---|---|---|---|---|",
    ]
    for part in (name for name in line if isinstance(line[name], dict) and "bias2" in line[name]):
        seen = 0 <= line[part]["noise"][TARGET][0] <= 0.5
        for arm in (name for name in ARMS if name != TARGET):
            columns = [
                f"{value:.4f} ± {half:.4f}" if seen or name in ("apart", "variance") else "-"
                for name in ("apart", "bias2", "cosine", "variance")
                for value, half in [line[part][name][arm]]
            ]
            rows.append(f"| {part} | {arm} | {' | '.join(columns)} |")
    rows += [
        "",
        f"After one update of {LR:g}, in a second one on the same samples:",
        "",
        "| arm | experts changed | largest pi / pi_old | gradient of a prompt, median | largest |",
        "|---|---|---|---|---|",
    ]
    for arm, facts in line["stale"].items():
        rows.append(f"| {arm} | {' | '.join(f'{value:.3g}' for value in facts.values())} |")
    return rows


if __name__ == "__main__":
    main()
