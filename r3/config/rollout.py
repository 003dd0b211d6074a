"""Settings of what is sampled: rows, environment, responses, rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

from r3.config.arguments import reward_names
from r3.config.fields import ALWAYS, LONGEST_S, TEMPERATURES, setting

# A name, an IPv4 address, or an IPv6 address in brackets as URLs have it.
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?)"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training prompts."""

    path: tuple[str, ...] = setting((), path=True, needs="training")
    """One or several sources of rows: a JSONL, JSON, CSV or .parquet file, a pattern such as
    part-*.jsonl, FOLDER[:SPLIT], hub:OWNER/NAME[@REVISION][:CONFIG][:SPLIT], or
    gym:TASK[,size=N][,seed=N] of reasoning-gym. SOURCE[:100] takes the first 100 rows."""
    weights: tuple[float, ...] = setting(
        (), gt=0, fix="leave out the path that should not be sampled", needs="training sources"
    )
    """Sampling weights of the paths, one per path. Empty: rows of all paths form one pool."""
    env: tuple[str, ...] = setting((), path=True, needs="rollouts")
    """Environments of the paths, one per path: as in env.name or env.path, or empty for the one
    that env names, with env.args. The other settings of env hold for all. Empty: one for all."""
    curriculum: tuple[float, ...] = setting(
        (),
        ge=0,
        le=1,
        fix="0 1 holds back rows that are always wrong or always right",
        needs="rollouts",
    )
    """Two pass rates, LOW HIGH. A row is passed over for a while after at most LOW or at least HIGH
    of its responses were right. Empty: no curriculum."""
    curriculum_rest: int = setting(4, ge=1, needs="data.curriculum")
    """Epochs for which data.curriculum passes a row over before it is sampled again."""
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
    template_kwargs: tuple[str, ...] = setting(
        (),
        arguments=True,
        pattern=r"(?s)(?!(tools|tokenize|add_generation_prompt|return_dict|conversation)=)[A-Za-z_]\w*=.*",
        words="key=value, for a key that the chat template reads",
    )
    """Further variables of the chat template, each key=value (enable_thinking=false), or a
    mapping."""
    allow_control_tokens: bool = False
    """Read control tokens of the chat template in rows as such, for rows that hold templated text.
    By default `<|im_end|>` in a row is text."""
    continue_final_message: bool = False
    """Let the policy continue an assistant message that ends a row, as the beginning of its
    response. By default such rows are refused. Only for single_turn."""
    max_prompt_tokens: int = setting(0, ge=0)
    """Maximum tokens per prompt. 0: what rollout.max_response_tokens leaves free in the context and
    in a micro-batch."""
    on_too_long: Literal["error", "drop"] = setting("error", needs="training")
    """What to do with a longer prompt. error: stop the run. drop: leave it out and count it. A
    held-out question that is too long always stops the run."""
    drop_duplicates: bool = setting(False, needs="training")
    """Drop and count rows that equal an earlier row in conversation, answer and every column that
    a reward may read; functions of your own may read all."""

    @property
    def num_sources(self) -> int:
        """Number of sources of training rows."""
        return len(self.path)

    @property
    def is_followed(self) -> bool:
        """Whether the pass rates of rows or sources are followed (`r3.mixture`)."""
        return self.num_sources > 1 or bool(self.curriculum)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment: what happens in a conversation."""

    name: Literal["single_turn", "calculator", "guess_number"] = setting(
        "single_turn", needs=ALWAYS
    )
    """Built-in environment. single_turn: one question, one response. calculator: the same with a
    calculator tool. guess_number: a game of several turns."""
    path: str = setting("", path=True, needs=ALWAYS)
    """Your own environment instead of a built-in one, `path/to/file.py:Class`: a class with reset
    and step (r3/envs/__init__.py), or a workflow, which has run and calls the model itself
    (docs/workflows.md)."""
    command: str = ""
    """An agent in another process that calls the model by OpenAI's API (docs/endpoint.md). With
    `PYTHON agent.py:Class`, one process per engine runs all episodes. Any other command runs once
    per episode and writes its reward to R3_RESULT_FILE. No shell runs it."""
    listen: str = setting(
        "127.0.0.1",
        pattern=rf"{_HOST}(:\d{{1,5}})?",
        words="an address of this machine, with or without :PORT",
        fix="127.0.0.1 for agents on this machine, 0.0.0.0 for others",
        resume=True,
        needs="sampling turns",
    )
    """Address where the endpoint of agents listens. 0.0.0.0: all of this machine, for agents in
    containers and on other machines. With :PORT, LOCAL_RANK is added to it; without, any free
    port."""
    advertise: str = setting(
        "",
        pattern=rf"(?:{_HOST})?",
        words="a host name or an address, without port",
        fix="the name by which agents reach this machine, such as host.docker.internal",
        resume=True,
        needs="sampling turns",
    )
    """Host in the URL that agents are given. Empty: that of env.listen, or this machine's name if
    that is 0.0.0.0."""
    args: tuple[str, ...] = setting(
        (), arguments=True, pattern=r"(?s)[A-Za-z_]\w*=.*", words="key=value"
    )
    """Keyword arguments of your class, each key=value, or a mapping. Values are JSON or Python
    literals, else text."""
    max_turns: int = setting(8, ge=1, needs="sampling turns")
    """Maximum model messages per conversation; of a workflow, calls of the model per episode."""
    max_turn_tokens: int = setting(0, ge=0)
    """Maximum tokens per model message. 0: what is left of rollout.max_response_tokens, which
    counts observations too."""
    stop: tuple[str, ...] = setting(
        (),
        pattern="(?s).+",
        words="a text that is not empty",
        why="an empty string ends every message at once",
        fix="leave it out",
    )
    """Strings that end a model message. They stay in the message."""
    tool_parser: str = setting("", needs="sampling turns")
    """Parser of tool calls by its name in vLLM, such as qwen3_coder or llama3_json. Empty: calls as
    Hermes and Qwen templates have them, `<tool_call>` with JSON inside."""
    reasoning_parser: str = setting("", needs="sampling turns")
    """Parser of reasoning by its name in vLLM, such as qwen3 or deepseek_r1: what the model thinks
    is shown apart from its message. Empty: it stays in the message."""
    keep_reasoning: bool = setting(False, needs="sampling turns messages")
    """Keep `<think>` blocks of earlier messages in a conversation although the chat template
    removes them: the model then sees prompts that no server of the template shows. false: such a
    template is refused. Not for workflows, where each such call begins a token sequence."""
    workers: int = setting(0, ge=0, resume=True, needs="sampling turns")
    """Worker processes per rank, for an environment that computes. 0: threads, for an environment
    that waits. With env.command: maximum episodes at once per engine; 0 is no maximum."""
    timeout_s: float = setting(
        60.0,
        gt=0,
        le=LONGEST_S,
        fix="60, or the time of the slowest call",
        resume=True,
        needs="sampling turns waits",
    )
    """Maximum seconds per call of the environment. A worker process that takes longer is killed and
    replaced. For a workflow: seconds per episode, without its calls of the model."""
    retries: int = setting(0, ge=0, resume=True, needs="sampling turns")
    """Retries after an exception, a time-out or a worker crash."""
    on_error: Literal["stop", "zero", "drop"] = setting("stop", needs="sampling turns")
    """After the last retry. stop: end the run. zero: end the conversation with reward 0, or leave
    it out if it has no message of the model. drop: leave the conversation out. Evaluation treats
    drop as zero."""
    unfinished_reward: float = setting(0.0, needs="sampling turns")
    """Reward of a conversation that ran out of turns or tokens before its environment gave any
    reward."""

    def named(self, env: str, args: tuple[str, ...] = ()) -> EnvConfig:
        """These settings with another environment, which gets only `args`.

        Args:
            env: a built-in one, or file.py:Class.

        Raises:
            ValueError: it is neither.
        """
        names = get_args(get_type_hints(EnvConfig)["name"])
        if ":" not in env and env not in names:
            raise ValueError(f"use one of {', '.join(names)}, or path/to/my_env.py:MyEnv")
        own = (env, "", ()) if env in names else (EnvConfig().name, env, args)
        other: dict[str, Any] = dict(zip(("name", "path", "args"), own, strict=True))
        return replace(self, command="", **other)

    @property
    def is_built_in(self) -> bool:
        """Whether `name` counts: there is neither a class nor a command of the user."""
        return not self.path and not self.command

    @property
    def is_one_turn(self) -> bool:
        """Whether a conversation is the prompt and one response."""
        return self.is_built_in and self.name == "single_turn"

    @property
    def may_reward(self) -> bool:
        """Whether the environment may give rewards itself, so that no function is asked."""
        return not self.is_built_in or self.name not in ("single_turn", "calculator")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    prompts_per_step: int = setting(16, ge=1, needs="training")
    """Prompts per step, over all ranks."""
    group_size: int = setting(8, ge=1, needs="training")
    """Samples per prompt (num_generations)."""
    max_response_tokens: int = setting(512, ge=1, needs="length")
    """Maximum tokens per response, prompt excluded."""
    temperature: float = setting(
        1.0,
        **TEMPERATURES,
        why="at 0 all samples of a prompt are equal",
        fix="1.0",
        needs="training",
    )
    """Sampling temperature. Log-probabilities of engine and policy are both taken at it."""
    top_p: float = setting(
        1.0, gt=0, le=1, fix="1.0, which samples from all tokens", needs="training"
    )
    """Nucleus sampling mass. Below 1 it needs rollout.top_k, which bounds what it keeps."""
    top_k: int = setting(0, ge=0, le=2**31 - 1, needs="training")
    """Sample only from the k most likely tokens. The policy is renormalised over the tokens that
    top_k and top_p keep, which cost 4 bytes each. 0: all tokens."""
    step_token_budget: int = setting(0, ge=0, needs="training")
    """Maximum new tokens per conversation in one step (partial rollouts). A conversation that
    reaches it is suspended. 0: no budget."""
    max_staleness: int = setting(0, ge=0, needs="rollouts rollout.step_token_budget")
    """Maximum steps for which a suspended conversation may be resumed. Its earlier tokens,
    log-probabilities and routes are kept. A group is trained on when all of its conversations are
    complete. 0: suspended conversations are dropped."""

    @property
    def restricts(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, which the policy replays."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def samples_per_step(self) -> int:
        """Responses that a step samples, over all ranks, without further rounds."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How responses are scored: the weighted sum of one or several reward functions."""

    function: tuple[str, ...] = setting(("gsm8k",), path=True, none=True)
    """One or several of: gsm8k; exact; math; gym (reasoning-gym); row (the one that the row's
    column `verifier` names); http (a chat server); self_judge (the policy); model (a reward model);
    env (environment); `path/to/file.py:function`. none: env alone. Without env, functions score
    what the environment did not reward."""
    row_functions: tuple[str, ...] = setting(
        ("gsm8k", "exact", "gym"), path=True, needs="sampling row"
    )
    """row: functions that a row may name: gsm8k, exact, gym, math, http, self_judge,
    model and `path/to/file.py:function`, which rows name `function`."""
    weights: tuple[float, ...] = ()
    """Weights of the functions in the sum, one per function. 0: report the function and leave it
    out of the sum. Empty: all 1."""
    correct: str = setting("", needs="sampling several_rewards")
    """Name of the function that decides whether a response is right, as in metrics: it returns at
    least 1. Accuracy, pass@k and algo.dynamic_sampling count by it. Empty: the first function."""
    args: tuple[str, ...] = setting(
        (),
        arguments=True,
        pattern=r"(?s)(\w+\.)?[A-Za-z_]\w*=.*",
        words="key=value or FUNCTION.key=value",
    )
    """Keyword arguments of the functions of your files, each key=value for all functions that have
    such a parameter, or FUNCTION.key=value for one; also a mapping. Values are JSON or Python
    literals, else text."""
    workers: int = setting(0, ge=0, resume=True, needs="sampling calls processes")
    """Worker processes per rank for functions of your files, if they compute. 0: threads, for
    functions that wait. math always has at least one process."""
    timeout_s: float = setting(
        60.0,
        gt=0,
        le=LONGEST_S,
        fix="60, or the time of the slowest call",
        resume=True,
        needs="sampling calls",
    )
    """Maximum seconds per call. A worker process that takes longer is killed and replaced."""
    retries: int = setting(3, ge=0, resume=True, needs="sampling calls")
    """Retries after an exception, a time-out, or a server that asks to wait. gsm8k, exact and gym
    are not retried."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """After the last retry. stop: end the run. zero: give reward 0. drop: leave the response out.
    Evaluation treats drop as zero."""
    url: str = setting("", resume=True, needs="sampling http")
    """http: base address of an OpenAI-compatible server, such as http://host:8000/v1."""
    model: str = setting("", needs="sampling http")
    """http: name of the model on the server."""
    api_key_env: str = setting("", resume=True, needs="sampling http")
    """http: environment variable that holds the API key. Empty: no key is sent."""
    prompt_file: str = setting("", path=True, needs="sampling judge")
    """http, self_judge: file with the prompt; {question}, {answer} and {response} are filled in.
    Empty: the LLM judge is asked whether the response is right (1) or wrong (0)."""
    pattern: str = setting("", needs="sampling judge")
    """http, self_judge: regular expression whose only group is the score. Empty: "score" of a JSON
    object in the reply."""
    max_tokens: int = setting(512, ge=1, needs="sampling judge")
    """http, self_judge: maximum tokens of a reply."""
    request: tuple[str, ...] = setting(
        (),
        arguments=True,
        pattern=r"(?s)(?!(model|messages|n|stream)=)[A-Za-z_]\w*=.*",
        words="key=value, for a field of a chat completion's request",
        needs="sampling http",
    )
    """http: further fields of the request, each key=value, or instead of temperature=0 and
    max_tokens. A field that is null is not sent: max_tokens=null max_completion_tokens=512."""
    no_verdict: float = setting(0.0, needs="sampling self_judge")
    """self_judge: reward of a response for which the policy gave no score: its reply holds none or
    ran out of tokens, or the prompt had no room."""
    max_connections: int = setting(16, ge=1, resume=True, needs="sampling http")
    """http: maximum requests in flight per rank."""
    backoff_s: float = setting(1.0, ge=0, le=LONGEST_S, resume=True, needs="sampling http")
    """http: seconds before the first retry, doubled before each further one. The server may ask for
    more with Retry-After."""
    model_path: str = setting("", path=True, needs="sampling model")
    """model: a Hugging Face sequence-classification checkpoint with one label, and its tokenizer: a
    folder or hub:OWNER/NAME[@REVISION]."""
    model_dtype: Literal["float32", "bfloat16"] = setting("bfloat16", needs="sampling model")
    """model: data type of its weights and arithmetic."""
    model_ranks: tuple[int, ...] = setting((), resume=True, needs="sampling model")
    """model: ranks that hold a copy. Empty: the first rank of every engine. R3 refuses any other
    list."""
    model_batch: int = setting(16, ge=1, resume=True, needs="sampling model")
    """model: maximum conversations per batch. The last bits of a score depend on the batch; 1 makes
    scores repeatable."""
    model_wait_s: float = setting(0.05, ge=0, le=LONGEST_S, resume=True, needs="sampling model")
    """model: seconds the first conversation of a batch waits for others. 0: do not wait."""
    model_tokens: int = setting(16384, ge=1, resume=True, needs="sampling model")
    """model: maximum padded tokens per batch. A single conversation may have more."""

    @property
    def deciding(self) -> str:
        """Name of the function that decides whether a response is right."""
        return self.correct or reward_names(self.function)[0]
