"""Ranges of settings: what passes the checks is legal for vLLM, torch and the operating system."""

import math
import random
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import SchedulerConfig

from r3.config import SETTINGS


def ends_of(name: str) -> list[float]:
    """The least and the largest number that a setting accepts; 1e18 without an upper bound."""
    declared = SETTINGS[name]
    low = declared.gt if declared.ge is None else declared.ge
    high = declared.lt if declared.le is None else declared.le
    assert low is not None
    high = 1e18 if high is None else high
    ends = [low if declared.gt is None else math.nextafter(low, high)]
    ends += [high if declared.lt is None else math.nextafter(high, low)]
    return [0, *ends] if declared.zero else ends


def sampled_at(**values: Any) -> None:
    """vLLM takes the values, and changes none."""
    taken = SamplingParams(**values)
    greedy = values.get("temperature") == 0
    assert greedy or all(getattr(taken, name) == value for name, value in values.items())


def updated_with(**values: Any) -> None:
    """torch's AdamW makes a step, and weights are numbers after it."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 0.5)
    torch.optim.AdamW([weight], **values).step()
    assert bool(torch.isfinite(weight).all())


def seeded_with(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.default_rng([seed])
    random.seed(seed)


def waited(seconds: float) -> None:
    """Clocks, sockets, collectives and timers take the number of seconds."""
    assert timedelta(seconds=seconds) >= timedelta(0)
    with socket.socket() as one:
        one.settimeout(seconds)
    done = threading.Event()
    done.set()
    assert done.wait(seconds)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def scheduled(count: int) -> None:
    """vLLM's scheduler takes as many sequences with the least tokens that a GPU has."""
    config = {"max_num_batched_tokens": 8192, "max_model_len": 512, "is_encoder_decoder": False}
    SchedulerConfig(max_num_seqs=count, **config)


DOWNSTREAM: dict[str, Callable[[Any], None]] = {
    "rollout.temperature": lambda value: sampled_at(temperature=value),
    "rollout.top_p": lambda value: sampled_at(top_p=value),
    "rollout.top_k": lambda value: sampled_at(top_k=value),
    "rollout.max_response_tokens": lambda value: sampled_at(max_tokens=int(value)),
    "reward.max_tokens": lambda value: sampled_at(max_tokens=int(value)),
    "eval.temperature": lambda value: sampled_at(temperature=value),
    "eval.top_p": lambda value: sampled_at(top_p=value),
    "train.beta1": lambda value: updated_with(betas=(float(value), 0.95)),
    "train.beta2": lambda value: updated_with(betas=(0.9, float(value))),
    "train.seed": seeded_with,
    "engine.max_num_seqs": scheduled,
    **{name: waited for name in SETTINGS if name.endswith("_s") and SETTINGS[name].kind is float},
}


@pytest.mark.parametrize("name", DOWNSTREAM)
def test_both_ends_of_a_range_are_legal_downstream(name: str) -> None:
    for end in ends_of(name):
        assert SETTINGS[name].problem((end,) if SETTINGS[name].is_list else end) is None
        DOWNSTREAM[name](end)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rollout.temperature", 2.01), ("eval.temperature", 2.01), ("rollout.top_k", 2**31)],
)
def test_what_the_engine_refuses_is_refused_before(name: str, value: float) -> None:
    (bad,) = (value,) if not SETTINGS[name].is_list else ((value,),)
    assert SETTINGS[name].problem(bad) is not None
