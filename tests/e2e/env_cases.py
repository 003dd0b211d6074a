"""Conversations with the real engine, each compared with one forward pass of transformers in
float32 over all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3.config import Config
from r3.engine import Engine, Sampled, Sampling, Transcript
from r3.rewards.scorer import Scorer
from r3.rollout.collect import CollectedRollouts, Collector
from r3.rollout.conversation import ConversationSetup, EnvironmentFailed
from r3.rollout.scored import score_all
from r3.rollout.step import NoSignalError, RolloutSource
from r3.rollout.task import Task, read_task
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Prompt, Rollout, RouteError
from tests.tiny import tiny_config

CHATTY = '''
import random, time

from r3.envs.calculator import Calculator

class Chatty:
    """Three turns; replies depend on the messages, and delays differ in every run."""
    role = "user"
    def reset(self, prompt):
        self.turns, self.rows = 0, int(prompt.id.rpartition(":")[2])
        return prompt.messages
    def step(self, message):
        time.sleep(random.random() * 0.03)
        self.turns += 1
        if self.turns == 3 + self.rows % 2:
            return [], None, True
        length = (len(message["content"]) * 7 + self.rows) % 7
        return [{"role": self.role, "content": "and then " + "3 more " * length}], 0.25, False

class Tool(Chatty):
    role = "tool"
    tools = ({"type": "function", "function": {"name": "calc"}},)

class Calls(Calculator):
    """The model knows no tools, but it writes sums: each sum that it starts is a call."""
    stop = ("=",)
    def step(self, message):
        text = message["content"]
        if text.endswith("="):
            last = text[:-1].split()[-1:]
            text = f"<tool_call>{''.join(last)}</tool_call>"
        return super().step({**message, "content": text})

class Stops(Chatty):
    stop = ("=", "####")
'''

TROUBLE = '''
import os, time
from pathlib import Path

class Trouble:
    """Two turns; prompt {crash} ends its process, {hang} never returns, {slow} waits for 30."""
    def reset(self, prompt):
        self.id, self.turns = prompt.id.rpartition(":")[2], 0
        self.log("opened")
        return prompt.messages
    def close(self):
        self.log("closed")
    def log(self, word):
        with open("{order}_" + word, "a") as file:
            file.write(self.id + "\\n")
    def step(self, message):
        self.turns += 1
        if self.turns == 2:
            with open("{order}", "a") as file:
                file.write(self.id + "\\n")
            return [], 1.0, True
        if self.id == "{crash}":
            os._exit(9)
        if self.id == "{hang}":
            time.sleep(600)
        if self.id == "{slow}":
            while len(Path("{order}").read_text().split()) < 30:
                time.sleep(0.05)
        return [{{"role": "user", "content": "go on"}}], None, False
'''


class Talker:
    """An engine with the checkpoint's own weights, and what a round of answers needs."""

    def __init__(self, device: Device, config: Config) -> None:
        self.config = config
        self.task: Task = read_task(config)
        self.mesh: Mesh = build_mesh(device, config.parallel)
        self.engine = Engine(
            config,
            device,
            self.task.shape,
            self.task.tokenizer,
            max_model_len=config.engine.max_model_len,
            from_disk=True,
        )
        self.engine.wake("weights")
        self.engine.wake("kv_cache")
        self.engine.policy_version, self.engine._stale_cache = (
            0,
            False,
        )  # it was loaded from the files, not pushed to

    def collector(
        self, setup: ConversationSetup, scorer: Scorer, *, temperature: float = 1.0, **options: Any
    ) -> Collector:
        return Collector(
            engine=self.engine,
            mesh=self.mesh,
            setup=setup,
            scorer=scorer,
            sampling=Sampling(temperature=temperature),
            run_seed=0,
            **options,
        )

    def collect(
        self,
        *,
        prompts: Sequence[Prompt] | None = None,
        samples: int = 2,
        max_tokens: int = 120,
        keep_failed: bool = False,
        **env: Any,
    ) -> CollectedRollouts:
        """Hold one round in an environment with these settings."""
        setup = ConversationSetup.of(
            replace(self.config.env, **env), self.task.tokenizer, self.config.model.path
        )

        def length(rollout: Rollout, prompt: Prompt) -> float:
            return float(len(rollout.response))

        collector = self.collector(
            setup,
            Scorer.of_function(length),
            samples_per_prompt=samples,
            max_response_tokens=max_tokens,
            keep_failed=keep_failed,
        )
        try:
            return collector.collect(
                prompts or self.task.prompts.prompts[:8], policy_version=0, seed_step=0
            )
        finally:
            setup.environments.close()


class Yardstick:
    """transformers, float32."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def compare(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Largest difference in the log-probability of a sampled token; slots, and those with other
        experts.
        """
        worst, slots, wrong = 0.0, 0, 0
        for rollout in rollouts:
            tokens = torch.from_numpy(rollout.tokens_T)[None]
            output = self.model(tokens, output_router_logits=True)
            logprobs_T = (
                output.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
            )
            sampled_T = rollout.loss_mask_T[1:] > 0
            worst = max(worst, float(abs(logprobs_T - rollout.logprobs_T[1:])[sampled_T].max()))
            k = rollout.routed_experts.shape[-1]
            for layer, scores in enumerate(output.router_logits):
                chosen = scores.topk(k, dim=-1).indices.sort(-1).values[:-1].numpy()
                given = np.sort(rollout.routed_experts[:, layer], -1)
                slots += len(given)
                wrong += int((chosen != given).any(-1).sum())
        return {"worst": worst, "slots": slots, "wrong": wrong}


def facts(rollout: Rollout, decode: Any) -> dict[str, Any]:
    """What a test wants to know of one rollout."""
    mask = rollout.loss_mask_T
    first = int(mask.argmax())
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1).tolist()
    ends = [*np.flatnonzero(np.diff(mask) == -1).tolist(), len(mask) - 1][: len(starts)]
    return {
        "who": f"{rollout.prompt_id}/{rollout.sample_index}",
        "tokens": rollout.tokens_T.tolist(),
        "rows": len(rollout.routed_experts),
        "turns": len(starts),
        "after": [decode(rollout.tokens_T[first:])],
        "said": [decode(rollout.tokens_T[a : b + 1]) for a, b in zip(starts, ends, strict=True)],
        "finish_reason": rollout.finish_reason,
        "observed_logprobs": float(abs(rollout.logprobs_T[mask == 0]).max()),
        "response": rollout.response,
    }


def numbers(answers: CollectedRollouts) -> dict[str, float]:
    return {name: float(type(part).reduce([part])) for name, part in answers.metrics.items()}


def talks(device: Device, *, folder: str, engine_tp: int = 1) -> dict[str, Any]:
    """Every kind of conversation, with the comparison."""
    file = Path(folder) / f"chatty_{device.rank}_{device.world_size}_{engine_tp}.py"
    file.write_text(CHATTY)
    config = tiny_config(
        parallel={"engine_tp": engine_tp, "tp": engine_tp},
        engine={"max_model_len": 320, "kv_cache_gib": 0.0625},
        rollout={"max_response_tokens": 120},
    )
    talker = Talker(device, config)
    yardstick = Yardstick(config.model.path)
    found: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "chatty": {"path": f"{file}:Chatty"},
        "tool in workers": {"path": f"{file}:Tool", "workers": 1},
        "calls": {"path": f"{file}:Calls", "max_turns": 5},
        "stop strings": {"path": f"{file}:Stops", "stop": ("+",)},
        "cut turns": {"path": f"{file}:Chatty", "max_turn_tokens": 3},
        "little room": {"path": f"{file}:Chatty", "max_tokens": 40},
        "few turns": {"path": f"{file}:Chatty", "max_turns": 2},
        "game": {"name": "guess_number", "max_turn_tokens": 12},
        "calculator": {"name": "calculator"},
    }
    for kind, settings in kinds.items():
        answers = talker.collect(**settings)
        comparison = yardstick.compare(answers.rollouts) if answers.rollouts else {}
        found[kind] = {
            "rollouts": [
                facts(rollout, talker.task.tokenizer.decode) for rollout in answers.rollouts
            ],
            "rewards": answers.rewards,
            "facts": numbers(answers),
            **comparison,
        }
        if kind == "chatty" and answers.rollouts:
            found["guards"] = guards(talker.engine, answers.rollouts)
    return found


def guards(engine: Engine, rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Feed a conversation that was held to a new transcript, with the rows of its second turn as
    they came, and wrong.
    """
    rollout = max(rollouts, key=lambda rollout: len(rollout.tokens_T))
    mask, rows = rollout.loss_mask_T, rollout.routed_experts
    turns = np.flatnonzero(np.diff(mask, prepend=0, append=0))[
        :4
    ].tolist()  # begin and end of two turns
    assert len(turns) == 4, "it has only one turn"
    said: dict[str, str] = {}
    for name, shift, missing in (("right", 0, 0), ("shifted", 1, 0), ("too few", 0, 1)):
        transcript = Transcript(
            engine.capture_spec, rollout.tokens_T[: turns[0]].tolist(), who="the rollout"
        )
        try:
            for start, end in (turns[:2], turns[2:]):
                transcript.observe(rollout.tokens_T[len(transcript.tokens) : start].tolist())
                first = transcript.first_row
                late = shift if first else 0
                transcript.append_sample(
                    Sampled(
                        key=0,
                        tokens_T=rollout.tokens_T[start:end].tolist(),
                        logprobs_T=rollout.logprobs_T[start:end].tolist(),
                        routed_experts=rows[
                            first - late : end - 1 - late - (missing if first else 0)
                        ],
                        first_row=first,
                        finish_reason="stop",
                    )
                )
            same = transcript.tokens == rollout.tokens_T[: turns[3]].tolist()
            said[name] = f"{same} {np.array_equal(transcript.rows(), rows[: turns[3] - 1])}"
        except RouteError as error:
            said[name] = str(error)
    return said


def trouble(device: Device, *, folder: str, limit_s: float) -> dict[str, Any]:
    """64 conversations of which one crashes, one hangs and one is slow, under every policy; and the
    same without trouble.
    """
    config = tiny_config(engine={"max_model_len": 160, "kv_cache_gib": 0.0625})
    talker = Talker(device, config)
    prompts = talker.task.prompts.prompts[:64]
    crash, hang, slow = (prompts[i].id.rpartition(":")[2] for i in (5, 9, 11))
    file = Path(folder) / "trouble.py"
    order = Path(folder) / "order"
    file.write_text(TROUBLE.format(crash=crash, hang=hang, slow=slow, order=order))
    calm = Path(folder) / "calm.py"
    calm.write_text(TROUBLE.format(crash="no", hang="no", slow="no", order=order))
    crashing = Path(folder) / "crashing.py"
    crashing.write_text(TROUBLE.format(crash=crash, hang="no", slow="no", order=order))
    name_of_file = prompts[0].id.rpartition(":")[0]
    found: dict[str, Any] = {"crash": prompts[5].id, "hang": prompts[9].id, "slow": prompts[11].id}
    common: dict[str, Any] = {"workers": 3, "prompts": prompts, "samples": 1, "max_tokens": 60}
    runs: dict[str, dict[str, Any]] = {
        "calm": {"path": f"{calm}:Trouble", "timeout_s": 60.0},
        "drop": {"path": f"{file}:Trouble", "timeout_s": limit_s, "on_error": "drop", "retries": 1},
        "zero": {"path": f"{file}:Trouble", "timeout_s": limit_s, "on_error": "zero"},
        "kept": {"path": f"{crashing}:Trouble", "on_error": "drop", "keep_failed": True},
    }

    def ends() -> list[list[str]]:
        logs = [Path(f"{order}_{word}") for word in ("opened", "closed")]
        lines = [sorted(log.read_text().split()) for log in logs]
        for log in logs:
            log.unlink()
        return lines

    for name, settings in runs.items():
        order.write_text("")
        answers = talker.collect(**common, **settings)
        found[name] = {
            "tokens": {
                rollout.prompt_id: rollout.tokens_T.tolist() for rollout in answers.rollouts
            },
            "rewards": dict(
                zip((r.prompt_id for r in answers.rollouts), answers.rewards, strict=True)
            ),
            "outcomes": {rollout.prompt_id: rollout.finish_reason for rollout in answers.rollouts},
            "facts": numbers(answers),
            "order": [f"{name_of_file}:{line}" for line in order.read_text().split()],
            "ends": ends(),
        }
    try:
        talker.collect(**common, path=f"{file}:Trouble", timeout_s=limit_s, on_error="stop")
        found["stop"] = "nothing was raised"
    except EnvironmentFailed as error:
        found["stop"] = str(error)
    found["stop ends"] = ends()
    return found


def refills(device: Device) -> dict[str, Any]:
    """Steps with dynamic sampling under a judge that tells apart the answers of every third prompt
    only.
    """
    config = tiny_config(
        engine={"max_model_len": 160, "kv_cache_gib": 0.0625},
        rollout={"prompts_per_step": 6, "group_size": 2},
        algo={"dynamic_sampling": 6},
    )
    talker = Talker(device, config)

    def scorer(rollout: Rollout, prompt: Prompt) -> float:
        return float(rollout.sample_index) if int(prompt.id.rpartition(":")[2]) % 3 == 0 else 1.0

    def steps(
        config: Config, scorer: Callable[[Rollout, Prompt], float], *wanted: int
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step in wanted:
            talker.engine.policy_version = step - 1
            task = replace(talker.task, scorer=Scorer.of_function(scorer))
            made = RolloutSource(talker.engine, task, config, talker.mesh).collect(step)
            scored = score_all(made.rollouts, made.rewards, config)
            parts = {name: part for parts in made.metrics for name, part in parts.items()}
            found[str(step)] = {
                "sampled": {
                    " ".join(
                        map(str, (rollout.prompt_id, rollout.group, rollout.sample_index))
                    ): rollout.tokens_T.tolist()
                    for rollout in made.rollouts.rollouts
                },
                "advantages": [item.advantage for item in scored],
                "indices": [item.index for item in scored],
                **{
                    name: float(type(parts[name]).reduce([parts[name]]))
                    for name in parts
                    if "rounds" in name or "groups_" in name
                },
            }
        return found

    found = {"run": steps(config, scorer, 1, 2, 3), "resumed": steps(config, scorer, 3)}
    one = replace(config, algo=replace(config.algo, dynamic_sampling=1))
    found["capped"] = steps(one, scorer, 1)
    found["off"] = steps(replace(config, algo=replace(config.algo, dynamic_sampling=0)), scorer, 1)
    try:
        steps(one, lambda _rollout, _prompt: 1.0, 1)
        found["nothing"] = "nothing was raised"
    except NoSignalError as error:
        found["nothing"] = str(error)
    return found
