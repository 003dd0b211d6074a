"""What each metric key means."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from r3.metrics.mismatch import SHADOW


@dataclass(frozen=True)
class Entry:
    """What a metric is: its formula in words or symbols, and the code or paper it comes from."""

    formula: str
    source: str


PHASES: dict[str, str] = {
    "sync": "weights from policy to engine",
    "prove_sync": "log-probabilities of engine and policy compared after a sync",
    "generate": "sampling, rewards judged meanwhile",
    "score": "advantages",
    "pack": "rollouts moved to the ranks that train on them, packed",
    "train": "old log-probabilities and updates",
    "evaluate": "answers to held-out questions",
    "checkpoint": "checkpoint written; counted in the row after it",
    "export": "Hugging Face files written",
}


_R3 = "arXiv 2510.11370"


LAYER_AGREEMENT = "routing/agreement_layer/"


_TOKENS = (
    "over the loss tokens; D = log pi_old - log mu: policy at the rollout's weights against engine"
)


GLOSSARY: dict[str, Entry] = {
    "reward/mean": Entry("mean reward of the step's rollouts", "r3/rollout/collect.py"),
    "reward/std": Entry(
        "standard deviation of the rewards of the step's rollouts", "r3/rollout/collect.py"
    ),
    "reward/shaped_mean": Entry(
        "mean reward with the overlong penalty taken off", "r3/handover/rollouts.py"
    ),
    "reward/group_zero_std_frac": Entry(
        "share of groups whose rewards are all equal", "r3/rollout/collect.py"
    ),
    "reward/COMPONENT/mean": Entry(
        "mean of what one function of reward.function gave, before its weight",
        "r3/rollout/collect.py",
    ),
    "reward/calls": Entry("calls of functions that do not run at once", "r3/runtime/workers.py"),
    "reward/errors": Entry(
        "of their attempts, those that raised, were refused or gave no score",
        "r3/runtime/workers.py",
    ),
    "reward/timeouts": Entry(
        "of their attempts, those that took longer than reward.timeout_s", "r3/runtime/workers.py"
    ),
    "reward/crashes": Entry(
        "of their attempts, those that took their worker process down", "r3/runtime/workers.py"
    ),
    "reward/retries": Entry("attempts after a failed one", "r3/runtime/workers.py"),
    "reward/dropped": Entry(
        "answers left out after a failure (reward.on_error)", "r3/rollout/collect.py"
    ),
    "reward/zeroed": Entry(
        "answers given 0 after a failure (reward.on_error)", "r3/rollout/collect.py"
    ),
    "time/judge_mean_s": Entry(
        "mean seconds from an answer's end to its reward", "r3/rollout/collect.py"
    ),
    "eval/SET/accuracy": Entry(
        "share of answers to the held-out questions with reward >= 1", "r3/rollout/evaluate.py"
    ),
    "eval/SET/unjudged": Entry(
        "answers given 0 because their reward failed", "r3/rollout/evaluate.py"
    ),
    "eval/SET/avg_at_K": Entry(
        "mean reward of the K answers to each held-out question", "r3/rollout/evaluate.py"
    ),
    "eval/SET/pass_at_K": Entry(
        "mean of 1 - C(n-c, K) / C(n, K), c of n answers right", "arXiv 2107.03374, eq. 1"
    ),
    "rollout/response_tokens_mean": Entry(
        "mean of sampled tokens per rollout", "r3/rollout/collect.py"
    ),
    "rollout/truncated_frac": Entry(
        "share of rollouts that ended at max_response_tokens", "r3/rollout/collect.py"
    ),
    "rollout/tokens": Entry("tokens of all rollouts, prompts included", "r3/rollout/collect.py"),
    "rollout/rounds": Entry(
        "rounds of prompts the step took (algo.dynamic_sampling)", "r3/rollout/step.py"
    ),
    "rollout/groups_sampled": Entry("groups answered in all rounds", "r3/rollout/step.py"),
    "rollout/groups_trained": Entry(
        "of them, those with signal that are trained on", "r3/rollout/step.py"
    ),
    "rollout/carried": Entry(
        "conversations that rollout.step_token_budget interrupted and that go on in the next step",
        "r3/rollout/step.py",
    ),
    "rollout/dropped_by_budget": Entry(
        "conversations it interrupted that were dropped: they would have exceeded rollout.max_staleness",
        "r3/rollout/step.py",
    ),
    "rollout/stale_tokens_frac": Entry(
        "share of sampled tokens that an older version than the step's sampled",
        "r3/rollout/step.py",
    ),
    "env/turns_mean": Entry(
        "mean of the model's messages per conversation", "r3/rollout/collect.py"
    ),
    "env/max_turns_frac": Entry(
        "share of conversations that ended at env.max_turns", "r3/rollout/collect.py"
    ),
    "env/calls": Entry("calls of environments in the step", "r3/runtime/workers.py"),
    "env/errors": Entry(
        "of their attempts, those that raised or returned nonsense", "r3/runtime/workers.py"
    ),
    "env/timeouts": Entry(
        "of their attempts, those that took longer than env.timeout_s", "r3/runtime/workers.py"
    ),
    "env/crashes": Entry(
        "of their attempts, those that took their worker process down", "r3/runtime/workers.py"
    ),
    "env/retries": Entry("attempts after a failed one", "r3/runtime/workers.py"),
    "env/dropped": Entry(
        "conversations left out after a failure (env.on_error)", "r3/rollout/collect.py"
    ),
    "env/zeroed": Entry(
        "conversations ended with reward 0 after a failure (env.on_error)", "r3/rollout/collect.py"
    ),
    "routing/overlap_differs": Entry(
        "of (token, layer) slots the engine gave twice, in a turn and in the next, the share with other experts",
        "r3/engine/sampler.py",
    ),
    "mismatch/k3": Entry(
        f"mean(e^D - D - 1) {_TOKENS}; estimates KL(mu || pi_old)", f"r3/metrics/reduce.py; {_R3}"
    ),
    "mismatch/k1": Entry(
        f"mean(-D) {_TOKENS}; estimates KL(mu || pi_old), noisier", "r3/metrics/reduce.py"
    ),
    "mismatch/weight": Entry(f"mean(e^D) {_TOKENS}; 1 in expectation", "r3/metrics/reduce.py"),
    "mismatch/f2": Entry(f"mean(|D| > ln 2) {_TOKENS}", f"r3/metrics/reduce.py; {_R3}"),
    "mismatch/abs_mean": Entry(f"mean |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/abs_p50": Entry(f"median of |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/abs_p90": Entry(f"90th percentile of |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/abs_p99": Entry(f"99th percentile of |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/abs_p999": Entry(f"99.9th percentile of |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/abs_log10": Entry(
        f"histogram of log10 |D| {_TOKENS}; in TensorBoard only", "r3/metrics/reduce.py"
    ),
    "mismatch/abs_max": Entry(f"max |D| {_TOKENS}", "r3/metrics/reduce.py"),
    "mismatch/ess": Entry(
        f"(sum w)^2 / (n sum w^2), w = e^D, {_TOKENS}", "r3/metrics/reduce.py; Kish 1965"
    ),
    **{
        f"mismatch/{name}_{arm}": Entry(
            f"mismatch/{name} of a sampled micro-batch of each rank, with {what} routes",
            "r3/policy/updates.py",
        )
        for arm, what in (("replay", "replayed"), ("live", "live"))
        for name in SHADOW
    },
    "mismatch/k3_ratio": Entry(
        "mismatch/k3_live / mismatch/k3_replay, of the same tokens; above 1 = replay lowers it",
        "r3/policy/updates.py",
    ),
    "routing/coverage": Entry(
        "routing/rows_captured / routing/rows_expected", "r3/routing/ledger.py"
    ),
    "routing/agreement": Entry(
        "share of replayed (token, layer) slots whose live top-k is the replayed set, at the rollout's weights",
        "r3/routing/replay.py",
    ),
    "routing/agreement_layer/LAYER": Entry(
        "the same of one MoE layer, by its number in the decoder from 0", "r3/routing/replay.py"
    ),
    "routing/agreement_update_K": Entry(
        "routing/agreement in update K of several of a step, K from 1: later ones route with changed weights",
        "r3/policy/updates.py",
    ),
    "routing/margin": Entry(
        "mean over slots that disagree of: weakest live score - weakest replayed score, in the units the router chooses by",
        "r3/routing/replay.py",
    ),
    "routing/replaced_frac": Entry(
        "share of replayed experts that replay.plausibility replaced by live ones",
        "r3/routing/replay.py",
    ),
    "routing/rows_expected": Entry(
        "tokens the engine processed: tokens - 1 a rollout", "r3/routing/ledger.py"
    ),
    "routing/rows_captured": Entry(
        "of these, tokens that came with routes", "r3/routing/ledger.py"
    ),
    "routing/rows_missing": Entry(
        "of these, tokens without routes among others with", "r3/routing/ledger.py"
    ),
    "routing/rows_missing_rollout": Entry(
        "of these, tokens of rollouts that came without any routes", "r3/routing/ledger.py"
    ),
    "routing/rows_last_token": Entry(
        "last tokens of sequences, which the engine never processed", "r3/routing/ledger.py"
    ),
    "routing/rows_replayed": Entry(
        "tokens that the policy's routers routed as told, counted there, in the updates; must be rows_captured "
        "(r2: tokens routed as recorded)",
        "r3/routing/replay.py",
    ),
    "routing/rows_live": Entry(
        "tokens that they routed live, counted there; must be rows_last_token + rows_missing + rows_missing_rollout",
        "r3/routing/replay.py",
    ),
    "routing/rows_filler": Entry(
        "packed tokens of no rollout, counted there", "r3/routing/replay.py"
    ),
    "routing/bytes": Entry(
        "bytes of routes that reached ranks to train on, all ranks", "r3/handover/rollouts.py"
    ),
    "loss/total": Entry(
        "loss, global denominators, mean over the step's updates", "r3/algo/loss.py"
    ),
    "loss/clip_frac": Entry(
        "share of loss tokens whose ratio pi / pi_old (pi / mu with algo.correction bypass) was out of bounds",
        "r3/algo/loss.py",
    ),
    "loss/kl_ref": Entry(
        "mean of the estimate of KL(pi || starting model) over loss tokens; of pi_old with algo.kl_in reward",
        "r3/algo/loss.py",
    ),
    "correction/weight_mean": Entry(
        "mean over loss tokens of the weight against the engine, after its bounds",
        "r3/algo/loss.py",
    ),
    "correction/cut_frac": Entry(
        "share of loss tokens whose weight against the engine was truncated or masked",
        "r3/algo/loss.py",
    ),
    "policy/entropy": Entry("mean over loss tokens of -sum_v p_v log p_v", "r3/policy"),
    "optim/grad_norm": Entry(
        "global gradient norm before clipping, mean over updates", "r3/policy"
    ),
    "optim/router_grad_norm": Entry("the same over router weights alone", "r3/policy"),
    "optim/lr": Entry("learning rate, mean over updates", "r3/policy"),
    "time/step_s": Entry(
        "seconds from the row's first phase to its end, slowest rank", "r3/metrics/meter.py"
    ),
    **{
        f"time/{phase}_s": Entry(f"seconds of: {what}; slowest rank", "r3/metrics/meter.py")
        for phase, what in PHASES.items()
    },
    "perf/tokens_per_s": Entry("rollout/tokens / time/step_s", "r3/metrics/meter.py"),
    "perf/packing_efficiency": Entry(
        "tokens of rollouts / those there would be if every micro-batch were as large as its update's largest",
        "r3/algo/packing.py",
    ),
    "memory/peak_gib": Entry(
        "largest memory in use in the step, fullest rank", "r3/handover/memory.py"
    ),
    "memory/residue_gib": Entry(
        "memory in use when both worlds have given up theirs, fullest rank", "r3/handover/memory.py"
    ),
    **{
        f"memory/{phase}_gib": Entry(
            f"memory in use in {phase}, fullest rank", "r3/handover/memory.py"
        )
        for phase in ("sync", "generate", "train")
    },
}


_PATTERNS = {
    re.compile(
        re.escape(key)
        .replace("SET", "[A-Za-z0-9_.-]+")
        .replace("COMPONENT", r"\w+")
        .replace("_K", r"_[1-9][0-9]*")
        .replace("LAYER", "[0-9]+")
    ): key
    for key in GLOSSARY
    if "SET" in key or "COMPONENT" in key or key.endswith(("_K", "/LAYER"))
}


class UnknownMetricError(ValueError):
    """A key that GLOSSARY does not explain."""


def explain(key: str) -> Entry:
    """The entry of a key, its SET and K filled in or not."""
    if key in GLOSSARY:
        return GLOSSARY[key]
    for pattern, name in _PATTERNS.items():
        if pattern.fullmatch(key):
            return GLOSSARY[name]
    near = difflib.get_close_matches(key, GLOSSARY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give it a line in r3.metrics.GLOSSARY"
    raise UnknownMetricError(f"unknown metric {key!r}: {hint}")


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the machine's speed and memory, and so differs between two equal runs."""
    explain(key)
    return key.startswith(("time/", "memory/")) or key == "perf/tokens_per_s"
