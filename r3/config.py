"""Every setting of a run: frozen dataclasses, the text under a field is its `--help`. Imports nothing heavy.

A `Config` is data. Derived values are properties; `r3.cli.checks.problems(config, world_size)` lists everything that is
wrong at once, each with field, value, rule and fix, before any device is touched. Presets live in `configs/`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from math import lcm
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's starting point."""

    path: str = ""
    """Folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer with a chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in training. Router scores, softmax and loss are float32 in either case."""
    experts: Literal["grouped", "sequential"] = "grouped"
    """How experts run in training: one grouped matrix product (torch's), or Megatron's one after the other."""
    recompute: Literal["none", "moe", "full"] = "none"
    """Activations recomputed in the backward pass: none, the MoE layers', or all. Routes are replayed there too."""
    fp32_head: bool = False
    """Policy and engine multiply hidden states and output weight in float32: bfloat16 would round every logit. The policy
    keeps a float32 copy of its output weight while it does, and on CUDA the product is several times slower."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training prompts."""

    path: tuple[str, ...] = ()
    """Where rows lie, one or several of: a JSONL file, a .parquet file, FOLDER[:SPLIT] of Hugging Face datasets,
    hub:OWNER/NAME[:CONFIG][:SPLIT], gym:TASK[,size=N][,seed=N] of reasoning-gym."""
    weights: tuple[float, ...] = ()
    """Shares of the paths in what is drawn, one a path; empty = rows of all paths are one pool."""
    prompt_key: str = "question"
    """Column with the question (a string) or the chat so far (a list of messages); a.b reaches into nested objects."""
    answer_key: str = "answer"
    """Column with the reference answer; empty = rows have none."""
    tools_key: str = ""
    """Column with the tools that the chat template shows, a list of JSON schemas; empty = rows have none."""
    system_prompt: str = ""
    """Put before every conversation as a system message, when not empty."""
    max_prompt_tokens: int = 0
    """Longest prompt accepted, in tokens; 0 = whatever leaves room for rollout.max_response_tokens in the context
    and in a micro-batch."""
    on_too_long: Literal["error", "drop"] = "error"
    """A prompt longer than that stops the run, or is dropped and counted."""
    drop_duplicates: bool = False
    """Rows with the conversation and the answer of an earlier one are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """What a conversation is."""

    name: Literal["single_turn", "calculator", "guess_number"] = "single_turn"
    """One question and one answer; the same with a calculator at hand; a game."""
    path: str = ""
    """A user's own environment instead, `path/to/file.py:Class`; see r3/envs/__init__.py."""
    max_turns: int = 8
    """Messages of the model in a conversation, at most."""
    max_turn_tokens: int = 0
    """Tokens of one such message; 0 = whatever is left of rollout.max_response_tokens, which counts replies too."""
    stop: tuple[str, ...] = ()
    """Strings that end the model's message; they stay in it."""
    workers: int = 0
    """Processes on every rank for an environment that computes; 0 = threads, for one that waits."""
    timeout_s: float = 60.0
    """Seconds a call of the environment may take; a worker process that takes longer is killed and replaced."""
    retries: int = 0
    """Times a call is repeated that raised, took too long or took its process down."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """When it still fails: stop the run, end the conversation with reward 0, or leave it out. Evaluation never leaves out."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled."""

    prompts_per_step: int = 16
    """Prompts answered in each step, over all ranks."""
    group_size: int = 8
    """Answers per prompt."""
    max_response_tokens: int = 512
    """Tokens an answer may have."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities of the engine and of the policy are both taken at it."""
    top_p: float = 1.0
    """Nucleus mass. Below 1 the policy's probabilities are over a larger support than the engine's: see README."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 = all. Same caveat as top_p."""
    step_token_budget: int = 0
    """Tokens that a conversation may be given in one step; then it is interrupted (partial rollouts); 0 = no end but its own."""
    max_staleness: int = 0
    """Steps that an interrupted conversation may go on for, its earlier tokens, log-probabilities and routes kept; a group
    is trained on when all its conversations are over. 0 = interrupted conversations are dropped."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How answers are judged: the weighted sum of what one or several functions say."""

    function: tuple[str, ...] = ("gsm8k",)
    """One or several of: gsm8k, exact, math (math-verify), gym (reasoning-gym's scorer of the task), row (the one of gsm8k, exact
    and gym that the row's column `verifier` names), http (a chat server), model (a reward model on the ranks),
    `path/to/file.py:function`, plain or async."""
    weights: tuple[float, ...] = ()
    """Weights of the functions in the sum, one a function; empty = all 1."""
    workers: int = 0
    """Processes on every rank for functions of files, for ones that compute; 0 = threads, for ones that wait. math has one
    at least."""
    timeout_s: float = 60.0
    """Seconds a call may take; a worker process that takes longer is killed and replaced."""
    retries: int = 3
    """Times a call is repeated that raised, took too long or was refused for a while. gsm8k, exact and gym are not."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """When it still fails: stop the run, give reward 0, or leave the answer out. Evaluation never leaves out."""
    url: str = ""
    """http: base address of a server that speaks OpenAI's API, e.g. http://host:8000/v1."""
    model: str = ""
    """http: the model's name there."""
    api_key_env: str = ""
    """http: name of the environment variable with the key; empty = none is sent."""
    prompt_file: str = ""
    """http: file with the prompt, in which {question}, {answer} and {response} are filled in; empty = right or wrong, 1 or 0."""
    pattern: str = ""
    """http: regular expression whose one group is the score; empty = "score" of a JSON object in the judge's answer."""
    max_tokens: int = 512
    """http: tokens of the judge's answer."""
    max_connections: int = 16
    """http: requests of a rank in flight."""
    backoff_s: float = 1.0
    """http: wait before the first repetition, twice as long before each further one; Retry-After may ask for more."""
    model_path: str = ""
    """model: folder of a Hugging Face sequence-classification checkpoint with one label, and its tokenizer."""
    model_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """model: type of its weights and arithmetic."""
    model_ranks: tuple[int, ...] = ()
    """model: ranks that hold a copy; empty = the first rank of every engine, which scores its engine's answers. The one
    placement there is: another list is refused."""
    model_batch: int = 16
    """model: conversations scored at once, at most. Scores depend on the batch in their last bits; 1 = not at all."""
    model_wait_s: float = 0.05
    """model: seconds the first conversation of a batch waits for others."""
    model_tokens: int = 16384
    """model: padded tokens of a batch; one conversation may have more."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Advantage, loss and what stands beside them. Formulas, papers and defaults are in r3/algo/advantage.py and r3/algo/loss.py.

    mu is the engine's distribution, pi_old the policy at the rollout's weights, pi the policy now; r = pi / pi_old.
    """

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """grpo: (R - mean) / std of the group; dr_grpo: R - mean; rloo: R - mean of the others; reinforce_pp: whitened over the
    step; reinforce_pp_baseline: R - mean of the group, then scaled over the step."""
    dynamic_sampling: int = 0
    """Rounds of new prompts, at most, until rollout.prompts_per_step groups have answers that differ in reward (DAPO); groups
    without are never trained on; 0 = off."""
    overlong_buffer: int = 0
    """Soft overlong penalty (DAPO): the reward falls linearly over the last so many tokens before
    rollout.max_response_tokens, observations counted as that limit counts them; 0 = off."""
    overlong_penalty: float = 1.0
    """What it takes from the reward of an answer of full length."""
    overlong_filter: bool = False
    """Truncated answers stay in their group's baseline and get no loss."""
    loss: Literal["ppo_clip", "pg", "gspo", "cispo", "minirl"] = "ppo_clip"
    """ppo_clip: min of r A and clipped r A; pg: A log pi; gspo: ppo_clip of the answer's mean ratio; cispo: bounded r as a
    weight; minirl: bounded pi / mu as a weight, stale tokens masked."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all loss tokens of the batch; sequence: mean over sequences of their token means; constant: sum over
    tokens / (sequences * rollout.max_response_tokens)."""
    clip_low: float = 0.2
    """r is bounded below at 1 - clip_low. gspo: 3e-4; cispo: 1, no lower bound."""
    clip_high: float = 0.28
    """r is bounded above at 1 + clip_high (clip-higher, arXiv 2503.14476). gspo: 4e-4; minirl: 0.27; cispo: 3 to 5."""
    clip_dual: float = 0.0
    """ppo_clip: r is also bounded at this where A < 0 (dual clip, arXiv 1912.09729); 0 = off; 3 is common."""
    minirl_cap: float = 5.0
    """minirl: pi / mu is bounded above at this."""
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
    """Against the mismatch w = pi_old / mu. tis: weight min(w, high), of tokens or whole answers; mis and icepop: weight w,
    0 outside of low .. high; geometric_mask: answers whose mean w is outside get no loss; bypass: r = pi / mu, no weight."""
    correction_low: float = 0.0
    """Lower bound of the weights; 0 = the usual one: sequence_mis and icepop 0.5, geometric_mask 0.999, token_mis none."""
    correction_high: float = 0.0
    """Upper bound of the weights; 0 = the usual one: tis and mis 2, icepop 5, geometric_mask 1.001."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the starting model; 0 = off, and no reference weights are kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: added to every token's loss; reward: its sum over the answer, at the rollout's weights, is taken from the reward
    before advantages (RLOO, arXiv 2402.14740)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (joschu.net/blog/kl-approx.html). In the loss k2 or k3, in the reward k1."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer and its schedule."""

    steps: int = 100
    """Steps of the run; a step is one round of generation and its updates."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_updates: int = 0
    """Optimizer updates of linear warm-up from 0."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: constant, or decay to min_lr at the last update."""
    min_lr: float = 0.0
    """Where a decay ends."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    clip_grad: float = 1.0
    """Global gradient norm is clipped to this; 0 = off."""
    updates_per_step: int = 1
    """Optimizer updates made from each round of rollouts."""
    micro_batch_tokens: int = 16384
    """Packed tokens of one forward and backward pass on one rank."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time, in scoring and in both directions of training; 0 = a whole micro-batch's."""
    seed: int = 0
    """Seeds data order and sampling: same seed, same run."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How Megatron and vLLM are laid over the ranks; what is left of the world is data parallel."""

    tp: int = 1
    """Tensor parallel size."""
    ep: int = 1
    """Expert parallel size."""
    etp: int = 0
    """Tensor parallel size inside experts; 0 = same as tp."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Pieces of the model on each pipeline rank; above 1 Megatron's interleaved schedule runs, with smaller bubbles."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each of the pp * vpp pieces, in the model's order; empty = equal, or one more in the first pieces."""
    cp: int = 1
    """Context parallel size."""
    engine_tp: int = 1
    """Tensor parallel size of the engine."""

    def pieces(self, num_layers: int) -> tuple[range, ...]:
        """Layers of the pp * vpp pieces the pipeline is made of, in the model's order; piece i lies on stage i % pp.

        Left to itself, the first pieces hold one layer more where they cannot be equal: the last has the output head.
        Raises ValueError where `pp_layers` does not fit.
        """
        count = self.pp * self.vpp
        least, rest = divmod(num_layers, count)
        sizes = self.pp_layers or tuple(least + (i < rest) for i in range(count))
        if len(sizes) != count or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"{sizes} are no {count} positive numbers that make {num_layers} layers"
            )
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def smallest_world(self) -> int:
        """Fewest ranks that these sizes can be laid over."""
        return max(1, lcm(self.tp * self.cp, (self.etp or self.tp) * self.ep) * self.pp)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The vLLM engine inside every rank."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights and arithmetic."""
    kv_cache_gib: float = 0.0
    """Size of the KV cache in GiB; 0 = what memory_fraction leaves (GPU only)."""
    memory_fraction: float = 0.6
    """Share of the device memory for weights and KV cache when kv_cache_gib is 0 (GPU only)."""
    max_num_seqs: int = 256
    """Conversations decoded at once."""
    max_model_len: int = 0
    """Longest conversation; 0 = what the prompts and max_response_tokens need, at most the model's context."""
    sleep_level: Literal[1, 2] = 2
    """GPU: 1 keeps weights in host memory while the policy trains, 2 drops them (the next sync brings all back)."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Rollout Routing Replay. One switch for capture in the engine and replay in the policy."""

    mode: Literal["off", "r2", "r3"] = "r3"
    """r3: replay the engine's routes in every policy pass. r2: record in the policy's old-logprob pass, replay in its
    updates. off: every pass routes for itself."""
    on_missing: Literal["error", "live"] = "error"
    """A token without a captured route stops the run, or is routed live and counted."""
    min_coverage: float = 0.99
    """With on_missing live: the run stops when less than this share of a step's tokens came with routes."""
    reference: bool = False
    """Replay in the reference policy too. Off: its KL to the policy is not 0 at step 0."""
    shadow_every: int = 1
    """Every so many steps one micro-batch of each rank is scored with replayed and with live routes (mismatch/k3_ratio);
    two forward passes over it; 0 = never."""
    plausibility: float = 0.0
    """Above 0: a replayed expert is kept only if its gate score is at least so many times the weakest live expert's, in 0..1;
    else the best live one takes its place, and is counted (routing/replaced_frac). 0 = every route is kept."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One held-out set with what is its own; a line of `EvalConfig`, read from top to bottom."""

    path: str
    name: str
    env: str
    function: str
    max_prompts: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int

    def environment(self, training: EnvConfig) -> EnvConfig:
        """What a conversation of this set is: the training's, but for the environment itself where the set names one."""
        if not self.env:
            return training
        if ":" in self.env:
            return replace(training, name=EnvConfig().name, path=self.env)
        return replace(training, name=parse_value("env.name", self.env), path="")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation with the same engine, before the first step, on schedule and after the last. Lists have one value a set,
    or one for all."""

    only: bool = False
    """Evaluate the newest checkpoint of log.dir, or model.path if there is none, and end."""
    path: tuple[str, ...] = ()
    """Held-out sets, each one path as in data.path, with the same columns; empty = no evaluation."""
    name: tuple[str, ...] = ("heldout",)
    """Names of the sets in metrics and files."""
    env: tuple[str, ...] = ()
    """What a conversation of a set is, as in env.name or env.path; empty = what it is in training."""
    function: tuple[str, ...] = ()
    """What judges a set, as in reward.function; empty = what judges in training."""
    every: int = 10
    """Evaluate every so many steps; 0 = only before the first and after the last."""
    max_prompts: tuple[int, ...] = (0,)
    """Only the first so many rows; 0 = all."""
    samples: tuple[int, ...] = (1,)
    """Answers per question, k; with more than one, avg@k and pass@k are reported too."""
    pass_at: tuple[int, ...] = ()
    """The k of pass@k, each at most samples, estimated without bias from all samples; empty = samples alone."""
    temperature: tuple[float, ...] = (0.0,)
    """Sampling temperature; 0 = greedy."""
    top_p: tuple[float, ...] = (1.0,)
    """Nucleus mass."""
    max_tokens: tuple[int, ...] = (0,)
    """Tokens an answer may have; 0 = rollout.max_response_tokens."""

    @property
    def sets(self) -> tuple[EvalSet, ...]:
        """The sets, every list spread over them."""
        count = len(self.path)
        columns: dict[str, Any] = {
            entry.name: values * count
            if len(values := getattr(self, entry.name) or ("",)) == 1
            else values
            for entry in fields(EvalSet)
        }
        return tuple(
            EvalSet(**{name: values[i] for name, values in columns.items()}) for i in range(count)
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from and exports to use elsewhere."""

    every: int = 0
    """Save every so many steps; 0 = only after the last."""
    keep: int = 2
    """Newest checkpoints kept; 0 = all."""
    export: bool = True
    """Write Hugging Face safetensors after the last step, to LOG_DIR/hf/."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where a run writes and what it shows."""

    dir: str = ""
    """The run's folder. Starting again with the same folder resumes from its newest checkpoint. Empty = runs/PRESET."""
    rollouts_every: int = 10
    """Dump the rollouts of every so many steps (and of the first) with tokens, logprobs and routes; 0 = never."""
    tensorboard: bool = True
    """Write LOG_DIR/tensorboard."""
    progress: bool = True
    """Progress bars when the console is a terminal."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """For finding faults."""

    prove_sync_every: int = 0
    """Compare engine and policy log-probabilities on a few tokens every so many steps; step 0 is always proved."""
    stall_s: float = 600.0
    """Report rank, phase and stack when a rank makes no progress for so many seconds; 0 = never."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms: two runs of one seed are bitwise equal (CPU runs always are). An operation
    that has none warns."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. `torchrun --nproc_per_node N train.py PRESET --section.field value`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def longest_sequence(self, context: int) -> int:
        """Tokens that prompt and response may have together, in a model with this context."""
        longest = min(self.engine.max_model_len or context, context, self.train.micro_batch_tokens)
        return min(
            longest, (self.data.max_prompt_tokens or longest) + self.rollout.max_response_tokens
        )

    def longest_prompt(self, context: int) -> int:
        """Tokens a prompt may have: `data.max_prompt_tokens`, or whatever leaves room for a full response."""
        return self.longest_sequence(context) - self.rollout.max_response_tokens


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: which field, its value, the rule it breaks, how to mend it."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.rule}. Fix: {self.fix}"


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(
            "\n".join([f"config: {count}", *(f"  - {problem}" for problem in problems)])
        )


def _field_types() -> dict[str, Any]:
    return {
        f"{section}.{name}": kind
        for section, cls in get_type_hints(Config).items()
        for name, kind in get_type_hints(cls).items()
    }


FIELD_TYPES = _field_types()
"""Every setting by its full name, "section.field", with its type."""


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its full name: `{"model.path": ..., "model.dtype": ..., ...}`."""
    return {
        f"{section}.{name}": value
        for section, values in asdict(config).items()
        for name, value in values.items()
    }


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with some settings, given by their full names, replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for full_name, value in values.items():
        section, name = full_name.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(
        config,
        **{section: replace(getattr(config, section), **new) for section, new in sections.items()},
    )


def parse_value(name: str, value: object) -> Any:
    """A value for a field, from text or YAML, in the field's type; ValueError says what was expected.

    Text is read as the command line reads it, so YAML's `lr: 1e-4`, which YAML takes for a string, means the number.
    A field with a list takes a list, one value as a list of one, and "" as an empty one.
    """
    return _parse_as(FIELD_TYPES[name], value)


def is_list(name: str) -> bool:
    """Whether a field holds any number of values: a `tuple[X, ...]`, written `--name a b` and, in YAML, as a list."""
    return get_origin(FIELD_TYPES[name]) is tuple


def _parse_as(kind: Any, value: object) -> Any:
    if get_origin(kind) is tuple:
        one = get_args(kind)[0]
        if (
            value == ""
        ):  # as in `--eval.path ''`: the one way to write no value where a value is expected
            return ()
        if not isinstance(value, list | tuple):  # `path: rows.jsonl` is a list of one
            value = (value,)
        return tuple(_parse_as(one, entry) for entry in value)
    if get_origin(kind) is Literal:
        text = "off" if value is False else str(value)  # YAML reads a bare `off` as False
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError(f"must be one of {', '.join(map(str, get_args(kind)))}")
    if kind is bool:
        if str(value).lower() not in ("true", "false"):
            raise ValueError("must be True or False")
        return str(value).lower() == "true"
    accepted, expected = {
        str: ((str,), "text"),
        int: ((int, str), "an integer"),
        float: ((int, float, str), "a number"),
    }[kind]
    if type(value) in accepted:  # not isinstance: True is no number
        with suppress(ValueError):
            return kind(value)
    raise ValueError(f"must be {expected}")


def nearest_fields(name: str) -> str:
    """Advice for a setting that does not exist: the fields it may have meant."""
    section, _, last = name.rpartition(".")
    lasts = dict.fromkeys(field.partition(".")[2] for field in FIELD_TYPES)
    near = difflib.get_close_matches(last, lasts, n=2, cutoff=0.7)
    meant = [field for word in near for field in FIELD_TYPES if field.partition(".")[2] == word]
    meant = [field for field in meant if field.startswith(f"{section}.")] or meant
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    siblings = [field.partition(".")[2] for field in FIELD_TYPES if field.startswith(f"{section}.")]
    return f"{section} has {', '.join(siblings)}" if siblings else "--help lists every field"


def to_yaml(config: Config) -> str:
    """The config as YAML, every field written out; `from_yaml` reads it back equal."""
    return yaml.dump(
        asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120
    )


class _Dumper(yaml.SafeDumper):
    """Lists on the line of their field."""


_Dumper.add_representer(
    tuple,
    lambda dumper, values: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", values, flow_style=True
    ),
)


def from_yaml(text: str) -> Config:
    """The config that `to_yaml` wrote; absent fields keep their defaults.

    Raises:
        ConfigError: with every key that is unknown and every value of the wrong type.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            [Problem("config.yaml", "...", f"is not YAML ({error})", "mend or restore the file")]
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            [
                Problem(
                    "config.yaml", tree, "must map sections to fields", "mend or restore the file"
                )
            ]
        )
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sections = [section.name for section in fields(Config)]
    for section, content in tree.items():
        if section not in sections:
            problems.append(
                Problem(str(section), content, "is no section", f"known are {', '.join(sections)}")
            )
        elif not isinstance(content, dict):
            problems.append(
                Problem(
                    str(section),
                    content,
                    "must map fields to values",
                    f"write {section}: {{field: value}}",
                )
            )
        else:
            for key, value in content.items():
                name = f"{section}.{key}"
                if name not in FIELD_TYPES:
                    problems.append(Problem(name, value, "is no field", nearest_fields(name)))
                    continue
                try:
                    values[name] = parse_value(name, value)
                except ValueError as error:
                    problems.append(Problem(name, value, str(error), "write a value of that type"))
    if problems:
        raise ConfigError(problems)
    return with_values(Config(), values)


RESUME_MAY_CHANGE = (
    "model.recompute",
    "train.steps",
    "train.micro_batch_tokens",
    "train.logprob_chunk_tokens",
    "parallel.",  # checkpoints do not depend on the layout
    "engine.kv_cache_gib",
    "engine.memory_fraction",
    "engine.max_num_seqs",
    "engine.sleep_level",
    "replay.min_coverage",
    "replay.shadow_every",
    "env.workers",
    "env.timeout_s",
    "env.retries",
    "reward.workers",
    "reward.timeout_s",
    "reward.retries",
    "reward.url",  # the same model may have moved
    "reward.api_key_env",
    "reward.max_connections",
    "reward.backoff_s",
    "reward.model_ranks",
    "reward.model_batch",
    "reward.model_wait_s",
    "reward.model_tokens",
    "eval.",
    "checkpoint.",
    "log.",
    "debug.",
)
"""Fields and sections that do not shape what is learnt: only these may differ when a run is resumed."""


def resume_problems(old: Config, new: Config) -> list[Problem]:
    """Settings that differ from those a run was started with and may not: they would make it two runs in one folder.

    With a decaying schedule `train.steps` shapes every learning rate, so then it is frozen too. So is the size of a micro-batch
    where nothing else says how long a prompt may be, and longer ones are dropped or conversations end there.
    """
    may_change = set(RESUME_MAY_CHANGE)
    if old.train.lr_schedule != "constant":
        may_change.remove("train.steps")
    several_turns = old.env.name != "single_turn" or old.env.path != ""
    if not old.data.max_prompt_tokens and (old.data.on_too_long == "drop" or several_turns):
        may_change.remove("train.micro_batch_tokens")
    before = flatten(old)
    return [
        Problem(
            name,
            value,
            f"the run to resume was started with {before[name]!r}, and this may not change",
            "set it back, or start a new run with another --log.dir",
        )
        for name, value in flatten(new).items()
        if value != before[name]
        and not any(
            name == free or (free[-1] == "." and name.startswith(free)) for free in may_change
        )
    ]
