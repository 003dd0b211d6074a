"""Check combinations of algorithm settings: invalid ones, and ones that are rarely intended."""

from __future__ import annotations

from r3.checks.findings import Findings
from r3.checks.sources import find_function, signature_of
from r3.config import Config
from r3.config.arguments import Taker, assigned
from r3.user_code.loading import ALGORITHM_PARAMETERS, call_problem


def check_algorithm(config: Config, found: Findings) -> None:
    """Refuse to correct the mismatch twice, and one algorithm under the name of another."""
    algo = config.algo
    if found.sound("algo.args", "algo.loss", "algo.advantage"):
        _check_own_functions(config, found)
    if algo.loss == "minirl" and algo.correction != "none":
        rule = "corrects the mismatch twice: the weight of minirl is pi / mu already"
        found.add("algo.correction", rule, "set it to none; algo.minirl_cap bounds that weight")
    if algo.loss == "pg" and algo.correction == "bypass":
        rule = "changes the ratio of a loss, and pg has none"
        found.add("algo.correction", rule, "set it to none, or use a loss with a ratio")
    if algo.loss == "cispo" and found.sound("algo.clip_low") and algo.clip_low < 1:
        rule = "is a lower bound of PPO: cispo bounds its weight from above only"
        fix = "use --algo.clip_low 1 and choose --algo.clip_high; 3 to 5 are common"
        found.add("algo.clip_low", rule, fix)
    if algo.dynamic_sampling > 0 and algo.advantage == "reinforce_pp":
        rule = (
            "leaves out groups with equal rewards, and reinforce_pp learns from those too: it has "
            "no groups"
        )
        found.add("algo.dynamic_sampling", rule, "set it to 0, or use another algo.advantage")
    if algo.takes_kl_from_reward and algo.advantage == "grpo" and config.train.objective == "rl":
        rule = (
            "is divided by the standard deviation of its group: where rewards are equal, KL "
            "differences of any size would become advantages of 1, whatever algo.kl_coef is"
        )
        fix = "use --algo.kl_in loss, or --algo.advantage dr_grpo, rloo or reinforce_pp_baseline"
        found.add("algo.kl_in", rule, fix)
    if algo.baseline == "step" and algo.advantage == "reinforce_pp":
        rule = "compares rewards within a group, and reinforce_pp compares those of the whole step"
        found.add("algo.baseline", rule, "set it to prompt, or use another algo.advantage")
    if (
        algo.dynamic_sampling > 0
        and config.rollout.step_token_budget
        and config.rollout.max_staleness > 0
    ):
        rule = (
            "keeps groups for later steps, and algo.dynamic_sampling leaves out groups of this "
            "step by their rewards"
        )
        fix = "set it to 0, which drops suspended conversations, or disable algo.dynamic_sampling"
        found.add("rollout.max_staleness", rule, fix)
    length = config.rollout.max_response_tokens
    if (
        found.sound("algo.overlong_buffer", "rollout.max_response_tokens")
        and algo.overlong_buffer > length
    ):
        rule = f"exceeds rollout.max_response_tokens = {length}"
        found.add("algo.overlong_buffer", rule, "DAPO uses a fifth of it; 0 disables the penalty")


def takers_of_arguments(config: Config, found: Findings) -> list[Taker]:
    """The user's advantage and loss, which `algo.args` are for; a missing one is a problem."""
    takers = []
    for role, spec in config.algo.own_functions.items():
        node = find_function(spec, f"algo.{role}", found)
        signature = signature_of(node) if node else None
        passed = len(ALGORITHM_PARAMETERS[f"algo.{role}"])
        takers.append(Taker(name=role, signature=signature, passed=passed))
    return takers


def _check_own_functions(config: Config, found: Findings) -> None:
    """The user's loss and advantage must be callable with what R3 passes and with algo.args."""
    takers = takers_of_arguments(config, found)
    given, faults = assigned(config.algo.args, takers)
    for item, rule, fix in faults:
        found.add("algo.args", rule, fix, value=item)
    if not found.sound("algo.args"):
        return
    for taker, arguments in zip(takers, given, strict=True):
        field = f"algo.{taker.name}"
        if taker.signature:
            spec, parameters = config.algo.own_functions[taker.name], ALGORITHM_PARAMETERS[field]
            if problem := call_problem(field, spec, taker.signature, parameters, arguments):
                found.problems.append(problem)


def algorithm_notes(config: Config) -> list[str]:
    """Settings that work and are seldom meant."""
    algo, notes = config.algo, []
    if algo.loss == "gspo" and max(algo.clip_low, algo.clip_high) > 0.05:
        notes.append(
            f"algo.clip_low = {algo.clip_low} and clip_high = {algo.clip_high} never clip with "
            "gspo: ratios of whole responses stay near 1. The paper uses 3e-4 and 4e-4"
        )
    if algo.loss == "gspo" and algo.aggregation != "sequence":
        notes.append(
            f"algo.aggregation = {algo.aggregation!r} weights the responses of gspo by length. The "
            "paper uses sequence"
        )
    if algo.loss == "cispo" and algo.clip_high < 1:
        notes.append(
            f"algo.clip_high = {algo.clip_high} is a bound of PPO: it would bound the weights of "
            f"cispo at {1 + algo.clip_high}. 3 to 5 are common"
        )
    several = config.train.updates_of_step > 1 and config.train.objective != "sft"
    if algo.loss == "pg" and several:
        notes.append(
            "algo.loss = 'pg' has no ratio: all updates of a step but the first are biased"
        )
    if algo.kl_coef and algo.kl_in == "loss" and algo.kl_estimator == "k1":
        notes.append(
            "algo.kl_estimator = 'k1' in the loss has no gradient on average: use k2 or k3"
        )
    if algo.dynamic_sampling and algo.teacher and config.train.objective == "rl":
        notes.append(
            f"algo.dynamic_sampling = {algo.dynamic_sampling} leaves out no group for its rewards: "
            "algo.teacher teaches groups with equal rewards too"
        )
    replays = config.replay.mode != "off" and config.replay.reference
    if algo.takes_kl_from_reward and config.replay.mode != "off" and not replays:
        notes.append(
            "replay.reference is false: the reference policy routes for itself, and the KL that "
            "is subtracted from rewards is not 0 where both policies are equal. Use "
            "--replay.reference true"
        )
    if algo.takes_kl_from_reward and algo.kl_estimator != "k1":
        notes.append(
            f"algo.kl_estimator = {algo.kl_estimator!r} in the reward is a biased penalty: k1 is "
            "the unbiased one"
        )
    return notes
