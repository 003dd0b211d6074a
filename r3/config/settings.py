"""Every setting of a run: frozen dataclasses. The text under a field is its `--help`.

The annotation of a field holds its type, the rule its values obey, how to fix a value that breaks
the rule, and whether a resumed run may change it (`r3/config/rules.py`). A new setting is added in
one place: here. `python tools/make_docs.py` writes docs/configuration.md from it.

A `Config` is data; derived values are properties. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from math import lcm
from typing import Annotated, Any, Literal, get_args, get_type_hints

from r3.config.names import names_of
from r3.config.rules import (
    Above,
    AtLeast,
    Between,
    Fix,
    IsPath,
    KeyValue,
    Matches,
    MayChangeOnResume,
    NoneIsAValue,
    Not,
    ZeroOr,
)

# Those that there is code for. This module imports nothing heavy, so it names them itself.
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSSES = ("ppo_clip", "pg", "gspo", "cispo", "minirl")


def _one_of_or_own(names: tuple[str, ...]) -> Matches:
    """A built-in function by its name, or a function of a user's file."""
    return Matches(
        "|".join([*names, r".+\.py:[A-Za-z_]\w*"]),
        f"one of {', '.join(names)}, or path/to/file.py:function",
    )


# vLLM takes lower temperatures for 0.01, which the policy would not know, and refuses higher ones.
_TEMPERATURES = (0.01, 2.0)
# 11 days: clocks, sockets and collectives take no number of seconds.
_LONGEST_S = 1_000_000


def _learning_rate_decays(config: Config) -> bool:
    """Every learning rate of a decaying schedule depends on the number of steps."""
    return config.train.lr_schedule != "constant"


def _micro_batch_bounds_prompts(config: Config) -> bool:
    """The size of a micro-batch decides which prompts are dropped or where conversations end."""
    several_turns = config.env.name != "single_turn" or not config.env.is_built_in
    return not config.data.max_prompt_tokens and (
        config.data.on_too_long == "drop" or several_turns
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The initial policy."""

    path: Annotated[str, IsPath()] = ""
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors, and a tokenizer with a chat
    template), or hub:OWNER/NAME[@REVISION] for a model of the hub, which a start downloads."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in training. Router scores, softmax and loss are always float32."""
    base: Literal["dtype", "int8", "fp8"] = "dtype"
    """How the device stores the matrices of decoder layers that LoRA leaves frozen. dtype: in
    model.dtype. int8, fp8: one byte per value and a factor per 128 values. A layer is dequantised
    and merged with its adapters when a pass comes to it; the engine gets the same bits."""
    experts: Literal["auto", "fused", "grouped", "sequential"] = "auto"
    """How experts run in training. fused: R3's own dispatch, with a loop that stays in the
    processor's cache on CPU, and grouped products and Triton kernels on CUDA. grouped: Megatron's
    dispatch and grouped products. sequential: Megatron's dispatch and loop. auto: fused if
    parallel.etp is 1, else grouped."""
    recompute: Annotated[Literal["none", "selective", "moe", "full"], MayChangeOnResume()] = "none"
    """Activations recomputed in the backward pass: none; selective: what is cheap to compute
    (norms, the experts' activations, the core of attention); those of the MoE layers; or all.
    Routes are replayed in the recomputation too."""
    fp32_head: bool = False
    """Multiply hidden states and output weight in float32, in policy and engine; bfloat16 rounds
    every logit. Costs a float32 copy of the output weight in the policy's backward pass, which is
    several times slower on CUDA."""
    router_logits: Literal["float32", "engine"] = "float32"
    """Precision of the policy's router logits. float32: as computed. engine: rounded to
    engine.dtype, as vLLM computes them. Replayed routes keep gate weights that differ by this
    rounding."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training prompts."""

    path: Annotated[tuple[str, ...], IsPath()] = ()
    """One or several sources of rows: a JSONL, JSON, CSV or .parquet file, a pattern such as
    part-*.jsonl, FOLDER[:SPLIT], hub:OWNER/NAME[@REVISION][:CONFIG][:SPLIT], or
    gym:TASK[,size=N][,seed=N] of reasoning-gym. SOURCE[:100] takes the first 100 rows."""
    weights: Annotated[
        tuple[float, ...], Above(0), Fix("leave out the path that should not be sampled")
    ] = ()
    """Sampling weights of the paths, one per path. Empty: rows of all paths form one pool."""
    prompt_key: str = "question"
    """Column with the question (text) or the conversation so far (a list of messages). a.b reaches
    into nested objects."""
    answer_key: str = "answer"
    """Column with the reference answer. Empty: rows have none."""
    tools_key: str = ""
    """Column with the tools for the chat template, a list of JSON schemas. Empty: rows have
    none."""
    system_prompt: str = ""
    """System message added in front of every conversation. Empty: none is added."""
    template_kwargs: Annotated[
        tuple[str, ...],
        KeyValue(
            r"(?s)(?!(tools|tokenize|add_generation_prompt|return_dict|conversation)=)[A-Za-z_]\w*=.*",
            "key=value, for a key that the chat template reads",
        ),
    ] = ()
    """Further variables of the chat template, each key=value (enable_thinking=false), or a
    mapping."""
    allow_control_tokens: bool = False
    """Read control tokens of the chat template in rows as such, for rows that hold templated text.
    By default `<|im_end|>` in a row is text."""
    continue_final_message: bool = False
    """Let the policy continue an assistant message that ends a row, as the beginning of its
    response. By default such rows are refused. Only for single_turn."""
    max_prompt_tokens: Annotated[int, AtLeast(0)] = 0
    """Maximum tokens per prompt. 0: what rollout.max_response_tokens leaves free in the context and
    in a micro-batch."""
    on_too_long: Literal["error", "drop"] = "error"
    """What to do with a longer prompt. error: stop the run. drop: leave it out and count it. A
    held-out question that is too long always stops the run."""
    drop_duplicates: bool = False
    """Drop and count rows that equal an earlier row in conversation, answer and every column that
    a reward may read; functions of your own may read all."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment: what happens in a conversation."""

    name: Literal["single_turn", "calculator", "guess_number"] = "single_turn"
    """Built-in environment. single_turn: one question, one response. calculator: the same with a
    calculator tool. guess_number: a game of several turns."""
    path: Annotated[str, IsPath()] = ""
    """Your own environment instead of a built-in one, `path/to/file.py:Class`: a class with reset
    and step (r3/envs/__init__.py), or a workflow, which has run and calls the model itself
    (docs/workflows.md)."""
    command: str = ""
    """A command instead of a class, run once per episode: an agent that calls the model by OpenAI's
    API at OPENAI_BASE_URL and writes its reward to R3_RESULT_FILE (docs/endpoint.md). No shell runs
    it."""
    args: Annotated[tuple[str, ...], KeyValue(r"(?s)[A-Za-z_]\w*=.*", "key=value")] = ()
    """Keyword arguments of your class, each key=value, or a mapping. Values are JSON or Python
    literals, else text."""
    max_turns: Annotated[int, AtLeast(1)] = 8
    """Maximum model messages per conversation; of a workflow, calls of the model per episode."""
    max_turn_tokens: Annotated[int, AtLeast(0)] = 0
    """Maximum tokens per model message. 0: what is left of rollout.max_response_tokens, which
    counts observations too."""
    stop: Annotated[
        tuple[str, ...], Not("", "an empty string ends every message at once"), Fix("leave it out")
    ] = ()
    """Strings that end a model message. They stay in the message."""
    tool_parser: str = ""
    """Parser of tool calls by its name in vLLM, such as qwen3_coder or llama3_json. Empty: calls as
    Hermes and Qwen templates have them, `<tool_call>` with JSON inside."""
    reasoning_parser: str = ""
    """Parser of reasoning by its name in vLLM, such as qwen3 or deepseek_r1: what the model thinks
    is shown apart from its message. Empty: it stays in the message."""
    keep_reasoning: bool = False
    """Keep `<think>` blocks of earlier messages in a conversation although the chat template
    removes them: the model then sees prompts that no server of the template shows. false: such a
    template is refused. Not for workflows, where each such call begins a token sequence."""
    workers: Annotated[int, AtLeast(0), MayChangeOnResume()] = 0
    """Worker processes per rank, for an environment that computes. 0: threads, for an environment
    that waits. With env.command: maximum commands at once per engine; 0 is no maximum."""
    timeout_s: Annotated[
        float,
        Between(0, _LONGEST_S, exclude=(0,)),
        Fix("60, or the time of the slowest call"),
        MayChangeOnResume(),
    ] = 60.0
    """Maximum seconds per call of the environment. A worker process that takes longer is killed and
    replaced. For a workflow: seconds per episode, without its calls of the model."""
    retries: Annotated[int, AtLeast(0), MayChangeOnResume()] = 0
    """Retries after an exception, a time-out or a worker crash."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """After the last retry. stop: end the run. zero: end the conversation with reward 0. drop:
    leave the conversation out. Evaluation treats drop as zero."""
    unfinished_reward: float = 0.0
    """Reward of a conversation that ran out of turns or tokens before its environment gave any
    reward."""

    @property
    def is_built_in(self) -> bool:
        """Whether `name` counts: there is neither a class nor a command of the user."""
        return not self.path and not self.command

    @property
    def may_reward(self) -> bool:
        """Whether the environment may give rewards itself, so that no function is asked."""
        return not self.is_built_in or self.name not in ("single_turn", "calculator")

    @property
    def command_arguments(self) -> dict[str, Any]:
        """What the workflow that runs `command` is created with; nothing without a command."""
        return {"command": self.command} if self.command else {}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    prompts_per_step: Annotated[int, AtLeast(1)] = 16
    """Prompts per step, over all ranks."""
    group_size: Annotated[int, AtLeast(1)] = 8
    """Samples per prompt (num_generations)."""
    max_response_tokens: Annotated[int, AtLeast(1)] = 512
    """Maximum tokens per response, prompt excluded."""
    temperature: Annotated[
        float, Between(*_TEMPERATURES, why="at 0 all samples of a prompt are equal"), Fix("1.0")
    ] = 1.0
    """Sampling temperature. Log-probabilities of engine and policy are both taken at it."""
    top_p: Annotated[
        float, Between(0, 1, exclude=(0,)), Fix("1.0, which samples from all tokens")
    ] = 1.0
    """Nucleus sampling mass. Below 1 the engine samples from fewer tokens than the policy's
    distribution has, which adds to the measured mismatch."""
    top_k: Annotated[int, Between(0, 2**31 - 1)] = 0
    """Sample only from the k most likely tokens. 0: all tokens. It adds to the mismatch as top_p
    does."""
    step_token_budget: Annotated[int, AtLeast(0)] = 0
    """Maximum new tokens per conversation in one step (partial rollouts). A conversation that
    reaches it is suspended. 0: no budget."""
    max_staleness: Annotated[int, AtLeast(0)] = 0
    """Maximum steps for which a suspended conversation may be resumed. Its earlier tokens,
    log-probabilities and routes are kept. A group is trained on when all of its conversations are
    complete. 0: suspended conversations are dropped."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored: the weighted sum of one or several reward functions."""

    function: Annotated[tuple[str, ...], IsPath(), NoneIsAValue()] = ("gsm8k",)
    """One or several of: gsm8k; exact; math; gym (reasoning-gym); row (the one that the row's
    column `verifier` names); http (a chat server); self_judge (the policy); model (a reward model);
    env (environment); `path/to/file.py:function`. none: env alone. Without env, functions score
    what the environment did not reward."""
    row_functions: Annotated[tuple[str, ...], IsPath()] = ("gsm8k", "exact", "gym")
    """row: functions that a row may name: gsm8k, exact, gym, math, http, self_judge,
    model and `path/to/file.py:function`, which rows name `function`."""
    weights: tuple[float, ...] = ()
    """Weights of the functions in the sum, one per function. 0: report the function and leave it
    out of the sum. Empty: all 1."""
    correct: str = ""
    """Name of the function that decides whether a response is right, as in metrics: it returns at
    least 1. Accuracy, pass@k and algo.dynamic_sampling count by it. Empty: the first function."""
    args: Annotated[
        tuple[str, ...], KeyValue(r"(?s)(\w+\.)?[A-Za-z_]\w*=.*", "key=value or FUNCTION.key=value")
    ] = ()
    """Keyword arguments of the functions of your files, each key=value for all functions that have
    such a parameter, or FUNCTION.key=value for one; also a mapping. Values are JSON or Python
    literals, else text."""
    workers: Annotated[int, AtLeast(0), MayChangeOnResume()] = 0
    """Worker processes per rank for functions of your files, if they compute. 0: threads, for
    functions that wait. math always has at least one process."""
    timeout_s: Annotated[
        float,
        Between(0, _LONGEST_S, exclude=(0,)),
        Fix("60, or the time of the slowest call"),
        MayChangeOnResume(),
    ] = 60.0
    """Maximum seconds per call. A worker process that takes longer is killed and replaced."""
    retries: Annotated[int, AtLeast(0), MayChangeOnResume()] = 3
    """Retries after an exception, a time-out, or a server that asks to wait. gsm8k, exact and gym
    are not retried."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """After the last retry. stop: end the run. zero: give reward 0. drop: leave the response out.
    Evaluation treats drop as zero."""
    url: Annotated[str, MayChangeOnResume()] = ""
    """http: base address of an OpenAI-compatible server, such as http://host:8000/v1."""
    model: str = ""
    """http: name of the model on the server."""
    api_key_env: Annotated[str, MayChangeOnResume()] = ""
    """http: environment variable that holds the API key. Empty: no key is sent."""
    prompt_file: Annotated[str, IsPath()] = ""
    """http, self_judge: file with the prompt; {question}, {answer} and {response} are filled in.
    Empty: the LLM judge is asked whether the response is right (1) or wrong (0)."""
    pattern: str = ""
    """http, self_judge: regular expression whose only group is the score. Empty: "score" of a JSON
    object in the reply."""
    max_tokens: Annotated[int, AtLeast(1)] = 512
    """http, self_judge: maximum tokens of a reply."""
    request: Annotated[
        tuple[str, ...],
        KeyValue(
            r"(?s)(?!(model|messages|n|stream)=)[A-Za-z_]\w*=.*",
            "key=value, for a field of a chat completion's request",
        ),
    ] = ()
    """http: further fields of the request, each key=value, or instead of temperature=0 and
    max_tokens. A field that is null is not sent: max_tokens=null max_completion_tokens=512."""
    no_verdict: float = 0.0
    """self_judge: reward of a response for which the policy gave no score: its reply holds none or
    ran out of tokens, or the prompt had no room."""
    max_connections: Annotated[int, AtLeast(1), MayChangeOnResume()] = 16
    """http: maximum requests in flight per rank."""
    backoff_s: Annotated[float, Between(0, _LONGEST_S), MayChangeOnResume()] = 1.0
    """http: seconds before the first retry, doubled before each further one. The server may ask for
    more with Retry-After."""
    model_path: Annotated[str, IsPath()] = ""
    """model: a Hugging Face sequence-classification checkpoint with one label, and its tokenizer: a
    folder or hub:OWNER/NAME[@REVISION]."""
    model_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """model: data type of its weights and arithmetic."""
    model_ranks: Annotated[tuple[int, ...], MayChangeOnResume()] = ()
    """model: ranks that hold a copy. Empty: the first rank of every engine. R3 refuses any other
    list."""
    model_batch: Annotated[int, AtLeast(1), MayChangeOnResume()] = 16
    """model: maximum conversations per batch. The last bits of a score depend on the batch; 1 makes
    scores repeatable."""
    model_wait_s: Annotated[float, Between(0, _LONGEST_S), MayChangeOnResume()] = 0.05
    """model: seconds the first conversation of a batch waits for others. 0: do not wait."""
    model_tokens: Annotated[int, AtLeast(1), MayChangeOnResume()] = 16384
    """model: maximum padded tokens per batch. A single conversation may have more."""

    @property
    def deciding(self) -> str:
        """Name of the function that decides whether a response is right."""
        return self.correct or names_of(self.function)[0]


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Advantage, loss, corrections and KL penalty.

    Formulas and papers are in r3/algo/advantage.py and r3/algo/loss.py. mu is the engine's
    distribution, pi_old the policy with the weights that sampled, pi the policy now, and r is
    pi / pi_old.
    """

    advantage: Annotated[str, IsPath(), _one_of_or_own(ADVANTAGES)] = "grpo"
    """grpo: (R - group mean) / group std. dr_grpo: R - group mean. rloo: R - mean of the group's
    other samples. reinforce_pp: R whitened over the step. reinforce_pp_baseline: R - group mean,
    scaled over the step. Or your own, `path/to/file.py:function`."""
    baseline: Literal["prompt", "step"] = "prompt"
    """What a reward is compared with. prompt: all rewards of its prompt. step: if a workflow
    rewards each call, those of the sequences that have the same index in their episodes (step-wise
    GRPO)."""
    dynamic_sampling: Annotated[int, AtLeast(0)] = 0
    """Maximum additional rounds of prompts per step, until rollout.prompts_per_step groups have
    signal (DAPO). Other groups are not trained on. 0: off."""
    dynamic_sampling_metric: Literal["correct", "reward"] = "correct"
    """Which groups have signal. correct: those in which the function that decides what is right
    (reward.correct) gives different values: in DAPO, neither all responses right nor all wrong.
    reward: those with different rewards, weights and overlong penalty included."""
    overlong_buffer: Annotated[int, AtLeast(0)] = 0
    """Soft overlong penalty (DAPO): the reward falls linearly over this many last tokens before
    rollout.max_response_tokens, which counts observations too. 0: off."""
    overlong_penalty: Annotated[
        float, Above(0), Fix("1.0; algo.overlong_buffer 0 disables the penalty")
    ] = 1.0
    """Penalty of a response of maximum length."""
    overlong_filter: bool = False
    """Leave truncated responses out of the loss. They still count in the baseline of their
    group."""
    loss: Annotated[str, IsPath(), _one_of_or_own(LOSSES)] = "ppo_clip"
    """ppo_clip: minimum of r A and clipped r A. pg: A log pi. gspo: ppo_clip with the mean ratio of
    the response. cispo: clipped r as a constant weight. minirl: clipped pi / mu as a constant
    weight, tokens outside of the clip range masked. Or your own, `path/to/file.py:function`."""
    args: Annotated[
        tuple[str, ...],
        KeyValue(
            r"(?s)((loss|advantage)\.)?[A-Za-z_]\w*=.*",
            "key=value, loss.key=value or advantage.key=value",
        ),
    ] = ()
    """Keyword arguments of your loss and advantage, each key=value for all that have such a
    parameter, or loss.key=value or advantage.key=value; also a mapping. Values are JSON or Python
    literals, else text."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all loss tokens of the batch. sequence: mean over sequences of their token
    means. constant: sum over tokens / (sequences * rollout.max_response_tokens)."""
    clip_low: Annotated[float, Between(0, 1, exclude=(0,)), Fix("0.2 is common")] = 0.2
    """Lower clip range: r is bounded below at 1 - clip_low. gspo: 3e-4. cispo: 1, no lower
    bound."""
    clip_high: Annotated[
        float, Above(0), Fix("0.2 is symmetric, 0.28 is the clip-higher of DAPO")
    ] = 0.28
    """Upper clip range: r is bounded above at 1 + clip_high (clip-higher, arXiv 2503.14476). gspo:
    4e-4. minirl: 0.27. cispo: 3 to 5."""
    clip_dual: Annotated[float, ZeroOr(Above(1)), Fix("0 disables it; 3.0 is common")] = 0.0
    """ppo_clip: upper bound of r where A < 0 (dual clip, arXiv 1912.09729). 0: off."""
    minirl_cap: Annotated[float, AtLeast(1, "without mismatch the weight is 1"), Fix("5.0")] = 5.0
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
    correction_low: Annotated[
        float,
        Between(0, 1, exclude=(1,), why="without mismatch the weight is 1"),
        Fix("0 for the default of algo.correction, or 0.5"),
    ] = 0.0
    """Lower bound of the importance weights. 0: the default of the correction (sequence_mis and
    icepop 0.5, geometric_mask 0.999, token_mis none)."""
    correction_high: Annotated[
        float,
        ZeroOr(AtLeast(1, "without mismatch the weight is 1")),
        Fix("0 for the default of algo.correction, or 2.0"),
    ] = 0.0
    """Upper bound of the importance weights. 0: the default of the correction (tis and mis 2,
    icepop 5, geometric_mask 1.001)."""
    entropy_coef: Annotated[float, AtLeast(0), Fix("0 disables the bonus; 0.001 is common")] = 0.0
    """Weight of the entropy bonus. The entropy of the policy's distribution at rollout.temperature,
    times this, is subtracted from the loss of every token. 0: off."""
    kl_coef: Annotated[float, AtLeast(0), Fix("0 disables the KL penalty")] = 0.0
    """Weight of the KL penalty to the reference policy, which is the initial model. 0: off, and no
    reference weights are kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the penalty is added to the loss of every token. reward: its sum over the response is
    subtracted from the reward before advantages (RLOO, arXiv 2402.14740)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (joschu.net/blog/kl-approx.html). Use k2 or k3 in the loss, k1 in the
    reward."""
    teacher: Annotated[tuple[str, ...], IsPath()] = ()
    """Hugging Face checkpoints with the policy's tokenizer, of any size, as folders or
    hub:OWNER/NAME[@REVISION]: one per path of data.path, or one for all. Their log-probabilities of
    the sampled tokens add to the advantages (on-policy distillation). Empty: none."""
    teacher_coef: Annotated[float, Above(0), Fix("1.0; without algo.teacher there is none")] = 1.0
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

    objective: Literal["rl", "sft", "distill"] = "rl"
    """rl: rewards of sampled responses. sft: supervised fine-tuning on the assistant messages of
    rollout.prompts_per_step rows per step; no engine is built unless eval.path is set. distill:
    sampled responses learn from algo.teacher alone."""
    steps: Annotated[
        int,
        AtLeast(1),
        MayChangeOnResume(
            unless=_learning_rate_decays, exception="unless train.lr_schedule decays"
        ),
    ] = 100
    """Number of steps. A step is one round of generation and its updates."""
    patience: Annotated[int, AtLeast(0), MayChangeOnResume()] = 0
    """Evaluations in a row that are not better than the best by checkpoint.keep_best, after which
    the run ends, as after its last step (early stopping). 0: the run makes all steps."""
    lr: Annotated[float, Above(0), Fix("1e-6 is common for models of billions of parameters")] = (
        1e-6
    )
    """Peak learning rate of AdamW."""
    warmup_updates: Annotated[int, AtLeast(0)] = 0
    """Optimizer updates of linear warm-up from 0."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or a decay to min_lr at the last update."""
    min_lr: Annotated[float, AtLeast(0), Fix("0 decays to zero")] = 0.0
    """Final learning rate of a decaying schedule."""
    weight_decay: Annotated[float, AtLeast(0), Fix("0 disables it")] = 0.0
    """Decoupled weight decay of AdamW, of matrices. Biases and other vectors have none."""
    beta1: Annotated[float, Between(0, 1, exclude=(1,)), Fix("0.9")] = 0.9
    """First-moment decay of AdamW."""
    beta2: Annotated[float, Between(0, 1, exclude=(1,)), Fix("0.95")] = 0.95
    """Second-moment decay of AdamW."""
    clip_grad: Annotated[float, AtLeast(0), Fix("0 disables clipping, 1.0 is common")] = 1.0
    """Maximum global gradient norm. 0: no clipping."""
    optimizer: Annotated[Literal["kept", "resident", "streamed"], MayChangeOnResume()] = "resident"
    """Where AdamW's state is. resident: on the device while the policy trains, in host memory while
    the engine generates. kept: always on the device, where there is room for both. streamed: in
    host memory; every update brings it to the device in parts and takes it back. The updates are
    the same bit for bit."""
    freeze: tuple[str, ...] = ()
    """Patterns over the checkpoint's tensor names (* and ?): parameters that match keep their
    initial values, as in *.mlp.gate.weight, the routers of many models. Memory stays the same."""
    updates_per_step: Annotated[int, AtLeast(1)] = 1
    """Optimizer updates per step and epoch. Each takes an equal share of the rollouts."""
    epochs_per_step: Annotated[int, AtLeast(1)] = 1
    """Times that the rollouts of a step are trained on. Each epoch makes the same updates in the
    same order. Old log-probabilities, advantages and routes are those of the rollouts."""
    micro_batch_tokens: Annotated[
        int,
        AtLeast(1),
        MayChangeOnResume(
            unless=_micro_batch_bounds_prompts,
            exception="unless it bounds prompts, which data.max_prompt_tokens avoids",
        ),
    ] = 16384
    """Packed tokens of one forward and backward pass per rank."""
    logprob_chunk_tokens: Annotated[int, AtLeast(0), MayChangeOnResume()] = 1024
    """Tokens whose logits are in memory at a time, in scoring and in training. 0: those of a whole
    micro-batch, which the backward pass keeps and does not compute again."""
    seed: Annotated[int, Between(0, 2**31 - 1), Fix("any small number")] = 0
    """Seed of data order and sampling: the same seed gives the same run."""

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of a step, over all of its epochs."""
        return self.updates_per_step * self.epochs_per_step

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_of_step


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: W + scale * B A replaces W; A and B are trained (arXiv 2106.09685)."""

    rank: Annotated[int, AtLeast(0), Fix("16; 0 trains all parameters")] = 0
    """Rank of the adapters. The other parameters keep their initial values. 0: no adapters, all
    parameters are trained."""
    alpha: Annotated[float, Above(0), Fix("32")] = 32.0
    """The product B A is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    targets: tuple[Literal["attention", "experts", "shared", "dense", "router", "head"], ...] = (
        "attention",
        "experts",
        "shared",
        "dense",
    )
    """Matrices with adapters, of those that the model has: projections of attention, experts,
    shared experts, MLPs of dense layers, routers, output layer."""
    expert_rank: Annotated[int, AtLeast(0), Fix("0 takes lora.rank")] = 0
    """Rank of the adapters of experts. 0: lora.rank. lora.rank divided by the experts per token
    gives a token as many adapted dimensions as elsewhere."""
    start: Annotated[str, IsPath()] = ""
    """Folder of a PEFT adapter of the same model, ranks and targets to start from; the reference
    policy has it too. Empty: B starts at 0."""
    dropout: Annotated[
        float,
        Between(0, 0, why="the engine samples without it, so probabilities would not match"),
        Fix("0"),
    ] = 0.0
    """Dropout of adapters, which R3 does not have."""

    def rank_of(self, target: str) -> int:
        """Rank of the adapters of a target."""
        return (self.expert_rank if target == "experts" else 0) or self.rank

    def scale(self, rank: int) -> float:
        """What the product of adapters of a rank is multiplied by."""
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How policy and engine are sharded over the ranks. The remaining factor is data parallel."""

    tp: Annotated[int, AtLeast(1)] = 1
    """Tensor parallel size."""
    ep: Annotated[int, AtLeast(1)] = 1
    """Expert parallel size."""
    etp: Annotated[int, AtLeast(0)] = 0
    """Tensor parallel size inside experts. 0: same as tp."""
    pp: Annotated[int, AtLeast(1)] = 1
    """Pipeline parallel size."""
    vpp: Annotated[int, AtLeast(1)] = 1
    """Model chunks per pipeline stage. Above 1 Megatron's interleaved schedule runs, with smaller
    bubbles."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each of the pp * vpp chunks, in the order of the model. Empty: equal sizes, or one
    layer more in the first chunks."""
    cp: Annotated[int, AtLeast(1)] = 1
    """Context parallel size."""
    engine_tp: Annotated[int, AtLeast(1)] = 1
    """Tensor parallel size of the engine."""

    def pieces(self, num_layers: int) -> tuple[range, ...]:
        """Layers of the pp * vpp chunks of the pipeline; chunk i is on stage i % pp.

        Without `pp_layers` the first chunks have one layer more where sizes cannot be equal: the
        last chunk has the output layer.

        Args:
            num_layers: decoder layers of the model.

        Returns:
            One range of layer numbers per chunk, in the order of the model.

        Raises:
            ValueError: `pp_layers` does not fit the model.
        """
        count = self.pp * self.vpp
        least, rest = divmod(num_layers, count)
        sizes = self.pp_layers or tuple(least + (i < rest) for i in range(count))
        if len(sizes) != count or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"{sizes} are not {count} positive numbers that add up to {num_layers} layers"
            )
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def smallest_world(self) -> int:
        """Fewest ranks that these sizes fit on."""
        return max(1, lcm(self.tp * self.cp, (self.etp or self.tp) * self.ep) * self.pp)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The vLLM engine inside every rank."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the engine's weights and arithmetic."""
    kv_cache_gib: Annotated[
        float, Between(0, 100_000), Fix("0 takes what the device has free"), MayChangeOnResume()
    ] = 0.0
    """Size of the KV cache in GiB. 0: what memory_fraction leaves (GPU only)."""
    memory_fraction: Annotated[
        float, Between(0, 1, exclude=(0, 1)), Fix("0.6"), MayChangeOnResume()
    ] = 0.6
    """Fraction of device memory for weights and KV cache when kv_cache_gib is 0 (GPU only)."""
    max_num_seqs: Annotated[int, Between(1, 8192), MayChangeOnResume()] = 256
    """Maximum conversations decoded at the same time."""
    max_model_len: Annotated[int, AtLeast(0)] = 0
    """Maximum tokens per conversation. 0: what prompts and rollout.max_response_tokens need, at
    most the context of the model."""
    sleep_level: Annotated[Literal[1, 2], MayChangeOnResume()] = 2
    """GPU only, while the policy trains. 1: the engine's weights move to host memory. 2: they are
    dropped, and the next weight sync restores them."""
    async_scheduling: Annotated[bool, MayChangeOnResume()] = True
    """Let vLLM prepare the next batch while one runs, where it can. Switch it off to find out
    whether it causes a problem."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Rollout Routing Replay: capture in the engine, replay in the policy."""

    mode: Literal["off", "r2", "r3"] = "r3"
    """r3: replay the engine's routes in every pass of the policy. r2: record routes in the policy's
    old-log-probability pass and replay them in its updates. off: every pass routes for itself."""
    on_missing: Literal["error", "live"] = "error"
    """What to do with a token without a captured route. error: stop the run. live: route it live
    and count it."""
    min_coverage: Annotated[
        float, Between(0, 1), Fix("0.99, or 0 to accept any gap"), MayChangeOnResume()
    ] = 0.99
    """With on_missing live: stop the run when a smaller fraction of a step's tokens has captured
    routes."""
    reference: bool = False
    """Replay routes in the reference policy too. false: its KL to the policy is not 0 at step 0."""
    shadow_every: Annotated[int, AtLeast(0), MayChangeOnResume()] = 1
    """Steps between measurements of the mismatch with and without replay (mismatch/k3_ratio). 0:
    never."""
    shadow_frac: Annotated[float, Between(0, 1, exclude=(0,)), MayChangeOnResume()] = 0.04
    """Part of a rank's tokens that such a measurement samples, from one micro-batch. It costs one
    forward pass over them: 0.04 costs less than 3 % of the time of training, except for tiny
    models."""
    plausibility: Annotated[
        float,
        Between(0, 1, why="it is a fraction of the gate score of the weakest live expert"),
        Fix("0 replays every route as it is"),
    ] = 0.0
    """Minimum gate score of a replayed expert, as a fraction of that of the weakest live expert. A
    replayed expert below it is replaced by the best live one and counted (routing/replaced_frac).
    0: every route is kept."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One held-out set: one value of every list of `EvalConfig`, and its `env_args`."""

    path: str
    name: str
    prompt_key: str
    answer_key: str
    tools_key: str
    system_prompt: str
    env: str
    env_args: tuple[str, ...]
    function: str
    max_prompts: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int

    def environment(self, training: EnvConfig) -> EnvConfig:
        """The environment of this set: that of training, or the class that `env` names.

        Arguments of the training's class are kept and may be replaced; another class gets only
        `env_args`.

        Raises:
            ValueError: `env` is neither a built-in environment nor file.py:Class.
        """
        if not self.env:
            return replace(training, args=(*training.args, *self.env_args))
        if ":" in self.env:
            name, args = EnvConfig().name, self.env_args
            return replace(training, name=name, path=self.env, command="", args=args)
        names = get_args(get_type_hints(EnvConfig)["name"])
        if self.env not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        own: dict[str, Any] = {"name": self.env, "path": "", "command": "", "args": ()}
        return replace(training, **own)

    def data(self, training: DataConfig) -> DataConfig:
        """The columns and the system prompt of this set, in place of those of training."""
        own: dict[str, Any] = {
            name: "" if value == "none" else value
            for name in ("prompt_key", "answer_key", "tools_key", "system_prompt")
            if (value := getattr(self, name))
        }
        return replace(training, **own)


ENVIRONMENTS = ("env.name", "env.path", "env.command")
"""Settings of which one names the environment; `env.args` belong to it."""

EVAL_LISTS = tuple(each.name for each in fields(EvalSet) if each.name != "env_args")
"""Settings of `EvalConfig` that have one value per set."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation with the same engine: before the first step, on schedule, and after the last.

    Lists have one value per set, or one for all sets.
    """

    only: bool = False
    """Evaluate the newest checkpoint of log.dir, or model.path if there is none, then end."""
    path: Annotated[tuple[str, ...], IsPath()] = ()
    """Held-out sets, each one source as in data.path. Empty: no evaluation."""
    name: Annotated[
        tuple[str, ...],
        Matches(r"[A-Za-z0-9_.-]+", "made of letters, digits, '_', '-' and '.' only"),
        Fix("heldout; metrics and files have this name"),
    ] = ("heldout",)
    """Names of the sets in metrics and files."""
    prompt_key: Annotated[tuple[str, ...], NoneIsAValue()] = ()
    """Columns with the question, as in data.prompt_key. Empty: that of training."""
    answer_key: Annotated[tuple[str, ...], NoneIsAValue()] = ()
    """Columns with the reference answer. Empty: that of training. none: rows have none."""
    tools_key: Annotated[tuple[str, ...], NoneIsAValue()] = ()
    """Columns with the tools. Empty: that of training. none: rows have none."""
    system_prompt: Annotated[tuple[str, ...], NoneIsAValue()] = ()
    """System messages of the sets. Empty: that of training. none: none is added."""
    env: Annotated[tuple[str, ...], IsPath()] = ()
    """Environments of the sets, as in env.name or env.path. Empty: that of training."""
    env_args: Annotated[
        tuple[str, ...],
        KeyValue(r"(?s)([A-Za-z0-9_.-]+\.)?[A-Za-z_]\w*=.*", "key=value or SET.key=value"),
    ] = ()
    """Keyword arguments of the environments, each SET.key=value, or key=value for all sets; also a
    mapping. They are added to env.args, or replace one of them. With eval.env they are the only
    ones."""
    function: Annotated[tuple[str, ...], IsPath(), NoneIsAValue()] = ()
    """Reward functions of the sets, as in reward.function. Empty: those of training."""
    every: Annotated[int, AtLeast(0)] = 10
    """Steps between evaluations. 0: only before the first step and after the last."""
    max_prompts: Annotated[tuple[int, ...], AtLeast(0)] = (0,)
    """Evaluate only this many rows of a set, from its beginning. 0: all."""
    samples: Annotated[tuple[int, ...], AtLeast(1)] = (1,)
    """Samples per question. With more than one, avg@k and pass@k are reported too."""
    pass_at: Annotated[tuple[int, ...], AtLeast(1)] = ()
    """Values of k for pass@k, each at most samples; estimated without bias from all samples. Empty:
    k = samples."""
    temperature: Annotated[
        tuple[float, ...],
        ZeroOr(Between(*_TEMPERATURES)),
        Fix("0 for greedy decoding"),
        MayChangeOnResume(),
    ] = (0.0,)
    """Sampling temperature. 0: greedy decoding."""
    top_p: Annotated[
        tuple[float, ...],
        Between(0, 1, exclude=(0,)),
        Fix("1.0, which samples from all tokens"),
    ] = (1.0,)
    """Nucleus sampling mass."""
    max_tokens: Annotated[tuple[int, ...], AtLeast(0)] = (0,)
    """Maximum tokens per response. 0: rollout.max_response_tokens."""

    @property
    def sets(self) -> tuple[EvalSet, ...]:
        """The held-out sets, with every list spread over them."""
        count = len(self.path)
        columns: dict[str, Any] = {
            name: values * count if len(values := getattr(self, name) or ("",)) == 1 else values
            for name in EVAL_LISTS
        }
        columns["env_args"] = [self._env_args_of(name) for name in columns["name"]]
        return tuple(
            EvalSet(**{name: values[i] for name, values in columns.items()}) for i in range(count)
        )

    def _env_args_of(self, name: str) -> tuple[str, ...]:
        """The items of `env_args` for a set, as key=value."""
        named = [(item.partition("=")[0].rpartition("."), item) for item in self.env_args]
        return tuple(
            item.removeprefix(f"{owner}{dot}")
            for (owner, dot, _), item in named
            if owner in ("", name)
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from, and the exported model."""

    every: Annotated[int, AtLeast(-1)] = 0
    """Steps between checkpoints. 0: only after the last step. -1: none, except where a signal stops
    the run or checkpoint.keep_best saves."""
    keep: Annotated[int, AtLeast(0)] = 2
    """Number of newest checkpoints to keep. 0: all."""
    keep_best: Annotated[
        str,
        Matches("|eval/[A-Za-z0-9_.-]+/.+", "a metric of an evaluation"),
        Fix("eval/heldout/accuracy, with the name of your set"),
    ] = ""
    """Metric of the evaluations, such as eval/heldout/accuracy. A checkpoint is saved after each
    evaluation that is better than all before, and the best one is also kept. Empty: none."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of checkpoint.keep_best is the best."""
    background: bool = True
    """Write checkpoints while the next steps are made, from a copy in host memory. A checkpoint is
    complete some time after its step; a run that fails completes it first. false: the run waits."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """If the newest checkpoint is damaged: resume from the newest one that is whole, or stop."""
    export: bool = True
    """Write Hugging Face safetensors after the last step, to LOG_DIR/hf/."""
    export_every: Annotated[int, AtLeast(0)] = 0
    """Steps between such exports during the run, each to a folder of its own. 0: none."""
    allow_changed: tuple[
        Literal[
            "data",
            "tokenizer",
            "template",
            "model",
            "weights",
            "adapter",
            "teacher",
            "reward_model",
        ],
        ...,
    ] = ()
    """What may have changed since the run was started, for this one resume. Empty: a resume is
    refused if rows, tokenizer, chat template or a model folder changed."""

    def exports_after(self, step: int, *, is_last: bool) -> bool:
        """Whether the weights after a step are exported."""
        return (is_last and self.export) or (
            self.export_every > 0 and step % self.export_every == 0
        )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run writes and shows."""

    dir: Annotated[str, IsPath()] = ""
    """Folder of the run. Starting again with the same folder resumes from its newest checkpoint.
    Empty: runs/PRESET, or runs/PRESET-2 and so on if that has a run with other settings."""
    rollouts_every: Annotated[int, AtLeast(0)] = 10
    """Steps between dumps of all rollouts with tokens, log-probabilities and routes; the first step
    is always dumped. 0: never."""
    tensorboard: bool = True
    """Write LOG_DIR/tensorboard."""
    tracker: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    """Experiment tracker that gets settings, metrics and samples too. Its package is
    installed separately. A resumed run continues its run of the tracker."""
    project: Annotated[str, Not("", "a tracker files runs under a project"), Fix("r3")] = "r3"
    """Project of log.tracker; MLflow calls it an experiment."""
    show_every: Annotated[int, AtLeast(0)] = 0
    """Steps between samples shown on the console, one conversation of the first rank with its
    reward. 0: none."""
    progress: bool = True
    """Show progress bars when the console is a terminal."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Settings for finding faults."""

    prove_sync_every: Annotated[int, AtLeast(0)] = 0
    """Steps between checks of the weight sync, which compare every weight of the engine with the
    policy's, then log-probabilities of both on a few tokens. The first sync is always checked. 0:
    no further checks."""
    stall_s: Annotated[float, Between(0, _LONGEST_S)] = 600.0
    """Seconds without progress after which a rank reports its phase and stack. 0: never."""
    kill_after_s: Annotated[float, Between(0, _LONGEST_S)] = 900.0
    """Seconds without progress on any rank after which the ranks end, so that the launcher can
    restart the run; twice as long while it starts, and at least 120 s while it reads data.
    0: never."""
    collective_timeout_s: Annotated[
        float, Between(1, _LONGEST_S), Fix("1800, or the longest wait you expect")
    ] = 1800.0
    """Seconds that a rank waits for other ranks in a collective before the run fails. Raise it for
    very long generations or slow checkpoint disks."""
    profile: Annotated[int, AtLeast(0)] = 0
    """Step of which every rank records all operations under the step's phases: traces/ in the
    folder of the run, to be opened in https://ui.perfetto.dev. 0: none."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms, so that two runs with one seed are bitwise equal. CPU
    runs always are. An operation without such an algorithm warns on CPU and raises an error on
    CUDA."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run: `torchrun --nproc_per_node N train.py BASE --section.field value`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algo: AlgoConfig = AlgoConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    # Neither the layout nor what is written and measured shapes what is learnt.
    parallel: Annotated[ParallelConfig, MayChangeOnResume()] = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    replay: ReplayConfig = ReplayConfig()
    eval: Annotated[EvalConfig, MayChangeOnResume()] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, MayChangeOnResume()] = CheckpointConfig()
    log: Annotated[LogConfig, MayChangeOnResume()] = LogConfig()
    debug: Annotated[DebugConfig, MayChangeOnResume()] = DebugConfig()

    @property
    def uses_engine(self) -> bool:
        """Whether anything is sampled: rollouts or evaluations."""
        return self.train.objective != "sft" or bool(self.eval.path)

    def of_teacher(self, *, is_dense: bool) -> Config:
        """The config that a teacher is built with: settings of the policy's model are left out."""
        own: dict[str, Any] = {"parallel.pp_layers": (), "model.router_logits": "float32"}
        if is_dense:
            own |= {"parallel.ep": 1, "parallel.etp": 0}
        return with_values(self, own)

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Functions of training, evaluation and rows, each once, as they are set."""
        named = (*self.reward.function, *filter(None, self.eval.function))
        rows = self.reward.row_functions if "row" in named else ()
        return tuple(dict.fromkeys((*named, *rows)))

    @property
    def named_rewards(self) -> tuple[tuple[str, str], ...]:
        """Functions of training, evaluation and rows by the names that metrics have."""
        rows = self.reward.row_functions if "row" in self.reward_functions else ()
        named = [zip(names_of(specs), specs, strict=True) for specs in (self.reward.function, rows)]
        alone = [(names_of([spec])[0], spec) for spec in self.eval.function if spec]
        return tuple(dict.fromkeys((*named[0], *named[1], *alone)))

    def longest_sequence(self, context: int) -> int:
        """Maximum tokens of prompt and response together, in a model with this context."""
        longest = min(self.engine.max_model_len or context, context, self.train.micro_batch_tokens)
        return min(
            longest, (self.data.max_prompt_tokens or longest) + self.rollout.max_response_tokens
        )

    def longest_prompt(self, context: int) -> int:
        """Maximum tokens of a prompt: `data.max_prompt_tokens`, or what a full response leaves."""
        return self.longest_sequence(context) - self.rollout.max_response_tokens


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its full name: `{"model.path": ..., "model.dtype": ..., ...}`."""
    return {
        f"{section}.{name}": value
        for section, values in asdict(config).items()
        for name, value in values.items()
    }


def replacing(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values to lay over a config, with the defaults of what they take the place of.

    A layer that names an environment replaces that of the layers below, its arguments included.
    """
    if not any(values.get(name) for name in ENVIRONMENTS):
        return dict(values)
    below, defaults = flatten(config), flatten(Config())
    above = {name: defaults[name] for name in ENVIRONMENTS} | dict(values)
    if all(above[name] == below[name] for name in ENVIRONMENTS):
        return dict(values)  # the same one
    replaced = (*ENVIRONMENTS, "env.args")
    return {name: defaults[name] for name in replaced if below[name] != defaults[name]} | {**values}


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
