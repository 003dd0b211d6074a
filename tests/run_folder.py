"""The folder of a run, written by R3's own writers from made-up numbers: no training needed."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from r3 import report
from r3.config import to_yaml
from r3.run import Checkpointer, Copy, RunDir, RunState, step_folders, write_eval, write_text
from r3.tools import TrainedSample, write_rollouts
from r3.types import Message, Prompt, Rollout
from tests.tiny import tiny_config

GROUPS, SAMPLES, LAYERS, EXPERTS, TOP = 3, 4, 4, 8, 2


def rollout(group: int, index: int, *, text: str = "") -> Rollout:
    """A rollout of 6 prompt tokens and 4 + index sampled ones, the same for the same numbers."""
    rng = np.random.default_rng(100 * group + index)
    tokens = 10 + index
    mask = (np.arange(tokens) >= 6).astype(np.float32)
    return Rollout(
        prompt_id=f"rows.jsonl:{group + 1}",
        group=group,
        sample_index=index,
        tokens_T=rng.integers(20, 400, tokens),
        loss_mask_T=mask,
        logprobs_T=(-rng.random(tokens) * mask).astype(np.float32),
        routed_experts=np.argsort(rng.random((tokens - 1, LAYERS, EXPERTS)))[..., :TOP].astype(
            np.int8
        ),
        finish_reason="stop" if index else "length",
        policy_version=0,
        response=text or f"1+{index}={1 + index}\n#### {1 + index}",
        # The prompts of group 1 were asked with a calculator at hand.
        messages=conversation(index) if group == 1 and not text else (),
        turn_rewards=(None, float(index)) if group == 1 and not text else (),
    )


def conversation(index: int) -> tuple[Message, ...]:
    """Question, a structured tool call, its result, the answer."""
    call = {"function": {"name": "calc", "arguments": f'{{"expression": "1+{index}"}}'}}
    return (
        {"role": "user", "content": "Question 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(1 + index)},
        {"role": "assistant", "content": f"1+{index}={1 + index}\n#### {1 + index}"},
    )


def prompts() -> dict[str, Prompt]:
    """The prompts of the groups, by id."""
    made = [
        Prompt(
            id=f"rows.jsonl:{group + 1}",
            messages=({"role": "user", "content": f"Question {group}?"},),
            tokens_T=(1, 2, 3, 4, 5, 6),
            answer=f"#### {group}",
        )
        for group in range(GROUPS)
    ]
    return {prompt.id: prompt for prompt in made}


def write_run(path: Path, *, steps: int = 3, replay: str = "r3", text: str = "") -> Path:
    """Write a run of `steps` steps: all metric rows, dumps of the first and the last step.

    In each group only the last sample is right; `text` replaces every response.
    """
    run_dir = RunDir(path)
    write_text(
        run_dir.config, to_yaml(tiny_config(replay={"mode": replay}, log={"dir": str(path)}))
    )
    for step in range(steps + 1):
        row = {"step": step, "time/step_s": 1.0 + step}
        row |= {"time/generate_s": 0.25, "time/train_s": 0.5}
        if step:
            row |= {"reward/mean": 0.25 + 0.1 * step, "mismatch/k3": 10.0**-step}
            row |= {"policy/entropy": 1.0 / step, "env/tool_calls": 0.5 * step}
            row |= {"memory/peak_gib": 1.5, "memory/train_gib": 1.5, "memory/generate_gib": 1.0}
        if step and replay == "r3":
            row |= {f"routing/rows_{key}": 150 for key in ("expected", "captured", "replayed")}
            row |= {"routing/rows_last_token": 12, "routing/rows_live": 12}
            row |= {"mismatch/k3_replay": 10.0**-step, "mismatch/k3_live": 2.0 * 10.0**-step}
            row |= {f"routing/load_max_layer/{layer}": 1.5 + layer for layer in range(LAYERS)}
            row |= {f"routing/agreement_layer/{layer}": 1 - 0.01 * layer for layer in range(LAYERS)}
            row["routing/agreement"] = 0.99
        if step in (0, steps):
            row["eval/heldout/accuracy"] = 0.25 + 0.2 * step
        run_dir.append_metrics(row)
    rollouts = [
        rollout(group, index, text=text) for group in range(GROUPS) for index in range(SAMPLES)
    ]
    rewards = [float(each.sample_index == SAMPLES - 1) for each in rollouts]
    scored = [
        TrainedSample(
            rollout=one,
            reward=reward,
            shaped_reward=reward,
            advantage=1.5 if reward else -0.5,
            parts={"gsm8k": reward},
        )
        for one, reward in zip(rollouts, rewards, strict=True)
    ]
    for step in (1, steps):
        write_rollouts(run_dir, step, scored, prompts())
    evaluated = [
        {"place": n, "prompt_id": f"eval.jsonl:{n + 1}", "sample": 0, "response": f"#### {n}"}
        | {"reference": "#### 1", "messages": [{"role": "assistant", "content": f"#### {n}"}]}
        | {"reward": float(n == 1), "rewards": {"gsm8k": float(n == 1)}}
        | {"finish_reason": "stop", "response_tokens": 4}
        for n in range(3)
    ]
    for step in (0, steps):
        write_eval(run_dir, step, "heldout", evaluated)
    return path


def save_scores(run: Path, row: int, layers: int | slice = slice(None)) -> None:
    """As `r3.rescore --save` writes them: all differences 0.5, other experts in a row of step 1."""
    arrays = load_file(RunDir(run).rollouts(1).with_suffix(".safetensors"))
    live = arrays["routed_experts"].copy()
    live[row, layers] = (live[row, layers] + 1) % EXPERTS
    shifted = arrays["logprobs"] + np.float32(0.5) * (arrays["loss_mask"] > 0)
    save_file({"logprobs_replay": shifted, "routes_live": live}, RunDir(run).scores(1))


def report_page(*words: object) -> str:
    """The page of `r3.report`, without Plotly. The first word is the folder of a run."""
    page = Path(str(words[0]), "report.html")
    report.main([*map(str, words), "-o", str(page)])
    return page.read_text(encoding="utf-8").replace(report.plotly_source(), "")


def report_data(*words: object) -> dict[str, Any]:
    """What the page of `r3.report` holds."""
    holder = r'<script type="application/json" id="data">(.*?)</script>'
    found = re.search(holder, report_page(*words), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def publish(
    folder: Path,
    step: int,
    *,
    keep: int = 0,
    values: Mapping[int, float] = MappingProxyType({}),
    state: RunState | None = None,
) -> list[str]:
    """Complete a checkpoint that holds no tensors; returns the steps that are in the folder."""
    (folder / f".step_{step:06d}.partial").mkdir(parents=True, exist_ok=True)
    copy = Copy(
        step=step, shards={}, files={}, private={}, facts={"step": step}, values=values, started=0.0
    )
    Checkpointer(folder, keep=keep, state=state).publish(copy, [])
    return [str(step) for step, _ in step_folders(folder)]
