"""Settings of what is learnt: advantage and loss, optimizer, replay of routes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from r3.config.fields import ALWAYS, setting

# Those that there is code for. This module imports nothing heavy, so it names them itself.
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSSES = ("ppo_clip", "pg", "gspo", "cispo", "minirl")


# Settings that train.objective brings, as a preset does; other values contradict it.
OF_OBJECTIVE: dict[str, dict[str, Any]] = {
    "rl": {},
    # Nothing is sampled, compared or replayed.
    "sft": {
        "rollout.group_size": 1,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.top_k": 0,
        "rollout.step_token_budget": 0,
        "algo.advantage": "reinforce_pp",
        "algo.baseline": "prompt",
        "algo.dynamic_sampling": 0,
        "algo.overlong_buffer": 0,
        "algo.overlong_filter": False,
        # With an advantage of 1, the cross-entropy.
        "algo.loss": "pg",
        "algo.args": (),
        "algo.correction": "none",
        "algo.kl_coef": 0.0,
        "replay.mode": "off",
        "train.epochs_per_step": 1,
    },
    # Responses are not compared with each other.
    "distill": {
        "algo.advantage": "reinforce_pp",
        "algo.baseline": "prompt",
        "algo.dynamic_sampling": 0,
    },
}


def _one_of_or_own(names: tuple[str, ...]) -> dict[str, str]:
    """A built-in function by its name, or a function of a user's file."""
    return {
        "pattern": "|".join([*names, r".+\.py:[A-Za-z_]\w*"]),
        "words": f"one of {', '.join(names)}, or path/to/file.py:function",
    }


def _learning_rate_decays(config: Any) -> bool:
    """Every learning rate of a decaying schedule depends on the number of steps."""
    return config.train.lr_schedule != "constant"


def _micro_batch_bounds_prompts(config: Any) -> bool:
    """The size of a micro-batch decides which prompts are dropped or where conversations end."""
    several_turns = not all(environment.is_one_turn for environment in config.environments)
    return not config.data.max_prompt_tokens and (
        config.data.on_too_long == "drop" or several_turns
    )


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Advantage, loss, corrections and KL penalty.

    Formulas and papers are in r3/algo/advantage.py and r3/algo/loss.py. mu is the engine's
    distribution, pi_old the policy with the weights that sampled, pi the policy now, and r is
    pi / pi_old.
    """

    advantage: str = setting("grpo", path=True, **_one_of_or_own(ADVANTAGES))
    """grpo: (R - group mean) / group std. dr_grpo: R - group mean. rloo: R - mean of the group's
    other samples. reinforce_pp: R whitened over the step. reinforce_pp_baseline: R - group mean,
    scaled over the step. Or your own, `path/to/file.py:function`."""
    baseline: Literal["prompt", "step"] = setting("prompt", needs="training workflow")
    """What a reward is compared with. prompt: all rewards of its prompt. step: if a workflow
    rewards each call, those of the sequences that have the same index in their episodes (step-wise
    GRPO)."""
    dynamic_sampling: int = setting(0, ge=0)
    """Maximum additional rounds of prompts per step, until rollout.prompts_per_step groups have
    signal (DAPO). Other groups are not trained on. 0: off."""
    dynamic_sampling_metric: Literal["correct", "reward"] = setting(
        "correct", needs="rewards algo.dynamic_sampling"
    )
    """Which groups have signal. correct: those in which the function that decides what is right
    (reward.correct) gives different values: in DAPO, neither all responses right nor all wrong.
    reward: those with different rewards, weights and overlong penalty included."""
    overlong_buffer: int = setting(0, ge=0, needs="rewards")
    """Soft overlong penalty (DAPO): the reward falls linearly over this many last tokens before
    rollout.max_response_tokens, which counts observations too. 0: off."""
    overlong_penalty: float = setting(
        1.0,
        gt=0,
        fix="1.0; algo.overlong_buffer 0 disables the penalty",
        needs="rewards algo.overlong_buffer",
    )
    """Penalty of a response of maximum length."""
    overlong_filter: bool = False
    """Leave truncated responses out of the loss. They still count in the baseline of their
    group."""
    loss: str = setting("ppo_clip", path=True, **_one_of_or_own(LOSSES))
    """ppo_clip: minimum of r A and clipped r A. pg: A log pi. gspo: ppo_clip with the mean ratio of
    the response. cispo: clipped r as a constant weight. minirl: clipped pi / mu as a constant
    weight, tokens outside of the clip range masked. Or your own, `path/to/file.py:function`."""
    args: tuple[str, ...] = setting(
        (),
        arguments=True,
        pattern=r"(?s)((loss|advantage)\.)?[A-Za-z_]\w*=.*",
        words="key=value, loss.key=value or advantage.key=value",
    )
    """Keyword arguments of your loss and advantage, each key=value for all that have such a
    parameter, or loss.key=value or advantage.key=value; also a mapping. Values are JSON or Python
    literals, else text."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all loss tokens of the batch. sequence: mean over sequences of their token
    means. constant: sum over tokens / (sequences * rollout.max_response_tokens)."""
    clip_low: float = setting(0.2, gt=0, le=1, fix="0.2 is common", needs="low_ratio")
    """Lower clip range: r is bounded below at 1 - clip_low. gspo: 3e-4. cispo: 1, no lower
    bound."""
    clip_high: float = setting(
        0.28, gt=0, fix="0.2 is symmetric, 0.28 is the clip-higher of DAPO", needs="ratio"
    )
    """Upper clip range: r is bounded above at 1 + clip_high (clip-higher, arXiv 2503.14476). gspo:
    4e-4. minirl: 0.27. cispo: 3 to 5."""
    clip_dual: float = setting(
        0.0, zero=True, gt=1, fix="0 disables it; 3.0 is common", needs="algo.loss=ppo_clip ratio"
    )
    """ppo_clip: upper bound of r where A < 0 (dual clip, arXiv 1912.09729). 0: off."""
    minirl_cap: float = setting(
        5.0, ge=1, why="without mismatch the weight is 1", needs="rollouts algo.loss=minirl"
    )
    """minirl: upper bound of pi / mu."""
    correction: Literal[
        "none",
        "token_tis",
        "sequence_tis",
        "token_mis",
        "sequence_mis",
        "geometric_mask",
        "icepop",
        "bypass",
    ] = "none"
    """Importance weight against the mismatch w = pi_old / mu. tis: min(w, high), per token or per
    response. mis and icepop: w, and 0 outside of [low, high]. geometric_mask: no loss for responses
    whose geometric mean of w is outside. bypass: no weight, and r = pi / mu."""
    correction_low: float = setting(
        0.0,
        ge=0,
        lt=1,
        why="without mismatch the weight is 1",
        fix="0 for the default of algo.correction, or 0.5",
        needs="rollouts low_bound",
    )
    """Lower bound of the importance weights. 0: the default of the correction (sequence_mis and
    icepop 0.5, geometric_mask 0.999, token_mis none)."""
    correction_high: float = setting(
        0.0,
        zero=True,
        ge=1,
        why="without mismatch the weight is 1",
        fix="0 for the default of algo.correction, or 2.0",
        needs="rollouts high_bound",
    )
    """Upper bound of the importance weights. 0: the default of the correction (tis and mis 2,
    icepop 5, geometric_mask 1.001)."""
    entropy_coef: float = setting(0.0, ge=0, fix="0 disables the bonus; 0.001 is common")
    """Weight of the entropy bonus. The entropy of the policy's distribution at rollout.temperature,
    times this, is subtracted from the loss of every token. 0: off."""
    kl_coef: float = setting(0.0, ge=0, fix="0 disables the KL penalty")
    """Weight of the KL penalty to the reference policy, which is the initial model. 0: off, and no
    reference weights are kept."""
    kl_in: Literal["loss", "reward"] = setting("loss", needs="rollouts algo.kl_coef")
    """loss: the penalty is added to the loss of every token. reward: its sum over the response is
    subtracted from the reward before advantages (RLOO, arXiv 2402.14740)."""
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", needs="rollouts algo.kl_coef")
    """Estimator of the KL (joschu.net/blog/kl-approx.html). Use k2 or k3 in the loss, k1 in the
    reward."""
    teacher: tuple[str, ...] = setting((), path=True)
    """Hugging Face checkpoints with the policy's tokenizer, of any size, as folders or
    hub:OWNER/NAME[@REVISION]: one per path of data.path, or one for all. Their log-probabilities of
    the sampled tokens add to the advantages (on-policy distillation). Empty: none."""
    teacher_coef: float = setting(1.0, gt=0, needs="training algo.teacher")
    """Weight of log pi_teacher - log pi_old in the advantage of a token."""

    @property
    def takes_kl_from_reward(self) -> bool:
        """Whether the KL penalty is subtracted from rewards before advantages."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def own_functions(self) -> dict[str, str]:
        """Which of "loss" and "advantage" are users' functions, as path/to/file.py:function."""
        named = {"advantage": self.advantage, "loss": self.loss}
        return {role: spec for role, spec in named.items() if ":" in spec}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained on, the optimizer and its schedule."""

    objective: Literal["rl", "sft", "distill"] = setting("rl", needs=ALWAYS)
    """rl: rewards of sampled responses. sft: supervised fine-tuning on the assistant messages of
    rollout.prompts_per_step rows per step; no engine is built unless eval.path is set. distill:
    sampled responses learn from algo.teacher alone."""
    steps: int = setting(
        100, ge=1, resume=True, unless=(_learning_rate_decays, "unless train.lr_schedule decays")
    )
    """Number of steps. A step is one round of generation and its updates."""
    patience: int = setting(0, ge=0, resume=True, needs="training eval.every")
    """Evaluations in a row that are not better than the best by checkpoint.keep_best, after which
    the run ends, as after its last step (early stopping). 0: the run makes all steps."""
    lr: float = setting(1e-6, gt=0, fix="1e-6 is common for models of billions of parameters")
    """Peak learning rate of AdamW."""
    warmup_updates: int = setting(0, ge=0)
    """Optimizer updates of linear warm-up from 0."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or a decay to min_lr at the last update."""
    min_lr: float = setting(0.0, ge=0, fix="0 decays to zero", needs="training decay")
    """Final learning rate of a decaying schedule."""
    weight_decay: float = setting(0.0, ge=0, fix="0 disables it")
    """Decoupled weight decay of AdamW, of matrices. Biases and other vectors have none."""
    beta1: float = setting(0.9, ge=0, lt=1, fix="0.9")
    """First-moment decay of AdamW."""
    beta2: float = setting(0.95, ge=0, lt=1, fix="0.95")
    """Second-moment decay of AdamW."""
    clip_grad: float = setting(1.0, ge=0, fix="0 disables clipping, 1.0 is common")
    """Maximum global gradient norm. 0: no clipping."""
    optimizer: Literal["kept", "resident", "streamed"] = setting(
        "resident", resume=True, needs="moves"
    )
    """Where AdamW's state is. resident: on the device while the policy trains, in host memory while
    the engine generates. kept: always on the device, where there is room for both. streamed: in
    host memory; every update brings it to the device in parts and takes it back. The updates are
    the same bit for bit."""
    optimizer_kept_gib: float = setting(
        0.0, ge=0, resume=True, needs="train.optimizer=resident|streamed moves"
    )
    """GiB of each rank's optimizer state that stay on the device all the time, with optimizer
    resident or streamed: these are never copied. --dry-run shows what each phase needs."""
    freeze: tuple[str, ...] = ()
    """Patterns over the checkpoint's tensor names (* and ?): parameters that match keep their
    initial values, as in *.mlp.gate.weight, the routers of many models. Memory stays the same."""
    updates_per_step: int = setting(1, ge=1)
    """Optimizer updates per step and epoch. Each takes an equal share of the rollouts."""
    epochs_per_step: int = setting(1, ge=1)
    """Times that the rollouts of a step are trained on. Each epoch makes the same updates in the
    same order. Old log-probabilities, advantages and routes are those of the rollouts."""
    micro_batch_tokens: int = setting(
        16384,
        ge=1,
        resume=True,
        unless=(
            _micro_batch_bounds_prompts,
            "unless it bounds prompts, which data.max_prompt_tokens avoids",
        ),
        needs=ALWAYS,
    )
    """Packed tokens of one forward and backward pass per rank."""
    logprob_chunk_tokens: int = setting(1024, ge=0, resume=True)
    """Tokens whose logits are in memory at a time, in scoring and in training. 0: those of a whole
    micro-batch, which the backward pass keeps and does not compute again."""
    seed: int = setting(0, ge=0, le=2**31 - 1, fix="any small number", needs=ALWAYS)
    """Seed of data order and sampling: the same seed gives the same run."""

    @property
    def kept_bytes(self) -> float:
        """Bytes of the optimizer's state that always stay on the device; infinite: all."""
        return math.inf if self.optimizer == "kept" else self.optimizer_kept_gib * 2**30

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of a step, over all of its epochs."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_of_step


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Rollout Routing Replay: capture in the engine, replay in the policy."""

    mode: Literal["off", "r2", "r3"] = setting("r3", needs="training")
    """r3: replay the engine's routes in every pass of the policy. r2: record routes in the policy's
    old-log-probability pass and replay them in its updates. off: every pass routes for itself."""
    on_missing: Literal["error", "live"] = setting("error", needs="r3")
    """What to do with a token without a captured route. error: stop the run. live: route it live
    and count it."""
    min_coverage: float = setting(
        0.99,
        ge=0,
        le=1,
        fix="0.99, or 0 to accept any gap",
        resume=True,
        needs="r3 replay.on_missing=live",
    )
    """With on_missing live: stop the run when a smaller fraction of a step's tokens has captured
    routes."""
    reference: bool = setting(False, needs="replay algo.kl_coef")
    """Replay routes in the reference policy too. false: its KL to the policy is not 0 at step 0."""
    shadow_every: int = setting(1, ge=0, resume=True, needs="r3")
    """Steps between measurements of the mismatch with and without replay (mismatch/k3_ratio). 0:
    never."""
    shadow_frac: float = setting(0.04, gt=0, le=1, resume=True, needs="r3 replay.shadow_every")
    """Part of a rank's tokens that such a measurement samples, from one micro-batch. It costs one
    forward pass over them: 0.04 costs less than 3 % of the time of training, except for tiny
    models."""
    plausibility: float = setting(
        0.0,
        ge=0,
        le=1,
        why="it is a fraction of the gate score of the weakest live expert",
        fix="0 replays every route as it is",
        needs="replay",
    )
    """Minimum gate score of a replayed expert, as a fraction of that of the weakest live expert. A
    replayed expert below it is replaced by the best live one and counted (routing/replaced_frac).
    0: every route is kept."""
