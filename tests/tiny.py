"""Small real parts for tests: a config, a random checkpoint, random rollouts. Nothing here is a
stand-in.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3 import assets
from r3.algo.loss import LossInputs, Sequences
from r3.config import (
    AlgoConfig,
    Config,
    DataConfig,
    EngineConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from r3.data import Dataset, prompts_from
from r3.models.shape import ModelShape
from r3.runtime.mesh import Axis
from r3.types import Prompt, Rollout

FEW_ROWS = f"{assets.WORD_PROBLEMS_TRAIN}[:512]"
"""An eighth of the shipped rows: each process of a run reads and tokenises them."""


ALONE = Axis(name="world", group=None, rank=0, size=1)
"""The world of a process that is the only rank."""


def edit_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tiny_config(path: str | Path = "", /, **sections: dict[str, Any]) -> Config:
    """A float32 config of the shipped model (or another one); `sections` override fields, e.g.
    `parallel={"ep": 2}`.
    """
    config = Config(
        model=ModelConfig(path=str(path or assets.TINY_MOE), dtype="float32"),
        data=DataConfig(path=(FEW_ROWS,)),
        rollout=RolloutConfig(prompts_per_step=4, group_size=4, max_response_tokens=24),
        algo=AlgoConfig(),
        train=TrainConfig(steps=2, lr=1e-3, micro_batch_tokens=512),
        parallel=ParallelConfig(),
        engine=EngineConfig(dtype="float32", kv_cache_gib=0.03125, max_num_seqs=64),
        eval=EvalConfig(path=(str(assets.WORD_PROBLEMS_EVAL),), max_prompts=(8,)),
        log=LogConfig(tensorboard=False, progress=False),
    )
    for section, fields in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **fields)})
    return config


def embedded(folder: Path, **keys: Any) -> Path:
    """A copy of the embedded model with other keys in config.json."""
    shutil.copytree(assets.TINY_MOE, folder)
    if keys:
        edit_json(folder / "config.json", **keys)
    return folder


# A base model: the three files end texts with another token than the chat template ends messages.
BASE: dict[str, Any] = {"eos_token": "<|endoftext|>", "config": 0, "generation_config": 0}


def tokenizer_folder(folder: Path, *, eos_token: str = "<|im_end|>", **ends: Any) -> Path:
    """Tokenizer and settings of the embedded model with other end tokens; None leaves a key out."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(assets.TINY_MOE / name, folder)
    for name in ("config", "generation_config"):
        settings = json.loads((assets.TINY_MOE / f"{name}.json").read_text())
        settings["eos_token_id"] = ends.get(name, settings["eos_token_id"])
        (folder / f"{name}.json").write_text(json.dumps(settings))
    edit_json(folder / "tokenizer_config.json", eos_token=eos_token)
    return folder


def tokenizer_with(template: str = "", folder: Path = assets.TINY_MOE, **options: Any) -> Any:
    """The tokenizer of the embedded model, or of a folder, with another chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def base_model(folder: Path) -> Path:
    """The embedded model as a base model."""
    return tokenizer_folder(embedded(folder), **BASE)


def random_rollouts(
    shape: ModelShape, lengths: Sequence[int], *, group_size: int = 2, seed: int = 0
) -> list[Rollout]:
    """Rollouts with random tokens, log-probabilities and distinct random routes."""
    rng = np.random.default_rng(seed)
    rollouts = []
    layers = len(shape.moe_layers)
    for index, length in enumerate(lengths):
        prompt = max(1, length // 3)
        mask = np.zeros(length, dtype=np.float32)
        mask[prompt:] = 1
        routes = np.argsort(rng.random((length - 1, layers, max(shape.num_experts, 1))), axis=-1)[
            ..., : shape.topk
        ]
        rollouts.append(
            Rollout(
                prompt_id=f"random:{index // group_size}",
                group=index // group_size,
                sample_index=index % group_size,
                tokens_T=rng.integers(3, min(shape.vocab_size, 400), length),
                loss_mask_T=mask,
                logprobs_T=(-3 * rng.random(length)).astype(np.float32) * mask,
                routed_experts=routes.astype(np.int16),
                finish_reason="stop",
                policy_version=0,
                response="",
            )
        )
    return rollouts


QUESTION = Prompt(
    id="rows.jsonl:7",
    messages=({"role": "user", "content": "3 + 4?"},),
    tokens_T=(1,),
    answer="#### 7",
)


def responded(response: str = "", sample_index: int = 0) -> Rollout:
    """A short rollout with this response."""
    (made,) = random_rollouts(ModelShape.read(assets.TINY_MOE), [6], group_size=1)
    return replace(made, response=response, sample_index=sample_index)


def loss_inputs(
    logprobs_N: torch.Tensor, borders: tuple[int, ...] = (), **given: Any
) -> LossInputs:
    """Inputs of a loss; what is not given is pi_old = 0, mu = pi_old, A = 0 and no mask."""
    zeros_N = torch.zeros_like(logprobs_N).detach()
    old_N = given.setdefault("old_logprobs_N", zeros_N)
    others: dict[str, Any] = {
        "rollout_logprobs_N": old_N,
        "advantages_N": zeros_N,
        "loss_mask_N": torch.ones_like(zeros_N),
        "sequences": Sequences(borders or (0, len(logprobs_N))),
    }
    return LossInputs(logprobs_N=logprobs_N, **(others | given))


MOE: dict[str, int] = {"num_experts": 8, "num_layers": 2, "topk": 2}


def coded_rollout(
    tokens: Sequence[int], num_response: int, *, seed: int = 0, dense: bool = False
) -> Rollout:
    """`num_response` sampled tokens at the end; log-probability -t/10 at index t; random distinct
    experts.
    """
    length = len(tokens)
    mask_T = np.zeros(length, np.float32)
    mask_T[length - num_response :] = 1.0
    rng = np.random.default_rng(seed)
    experts = rng.permuted(np.tile(np.arange(8, dtype=np.int8), (length - 1, 2, 1)), axis=2)[
        :, :, :2
    ]
    return Rollout(
        prompt_id=f"prompt{seed}",
        group=seed,
        sample_index=0,
        tokens_T=np.array(tokens, np.int64),
        loss_mask_T=mask_T,
        logprobs_T=(mask_T * -0.1 * np.arange(length)).astype(np.float32),
        routed_experts=np.zeros((length - 1, 0, 0), np.int8) if dense else experts,
        finish_reason="stop",
        policy_version=1,
        response="",
    )


def rewards_of(result: Any) -> list[float]:
    """The rewards of the samples of a round."""
    return [each.reward for each in result.samples]


def parts_of(result: Any) -> dict[tuple[int, int], Mapping[str, float]]:
    """What reward functions gave, by group and sample, where they were called."""
    return {each.rollout.key[:2]: each.parts for each in result.samples if each.parts}


def prompts_of_step(dataset: Dataset, *, seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a step without dynamic sampling."""
    return prompts_from(dataset, seed=seed, start=step * count, count=count)
