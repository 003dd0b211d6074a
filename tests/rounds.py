"""Rounds of episodes without an engine: the test says what the model answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from r3.config import EnvConfig, RewardConfig
from r3.data import Renderer
from r3.engine import CaptureSpec, Sampled, Sampling, Turn
from r3.envs import MessageReader, Resident, Workflows, built_in, message_parser
from r3.models.shape import ModelShape
from r3.rewards.scorer import Scorer, make_scorer
from r3.rollout import ConversationRules, ConversationSetup, Round, RoundResult
from r3.types import Prompt
from tests.tiny import tiny_config, tokenizer_with

LIMIT_S = 300.0
MAX_MODEL_LEN = 500


def numbered(number: int) -> Prompt:
    """The prompt of a row with this number, which is its answer too."""
    messages = ({"role": "user", "content": f"{number}+1?"},)
    return Prompt(id=f"rows:{number}", messages=messages, tokens_T=(3, 4, 5), answer=str(number))


def env_of(options: dict[str, Any], **more: Any) -> EnvConfig:
    """Take the settings of an environment out of options. What stays are those of `play_round`."""
    names = EnvConfig.__dataclass_fields__.keys() & options.keys()
    return EnvConfig(**more, **{name: options.pop(name) for name in names})


def play_round(
    environments: Workflows | ConversationSetup,
    tokenizer: Any,
    prompts: Mapping[int, Prompt],
    *,
    says: Callable[[Turn], str] = lambda turn: "hello",
    samples: int = 1,
    max_response_tokens: int = 400,
    scorer: Scorer | None = None,
    keep_failed: bool = False,
    engine_s: float = 0.0,
    token_budget: int = 0,
    resumed: Sequence[Any] = (),
) -> tuple[RoundResult, list[Turn]]:
    """Play one round; return its rollouts and what the engine was asked for.

    Args:
        says: what the model answers to a turn.
        engine_s: seconds that the engine takes for all turns that come at once.
    """
    setup = environments
    if isinstance(setup, Workflows):
        given = setup.settings
        has_parser = given.tool_parser or given.reasoning_parser
        setup = ConversationSetup(
            environments=setup,
            tokenizer=tokenizer,
            renderer=Renderer(tokenizer, {}),
            parser=message_parser(given, tokenizer, {}) if has_parser else MessageReader(built_in),
        )
    scorer = scorer or make_scorer(RewardConfig(function=("none",)))
    rules = ConversationRules(
        setup=setup,
        sampling=Sampling(stop=setup.environments.stop, stop_tokens=setup.renderer.ends),
        capture=CaptureSpec(
            policy_version=0,
            captures=False,
            on_missing="error",
            shape=ModelShape.read(tiny_config().model.path),
        ),
        run_seed=0,
        max_response_tokens=max_response_tokens,
        max_model_len=MAX_MODEL_LEN,
        token_budget=token_budget,
        keep_failed=keep_failed,
        needs_reward=scorer.uses_environment,
    )
    kind = setup.rounds or Round
    round_ = kind(rules, scorer, prompts, seed_step=1, samples_per_prompt=samples, resumed=resumed)
    remaining, until, asked = round_.size, time.monotonic() + LIMIT_S, []
    end = tokenizer.eos_token_id
    try:
        while remaining:
            assert time.monotonic() < until
            turns, finished = round_.advance(engine_busy=False)
            remaining -= finished
            asked += turns
            if turns:
                time.sleep(engine_s)
            for turn in turns:
                tokens = tokenizer(says(turn), add_special_tokens=False)["input_ids"]
                tokens = [*tokens, end][: turn.max_tokens]
                round_.receive_sample(
                    Sampled(
                        key=turn.key,
                        tokens_T=tokens,
                        logprobs_T=[-0.25 * (1 + index) for index in range(len(tokens))],
                        routed_experts=None,
                        first_row=turn.first_row,
                        finish_reason="stop" if tokens[-1] == end else "length",
                    )
                )
        return round_.result(), asked
    finally:
        setup.environments.close()
        scorer.close()


def play_command(
    command: str,
    rows: Sequence[Mapping[str, Any]],
    says: Callable[[str], str],
    *args: str,
    kind: Any = Resident,
    **settings: Any,
) -> tuple[RoundResult, list[Turn]]:
    """Play episodes of an agent in a process of its own, one for each row.

    Args:
        rows: columns of each.
        says: what the model answers to a text.
        args, settings: of the agent, and of `EnvConfig`.
        kind: how its processes live.
    """
    env = EnvConfig(command=command, args=args, **{"timeout_s": 300.0, **settings})
    tokenizer = tokenizer_with()
    prompts = {index: replace(numbered(index), metadata=row) for index, row in enumerate(rows)}

    def answers(turn: Turn) -> str:
        return says(tokenizer.decode(turn.tokens_T))

    return play_round(Workflows(env, kind), tokenizer, prompts, says=answers)
