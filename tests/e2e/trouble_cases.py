"""Environments that crash, hang or are slow, among others that work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from r3.rollout import EnvironmentFailed
from r3.runtime.device import Device
from tests.errors import message_of
from tests.talkers import Talker, values
from tests.tiny import rewards_of, tiny_config

TROUBLE = '''
import os, time
from pathlib import Path

class Trouble:
    """Two turns; prompt {crash} ends its process, {hang} never returns, {slow} waits for 15."""
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
            while len(Path("{order}").read_text().split()) < 15:
                time.sleep(0.05)
        return [{{"role": "user", "content": "go on"}}], None, False
'''


def trouble(device: Device, *, folder: str, limit_s: float) -> SimpleNamespace:
    """64 conversations of which one crashes, one hangs and one is slow, with every `on_error`.

    Returns:
        Rounds by `on_error`, the prompts with trouble, and the message with `on_error` stop.
        One round, by prompt.
        order: prompts in the order in which their conversations ended.
        ends: prompts whose environment was opened, and those whose environment was closed.
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
    results: dict[str, SimpleNamespace] = {}
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
        collected = talker.collect(**common, **settings)
        rollouts = collected.rollouts
        results[name] = SimpleNamespace(
            tokens={rollout.prompt_id: rollout.tokens_T.tolist() for rollout in rollouts},
            rewards=dict(zip((r.prompt_id for r in rollouts), rewards_of(collected), strict=True)),
            finish_reasons={rollout.prompt_id: rollout.finish_reason for rollout in rollouts},
            metrics=values(collected.metrics),
            order=[f"{name_of_file}:{line}" for line in order.read_text().split()],
            ends=ends(),
        )
    stopping = {"path": f"{file}:Trouble", "timeout_s": limit_s, "on_error": "stop"}
    stop = message_of(lambda: talker.collect(**common, **stopping), EnvironmentFailed)
    return SimpleNamespace(
        crash=prompts[5].id,
        hang=prompts[9].id,
        slow=prompts[11].id,
        rounds=results,
        stop=stop,
        stop_ends=ends(),
    )
