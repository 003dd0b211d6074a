"""The meaning of each metric key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """What a metric is: its formula in words or symbols, and the code or paper it comes from."""

    formula: str
    source: str


PHASES: dict[str, str] = {
    "sync": "copying the policy's weights into the engine",
    "prove_sync": "comparing log-probabilities of engine and policy after a sync",
    "generate": "sampling; rewards are computed meanwhile",
    "score": "computing advantages",
    "pack": "moving rollouts to the ranks that train on them, and packing",
    "train": "old log-probabilities and updates",
    "evaluate": "evaluation, its weight sync included",
}

LAYER_AGREEMENT = "routing/agreement_layer/"

_R3 = "arXiv 2510.11370"
_ROUND = "r3/rollout/round.py"
_COLLECT = "r3/rollout/collect.py"
_SCORED = "r3/rollout/scored.py"
_STEP = "r3/rollout/step.py"
_WORKERS = "r3/user_code/workers.py"
_MISMATCH = "r3/metrics/mismatch.py"
_REPLAY = "r3/routing/replay.py"
_LEDGER = "r3/routing/ledger.py"
_LOSS = "r3/algo/loss.py"
_POLICY = "r3/policy/policy.py"
_METER = "r3/metrics/meter.py"
_MEMORY = "r3/sync/residency.py"
# Rollouts that an older policy version started are left out of the mismatch metrics.
_D = "over loss tokens, D = log pi_old - log mu (policy at the rollout's weights, engine)"


def _calls(who: str, setting: str) -> dict[str, Entry]:
    """The counts of users' functions: `who` is env or reward."""
    texts = {
        "calls": "calls that do not return at once",
        "errors": "attempts that raised an exception or returned an invalid value",
        "timeouts": f"attempts that took longer than {setting}.timeout_s",
        "crashes": "attempts that ended their worker process",
        "retries": "attempts after a failed one",
    }
    return {f"{who}/{name}": Entry(text, _WORKERS) for name, text in texts.items()}


GLOSSARY: dict[str, Entry] = {
    "reward/mean": Entry(
        "mean reward per rollout; of workflows per episode, or per sequence if calls are rewarded",
        _SCORED,
    ),
    "reward/std": Entry("standard deviation of the rewards", _SCORED),
    "reward/shaped_mean": Entry("mean reward minus the overlong penalty", _SCORED),
    "reward/group_zero_std_frac": Entry(
        "share of groups without signal: equal rewards (after the overlong penalty), no token with "
        "loss, or left out by algo.dynamic_sampling_metric",
        _SCORED,
    ),
    "reward/COMPONENT/mean": Entry("mean of one reward function, before its weight", _COLLECT),
    "reward/by_environment_frac": Entry(
        "share of conversations that their environment rewarded", _COLLECT
    ),
    "reward/by_function_frac": Entry(
        "share of conversations that reward functions scored", _COLLECT
    ),
    "reward/unfinished_frac": Entry("share of conversations given env.unfinished_reward", _COLLECT),
    **_calls("reward", "reward"),
    "reward/dropped": Entry("rollouts left out after a failed reward (reward.on_error)", _COLLECT),
    "reward/zeroed": Entry("rollouts given 0 after a failed reward (reward.on_error)", _COLLECT),
    "reward/unreported": Entry(
        "rollouts for which a function of weight 0 failed; their rewards do not change", _COLLECT
    ),
    "reward/no_verdict_frac": Entry(
        "share of the responses put to self_judge that have no score (reward.no_verdict)",
        "r3/judges/self_judge.py",
    ),
    "reward/math_unread": Entry(
        "share of the responses scored by math that sympy could not read or compare in 5 s, which "
        "count as wrong",
        "r3/rewards/__init__.py",
    ),
    "reward/gym_unread": Entry(
        "share of the responses scored by gym for which the task's scorer failed or took more than "
        "5 s, which count as wrong",
        "r3/rewards/__init__.py",
    ),
    "reward/question_tokens_mean": Entry(
        "mean tokens of the prompts of self_judge", "r3/judges/self_judge.py"
    ),
    "reward/NAME": Entry("mean of what your reward function reports, over rollouts", _COLLECT),
    "time/judge_mean_s": Entry("mean seconds from the end of a rollout to its reward", _COLLECT),
    "eval/SET/accuracy": Entry(
        "share of right responses: the first of reward.function, or reward.correct, gave at least "
        "1; if no function was called, the reward is at least 1",
        "r3/rollout/heldout.py",
    ),
    "eval/SET/reward": Entry(
        "mean reward; reported if the function that decides what is right gave other values than 0 "
        "and 1, and then the figure of the set on the console",
        "r3/rollout/heldout.py",
    ),
    "eval/SET/unjudged": Entry("responses given 0 after a failed reward", "r3/rollout/heldout.py"),
    "eval/SET/avg_at_K": Entry("mean reward of K responses per question", "r3/rollout/heldout.py"),
    "eval/SET/pass_at_K": Entry(
        "mean over questions of 1 - C(n-c, K) / C(n, K), for c correct of n responses",
        "arXiv 2107.03374, eq. 1",
    ),
    "eval/SET/env/NAME": Entry("env/NAME of a held-out set", "r3/rollout/heldout.py"),
    "eval/SET/reward/NAME": Entry("reward/NAME of a held-out set", "r3/rollout/heldout.py"),
    "rollout/response_tokens_mean": Entry(
        "mean number of sampled tokens per rollout, or (sft) of learned tokens per row",
        _COLLECT,
    ),
    "rollout/truncated_frac": Entry(
        "share of rollouts cut at max_response_tokens, or without room for another message",
        _COLLECT,
    ),
    "rollout/tokens": Entry(
        "tokens of the rollouts that the step ends with, prompts included: all that were sampled, "
        "or with rollout.step_token_budget the complete groups; (sft) of all rows",
        _COLLECT,
    ),
    "rollout/sampled_tokens": Entry(
        "tokens that the engines sampled in the step: also in conversations that are suspended, "
        "dropped or left out, and without those of earlier steps",
        _COLLECT,
    ),
    "rollout/trained_tokens": Entry(
        "tokens with loss in the updates of the step", "r3/sync/rollouts.py"
    ),
    "rollout/rounds": Entry("rounds of prompts in the step (algo.dynamic_sampling)", _STEP),
    "rollout/groups_sampled": Entry("groups sampled in all rounds", _STEP),
    "rollout/groups_trained": Entry("groups with signal, which are trained on", _STEP),
    "rollout/carried": Entry(
        "conversations suspended by rollout.step_token_budget that the next step resumes", _STEP
    ),
    "rollout/dropped_by_budget": Entry(
        "suspended conversations dropped because of rollout.max_staleness", _STEP
    ),
    "rollout/stale_tokens_frac": Entry(
        "share of sampled tokens from an older policy version than the step's", _STEP
    ),
    "env/unread": Entry(
        "messages that the parser of tool calls or reasoning could not read and that stay text",
        "r3/envs/tool_calls.py",
    ),
    "env/turns_mean": Entry("mean number of model messages per conversation", _ROUND),
    "env/max_turns_frac": Entry("share of conversations that ended at env.max_turns", _ROUND),
    **{
        f"env/refused_{cause}": Entry(f"calls of a workflow or requests that {why}", _ROUND)
        for cause, why in (
            ("length", "were refused: no tokens left in the sequence or the context"),
            ("turns", "were refused: env.max_turns calls were made"),
            ("invalid", "were refused: an argument, a message or a field cannot be used"),
            ("hung_up", "were abandoned: their client hung up"),
        )
    },
    "env/sequences_mean": Entry(
        "mean number of trained token sequences per episode of a workflow", _ROUND
    ),
    "env/continued_frac": Entry(
        "share of a workflow's trained calls that continued a sequence", _ROUND
    ),
    **_calls("env", "env"),
    "env/dropped": Entry("conversations left out after a failure (env.on_error)", _ROUND),
    "env/zeroed": Entry("conversations with reward 0 after a failure (env.on_error)", _ROUND),
    "env/NAME": Entry("mean of what your environment reports, over conversations", _COLLECT),
    "engine/preemptions": Entry(
        "turns that lost their KV cache to others and were computed again; more cache "
        "(engine.kv_cache_gib) avoids them",
        "r3/engine/sampler.py",
    ),
    "routing/overlap_differs": Entry(
        "share of (token, layer) slots with other experts when the engine returns them again",
        "r3/engine/transcript.py",
    ),
    "mismatch/k3": Entry(
        f"mean(e^D - D - 1) {_D}; estimates KL(mu || pi_old)", f"{_MISMATCH}; {_R3}"
    ),
    "mismatch/k1": Entry(f"mean(-D) {_D}; noisier estimate of KL(mu || pi_old)", _MISMATCH),
    "mismatch/weight": Entry(f"mean(e^D) {_D}; 1 in expectation", _MISMATCH),
    "mismatch/f2": Entry(f"mean(|D| > ln 2) {_D}", f"{_MISMATCH}; {_R3}"),
    "mismatch/abs_mean": Entry(f"mean |D| {_D}", _MISMATCH),
    "mismatch/abs_p50": Entry(f"median of |D| {_D}", _MISMATCH),
    "mismatch/abs_p90": Entry(f"90th percentile of |D| {_D}", _MISMATCH),
    "mismatch/abs_p99": Entry(f"99th percentile of |D| {_D}", _MISMATCH),
    "mismatch/abs_p999": Entry(f"99.9th percentile of |D| {_D}", _MISMATCH),
    "mismatch/abs_log10": Entry(f"histogram of log10 |D| {_D}; TensorBoard only", _MISMATCH),
    "mismatch/abs_max": Entry(f"max |D| {_D}", _MISMATCH),
    "mismatch/ess": Entry(f"(sum w)^2 / (n sum w^2), w = e^D, {_D}", f"{_MISMATCH}; Kish 1965"),
    **{
        f"mismatch/{name}_{arm}": Entry(
            f"mismatch/{name} of one sampled micro-batch per rank, with {what} routes",
            "r3/policy/updates.py",
        )
        for arm, what in (("replay", "replayed"), ("live", "live"))
        for name in ("k3", "f2", "abs_p99", "abs_max")
    },
    "mismatch/k3_ratio": Entry(
        "mismatch/k3_live / mismatch/k3_replay on the same tokens; above 1: replay lowers it",
        "r3/policy/updates.py",
    ),
    "routing/coverage": Entry("routing/rows_captured / routing/rows_expected", _LEDGER),
    "routing/agreement": Entry(
        "share of replayed (token, layer) slots whose live top-k is the replayed set, at the "
        "rollout's weights",
        _REPLAY,
    ),
    "routing/agreement_layer/LAYER": Entry(
        "routing/agreement of one MoE layer, numbered in the decoder from 0", _REPLAY
    ),
    "routing/agreement_update_K": Entry(
        "routing/agreement in update K of the step, from 1; later updates have changed weights",
        "r3/policy/updates.py",
    ),
    "routing/margin": Entry(
        "mean over disagreeing slots of weakest live score - weakest replayed score", _REPLAY
    ),
    "routing/router_entropy": Entry(
        "mean over captured slots of -sum_e g_e log g_e, g the live gates over all experts",
        _REPLAY,
    ),
    "routing/router_gap": Entry(
        "mean over captured slots of weakest live score - best score of the experts left out",
        _REPLAY,
    ),
    "routing/load_max": Entry("routing/load_max_layer/LAYER of the worst layer", _METER),
    "routing/load_max_layer/LAYER": Entry(
        "most choices of an expert / mean over experts, of the captured rows of the updates",
        _REPLAY,
    ),
    "routing/load_entropy": Entry("mean over layers of routing/load_entropy_layer/LAYER", _METER),
    "routing/load_entropy_layer/LAYER": Entry(
        "-sum_e f_e log f_e / log E, f_e the share of choices of expert e; 1 is an even load",
        _REPLAY,
    ),
    "routing/load_dead": Entry("sum over layers of routing/load_dead_layer/LAYER", _METER),
    "routing/load_dead_layer/LAYER": Entry(
        "number of experts that no captured row of the updates chose", _REPLAY
    ),
    "routing/constant_layers": Entry(
        "MoE layers that sent all tokens of the step to the same experts: the router collapsed, or "
        "its capture does not work",
        "r3/routing/capture.py",
    ),
    "routing/replaced_frac": Entry(
        "share of replayed experts that replay.plausibility replaced by live ones", _REPLAY
    ),
    "routing/rows_expected": Entry(
        "tokens that the engine processed: tokens - 1 per rollout", _LEDGER
    ),
    "routing/rows_captured": Entry("expected rows that have routes", _LEDGER),
    "routing/rows_missing": Entry("rows without routes in rollouts that have some", _LEDGER),
    "routing/rows_missing_rollout": Entry("rows of rollouts without any routes", _LEDGER),
    "routing/rows_last_token": Entry(
        "last tokens of sequences, which the engine never processed", _LEDGER
    ),
    "routing/rows_replayed": Entry(
        "tokens that the policy's routers replayed in the updates, counted there; equals "
        "rows_captured, times train.epochs_per_step (r2: tokens routed as recorded)",
        _REPLAY,
    ),
    "routing/rows_live": Entry(
        "tokens that the routers routed live, counted there; equals rows_last_token + "
        "rows_missing + rows_missing_rollout, times train.epochs_per_step",
        _REPLAY,
    ),
    "routing/rows_filler": Entry("packed filler tokens, counted by the routers", _REPLAY),
    "routing/bytes": Entry("bytes of routes sent to training ranks", "r3/sync/rollouts.py"),
    "loss/total": Entry("loss with global denominators, mean over the step's updates", _LOSS),
    "loss/nll": Entry(
        "train.objective sft: mean of -log pi over loss tokens, before the update", _POLICY
    ),
    "loss/clip_frac": Entry(
        "share of loss tokens whose ratio pi / pi_old is out of bounds (algo.correction bypass: "
        "pi / mu)",
        _LOSS,
    ),
    "loss/kl_ref": Entry(
        "mean estimate of KL(pi || reference policy) over loss tokens (algo.kl_in reward: of "
        "pi_old, over sampled tokens)",
        _LOSS,
    ),
    "loss/kl_teacher": Entry(
        "mean of log pi_old - log pi_teacher over loss tokens: estimates KL(pi_old || teacher); "
        "algo.correction bypass: of mu",
        _LOSS,
    ),
    "correction/weight_mean": Entry(
        "mean importance weight against the engine over loss tokens, after its bounds", _LOSS
    ),
    "correction/cut_frac": Entry(
        "share of loss tokens whose importance weight is truncated or masked", _LOSS
    ),
    "policy/kl_old": Entry(
        "mean over loss tokens of r - 1 - log r, r = pi / pi_old, in updates that have an earlier "
        "pi_old: estimates KL(pi_old || pi), how far the step's updates have moved the policy",
        _POLICY,
    ),
    "policy/entropy": Entry("mean over loss tokens of -sum_v p_v log p_v", _POLICY),
    **{
        f"{name}_epoch_K": Entry(
            f"{name} in epoch K of the step, from 1; reported if train.epochs_per_step is above 1",
            "r3/policy/updates.py",
        )
        for name in ("loss/total", "loss/clip_frac", "policy/entropy", "policy/kl_old")
    },
    "optim/grad_norm": Entry("global gradient norm before clipping, mean over updates", _POLICY),
    "optim/router_grad_norm": Entry("gradient norm of the router weights alone", _POLICY),
    "optim/lr": Entry("learning rate, mean over updates", _POLICY),
    "time/step_s": Entry(
        "seconds from the first phase of the step to its end, slowest rank", _METER
    ),
    **{
        f"time/{phase}_s": Entry(f"seconds of {what}, slowest rank", _METER)
        for phase, what in PHASES.items()
    },
    "perf/tokens_per_s": Entry(
        "rollout/tokens / (time/step_s - time/evaluate_s)",
        _METER,
    ),
    "perf/sampled_tokens_per_s": Entry("rollout/sampled_tokens / time/generate_s", _METER),
    "perf/packing_efficiency": Entry(
        "tokens of rollouts / tokens if every micro-batch were as large as the largest of its "
        "update",
        "r3/algo/packing.py",
    ),
    "memory/peak_gib": Entry("largest memory use of the step in GiB, fullest rank", _MEMORY),
    "memory/residue_gib": Entry(
        "memory in GiB that stays while engine and policy are both offloaded, fullest rank", _MEMORY
    ),
    "memory/fragmented_gib": Entry(
        "memory of the device in GiB that no tensor uses and that cannot be returned, after the "
        "policy's offload, fullest rank; 0 on CPU",
        _MEMORY,
    ),
    **{
        f"memory/{phase}_gib": Entry(f"memory use in GiB in state {phase}, fullest rank", _MEMORY)
        for phase in ("sync", "generate", "train")
    },
}


_PATTERNS = {
    re.compile(
        re.escape(key)
        .replace("SET", "[A-Za-z0-9_.-]+")
        .replace("COMPONENT", r"\w+")
        .replace("NAME", r"[A-Za-z]\w*")
        .replace("_K", r"_[1-9][0-9]*")
        .replace("LAYER", "[0-9]+")
    ): key
    for key in GLOSSARY
    if "SET" in key or "COMPONENT" in key or key.endswith(("_K", "/LAYER", "/NAME"))
}


class UnknownMetricError(ValueError):
    """A key that GLOSSARY does not explain."""


def explain(key: str, *, users: bool = True) -> Entry:
    """The entry of a key, its SET, NAME and K filled in or not.

    Args:
        users: whether the key may be one that users' functions report. Any NAME is.

    Raises:
        UnknownMetricError: there is none.
    """
    if key in GLOSSARY:
        return GLOSSARY[key]
    for pattern, name in _PATTERNS.items():
        if pattern.fullmatch(key) and (users or not name.endswith("/NAME")):
            return GLOSSARY[name]
    near = difflib.get_close_matches(key, GLOSSARY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give it a line in r3.metrics.GLOSSARY"
    raise UnknownMetricError(f"unknown metric {key!r}: {hint}")


def headlines(keys: Iterable[str]) -> dict[str, str]:
    """The figure of each held-out set: its mean reward where there is one, else its accuracy."""
    found: dict[str, str] = {}
    for key in sorted(keys):  # accuracy before reward
        section, _, rest = key.partition("/")
        name, _, figure = rest.rpartition("/")
        if section == "eval" and figure in ("accuracy", "reward") and "/" not in name:
            found[name] = key
    return found


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the machine's speed and memory, and so differs between two equal
    runs.
    """
    explain(key)
    return key.startswith(("time/", "memory/")) or key.endswith("tokens_per_s")
