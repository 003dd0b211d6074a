"""Episodes of workflows with a real engine, each sequence compared with transformers in float32."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from r3.config import RewardConfig
from r3.data import Renderer
from r3.engine import Sampled, Sampler
from r3.rewards.scorer import make_scorer
from r3.runtime.device import Device
from r3.types import Rollout
from tests.engines import signature
from tests.talkers import CHATTY, WITHOUT_CLIENT, Talker, Yardstick, values
from tests.tiny import rewards_of, tiny_config

WORKFLOWS = '''
import asyncio, base64, hashlib, json, pathlib, random
import httpx
import numpy as np
from r3.envs import serve

def user(text):
    return {"role": "user", "content": text}

class Chatty:
    """The conversation of the environment of that name."""
    async def run(self, task, model):
        rows, messages, rewards = int(task.id.rpartition(":")[2]), list(task.messages), 0.0
        for turn in range(3 + rows % 2):
            message = await model.chat(messages)
            await asyncio.sleep(random.random() * 0.03)
            length = (len(message["content"]) * 7 + rows) % 7
            messages += [message, user("and then " + "3 more " * length)]
        return 1.0

class Unrewarded(Chatty):
    """Leaves the reward to the policy itself."""
    async def run(self, task, model):
        await super().run(task, model)

class Branching:
    """A conversation that splits, forks that run beside each other, a judge, tokens."""
    async def run(self, task, model):
        start = [*task.messages, await model.chat(task.messages, max_tokens=12)]
        both = await asyncio.gather(*(
            model.chat([*start, user(text)], max_tokens=8) for text in ("check", "and then 3 more")
        ))
        async def branch(model, number):
            messages = [user(f"Tom has {number} pens.")]
            for turn in range(2):
                await asyncio.sleep(random.random() * 0.03)
                messages += [await model.chat(messages, max_tokens=9), user("and then 2 more")]
        await asyncio.gather(*(branch(model.fork(), number) for number in (3, 5)))
        judge = await model.chat([user(both[0]["content"])], train=False, temperature=0.0,
                                 max_tokens=4)
        first = await model.complete(task.tokens_T, max_tokens=5)
        await model.complete([*task.tokens_T, *first.tokens, 7, 8], max_tokens=5)
        return float(len(judge["content"]))

class Trouble:
    """Two turns; one episode crashes, one hangs and one is slow, if `trouble` is set."""
    def __init__(self, trouble=0):
        self.trouble = trouble
    async def run(self, task, model):
        message = await model.chat(task.messages, max_tokens=20)
        number = int(task.id.rpartition(":")[2])
        if self.trouble and number == {crash}:
            raise RuntimeError("the agent crashed")
        if self.trouble and number == {hang}:
            await asyncio.sleep(3600)
        if self.trouble and number == {slow}:
            await asyncio.sleep(3)
        await model.chat([*task.messages, message, user("go on")], max_tokens=20)
        return 1.0

class Impatient:
    """Gives up calls: one after a moment, one by returning."""
    async def run(self, task, model):
        try:
            await asyncio.wait_for(model.chat([user("Tom has 2")]), 0.001)
        except asyncio.TimeoutError:
            pass
        await model.chat(task.messages, max_tokens=2)
        self.left = asyncio.create_task(model.chat([user("Tom has 3 pens.")]))
        await asyncio.sleep(0.002)
        return 1.0

class Served:
    """The conversation of Chatty by the endpoint: each row has one of its APIs."""
    def text(self, path, reply):
        if path == "messages":
            said = [{"role": "assistant", "content": reply["content"]}]
            return said, "".join(block["text"] for block in reply["content"])
        if path == "responses":
            return reply["output"], reply["output"][-1]["content"][0]["text"]
        said = reply["choices"][0]["message"]
        return [said], said["content"]
    async def run(self, task, model):
        async with serve(model) as access, httpx.AsyncClient(timeout=300) as client:
            client.headers["x-api-key"] = access.api_key
            self.client, self.url = client, access.base_url.removesuffix("/v1")
            self.access = access
            return await self.talk(task)
    async def talk(self, task):
        rows, said = int(task.id.rpartition(":")[2]), list(task.messages)
        path = ("chat/completions", "messages", "responses")[rows % 3]
        for turn in range(3 + rows % 2):
            body = {"input" if path == "responses" else "messages": said}
            body |= {"max_tokens": 9999} if path == "messages" else {}
            new, text = self.text(path, await self.post(f"/v1/{path}", body))
            await asyncio.sleep(random.random() * 0.03)
            said += [*new, user("and then " + "3 more " * ((len(text) * 7 + rows) % 7))]
        return 1.0
    async def post(self, path, body):
        body = json.dumps({"model": "policy", **body})
        reply = await self.client.post(self.url + path, content=body)
        if self.access.limit:
            raise self.access.limit
        return reply.raise_for_status().json()

class Tokens(Served):
    """Two turns of token ids; writes the routes that came with them into a file."""
    async def talk(self, task):
        ids, rows = list(map(int, task.tokens_T)), []
        for turn in range(2):
            how = {"max_tokens": 9, "routed_experts_prompt_start": len(rows)}
            reply = await self.post("/inference/v1/generate",
                                    {"token_ids": ids, "sampling_params": how})
            (choice,) = reply["choices"]
            routes = choice["routed_experts"]
            assert routes["start"] == len(rows)
            data = np.frombuffer(base64.b64decode(routes["data"]), routes["dtype"])
            rows += [*data.reshape(routes["shape"])]
            said = [*ids, *choice["token_ids"]]
            ids = [*said, 7, 8]
        name = hashlib.md5(str(said).encode()).hexdigest()
        np.save(pathlib.Path(__file__).with_name(f"{name}.npy"), np.array(rows))
        return 1.0

class Turns:
    """Three turns of one conversation."""
    async def run(self, task, model):
        messages = list(task.messages)
        for turn in range(3):
            messages += [await model.chat(messages, max_tokens=12), user("and then 2 more")]
        return [0.0, 0.5, 1.0]
'''

# The conversation of Chatty, by the API without a client.
COMMAND = (
    WITHOUT_CLIENT
    + """
rows, messages = int(task["id"].rpartition(":")[2]), list(task["messages"])
for turn in range(3 + rows % 2):
    message = chat(messages)
    length = (len(message["content"]) * 7 + rows) % 7
    messages += [message, {"role": "user", "content": "and then " + "3 more " * length}]
json.dump(1.0, open(os.environ["R3_RESULT_FILE"], "w"))
"""
)

# As Qwen3 and DeepSeek-R1 do: the model's message begins with its reasoning, which later prompts
# leave out.
REASONING = """
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""


@contextmanager
def slow_steps(seconds: float) -> Iterator[None]:
    """Inside, each step of the engine waits before it begins."""
    step = Sampler.step

    def waiting(sampler: Sampler) -> list[Sampled]:
        time.sleep(seconds)
        return step(sampler)

    with patch.object(Sampler, "step", waiting):
        yield


def _sent(folder: Path, rollout: Rollout) -> int:
    """How many rows of routes a client of a rollout's tokens has, if they are those of it."""
    name = hashlib.md5(str(rollout.tokens_T.tolist()).encode()).hexdigest()
    if not (file := folder / f"{name}.npy").exists():
        return 0
    rows = np.load(file)
    assert rows.shape == rollout.routed_experts.shape and (rows == rollout.routed_experts).all()
    return len(rows)


def episodes(
    device: Device,
    *,
    folder: str,
    engine_tp: int = 1,
    kinds: Sequence[str] = (),
    prompts: int = 8,
) -> dict[str, SimpleNamespace]:
    """Sample kinds of episodes, by kind.

    Args:
        kinds: which; none: all.
        prompts: prompts of a kind, two samples each. The kinds with trouble have four times as
            many, and at least 16, one sample each.

    Returns:
        One round of a workflow.
        names: "PROMPT/SAMPLE/SEQUENCE" of each rollout.
        signatures: tokens, log-probabilities and routes of each rollout.
        turns: the model's messages in each rollout.
        texts: each rollout, decoded.
        routes_sent: rows of routes that a client got and that are those of a rollout.
        agreement: None on ranks that do not lead an engine.
    """
    file = Path(folder) / f"mine_{device.rank}.py"
    config = tiny_config(
        parallel={"engine_tp": engine_tp, "tp": engine_tp},
        engine={"max_model_len": 320, "kv_cache_gib": 0.0625},
        rollout={"max_response_tokens": 120},
    )
    talker = Talker(device, config)
    tokenizer = talker.task.tokenizer
    yardstick = Yardstick(config.model.path)
    many = talker.task.prompts.prompts[: max(4 * prompts, 16)]
    text = CHATTY + WORKFLOWS.replace("class Chatty", "class Talks").replace("(Chatty)", "(Talks)")
    for name, index in (("crash", 5), ("hang", 9), ("slow", 11)):
        text = text.replace("{" + name + "}", many[index].id.rpartition(":")[2])
    file.write_text(text)

    def of(name: str, **settings: Any) -> SimpleNamespace:
        where = {} if "command" in settings else {"path": f"{file}:{name}"}
        collected = talker.collect(max_turns=20, **where, **{"prompts": many[:prompts]} | settings)
        rollouts: list[Rollout] = collected.rollouts
        return SimpleNamespace(
            names=[f"{each.prompt_id}/{each.sample_index}/{each.sequence}" for each in rollouts],
            signatures=signature(rollouts),
            turns=[int((each.loss_mask_T[1:] > each.loss_mask_T[:-1]).sum()) for each in rollouts],
            texts=[tokenizer.decode(each.tokens_T) for each in rollouts],
            rewards=rewards_of(collected),
            metrics=values(collected.metrics),
            routes_sent=sum(_sent(file.parent, each) for each in rollouts),
            agreement=yardstick.compare(rollouts) if rollouts else None,
        )

    alone: dict[str, Any] = {"prompts": many, "samples": 1, "timeout_s": 6.0}
    trouble = alone | {"args": ("trouble=1",)}
    agent = Path(folder) / f"agent_{device.rank}.py"
    agent.write_text(COMMAND)
    (judge := Path(folder) / f"judge_{device.rank}.txt").write_text("{question} {response}")
    judged = RewardConfig(
        function=("self_judge",),
        prompt_file=str(judge),
        pattern=r"(\d+)",
        max_tokens=24,
        no_verdict=-1.0,
    )
    scorer = make_scorer(judged, renderer=Renderer(tokenizer, {}))
    rounds: dict[str, Callable[[], SimpleNamespace]] = {
        "environment": lambda: of("Chatty"),
        "talks": lambda: of("Talks"),
        "branching": lambda: of("Branching"),
        "command": lambda: of("", command=f"{sys.executable} -S {agent}"),
        "calm": lambda: of("Trouble", **alone),
        "drop": lambda: of("Trouble", on_error="drop", **trouble),
        "zero": lambda: of("Trouble", on_error="zero", **trouble),
        "judged": lambda: of("Unrewarded", scorer=scorer),
        "impatient": lambda: of("Impatient"),
        "served": lambda: of("Served"),
        "tokens": lambda: of("Tokens"),
    }
    found = {}
    for kind, sample in rounds.items():
        if not kinds or kind in kinds:
            # A call of the impatient ones is not answered before it is given up, and the round
            # after them needs an engine without requests.
            with slow_steps(0.05) if kind == "impatient" else nullcontext():
                found[kind] = sample()
    tokenizer.chat_template = REASONING
    if not kinds or "reasoning" in kinds:
        found["reasoning"] = of("Turns")
    return found
