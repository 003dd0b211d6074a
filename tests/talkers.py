"""Conversations with a real engine, and the same tokens in transformers."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3.config import Config
from r3.engine import Sampling
from r3.rewards.scorer import Scorer
from r3.rollout import Collector, ConversationSetup, RoundResult, Task, read_task
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Prompt, Rollout
from tests.engines import engine_from_disk

CHATTY = '''
import random, time

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

class Stops(Chatty):
    stop = ("=", "####")
'''


def require_agreement(found: Any) -> None:
    """Require that engine and transformers agree: both compute in float32.

    A near tie of two experts flips once in ten thousand slots at most, a shift flips most.
    """
    assert found is not None and found.slots > 500 and found.wrong <= found.slots / 5000
    assert found.worst <= 1e-4  # rounding of two float32 stacks leaves some 1e-6


class Talker:
    """An engine with the checkpoint's own weights, and what a round of conversations needs."""

    def __init__(self, device: Device, config: Config) -> None:
        self.config = config
        self.task: Task = read_task(config)
        self.mesh: Mesh = build_mesh(device, config.parallel)
        self.engine = engine_from_disk(config, device, self.task)

    def collector(
        self, setup: ConversationSetup, scorer: Scorer, *, temperature: float = 1.0, **options: Any
    ) -> Collector:
        """A collector with this engine; `options` are further fields of `Collector`."""
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
        scorer: Scorer | None = None,
        **env: Any,
    ) -> RoundResult:
        """Sample one round in an environment with these settings."""
        setup = ConversationSetup.of(
            replace(self.config.env, **env), self.task.tokenizer, self.config.model.path
        )

        def length(rollout: Rollout, prompt: Prompt) -> float:
            return float(len(rollout.response))

        collector = self.collector(
            setup,
            scorer or Scorer.of_function(length),
            samples_per_prompt=samples,
            max_response_tokens=max_tokens,
        )
        try:
            return collector.collect(
                prompts or self.task.prompts.prompts[:8], policy_version=0, seed_step=0
            )
        finally:
            setup.environments.close()


class Yardstick:
    """The model in transformers, float32."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def differences(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Compare the tokens of a rollout but the first with a forward pass.

        Returns:
            Differences of the log-probabilities [T - 1], 0 where a token was not sampled; and
            whether the row before a token has other experts [T - 1, L].
        """
        tokens = torch.from_numpy(rollout.tokens_T)[None]
        output = self.model(tokens, output_router_logits=True)
        logprobs_T = output.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        apart_T = abs(logprobs_T.numpy() - rollout.logprobs_T[1:]) * (rollout.loss_mask_T[1:] > 0)
        given, k = np.sort(rollout.routed_experts, -1), rollout.routed_experts.shape[-1]
        chosen = [scores.topk(k, dim=-1).indices.sort(-1).values for scores in output.router_logits]
        return apart_T, (torch.stack(chosen, 1)[:-1].numpy() != given).any(-1)

    def compare(self, rollouts: Sequence[Rollout]) -> SimpleNamespace:
        """Compare log-probabilities of all sampled tokens, and experts of all rows.

        Returns:
            Engine against transformers.
            worst: largest difference in the log-probability of a sampled token.
            slots: (token, layer) slots.
            wrong: slots with other experts.
        """
        parts = [self.differences(rollout) for rollout in rollouts]
        return SimpleNamespace(
            worst=max(float(apart_T.max()) for apart_T, _ in parts),
            slots=sum(wrong_TL.size for _, wrong_TL in parts),
            wrong=sum(int(wrong_TL.sum()) for _, wrong_TL in parts),
        )


def values(metrics: dict[str, Any]) -> dict[str, float]:
    """Values of metrics that have parts on one rank only; without those that have no value."""
    reduced = {name: type(part).reduce([part]) for name, part in metrics.items()}
    return {name: float(value) for name, value in reduced.items() if value is not None}


# The API without a client: as an agent in another language has it.
WITHOUT_CLIENT = """
import json, os, urllib.request
task = json.load(open(os.environ["R3_TASK_FILE"]))
def chat(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
