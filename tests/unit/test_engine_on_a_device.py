"""What an engine asks of a device that others use too, and how vLLM's warnings are shown."""

import logging
import os
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from r3.backends.cuda import neighbours
from r3.configs import KNOWN_SHAPES
from r3.engine.build import (
    DeviceMemoryError,
    EngineConfigError,
    cuda_arguments,
    overrides,
    require_architecture,
    share_of_device,
    show_as_lines,
)
from r3.metrics.console import stage
from r3.models.shape import ModelShape
from r3.runtime import say
from r3.runtime.device import Device
from tests.errors import Capsys, Patch
from tests.families import family
from tests.memory import CPU
from tests.tiny import tiny_config

SHAPE = ModelShape.read(tiny_config().model.path)


def test_an_engine_with_a_given_cache_asks_for_that_and_its_weights() -> None:
    config = tiny_config(engine={"kv_cache_gib": 4.0, "dtype": "bfloat16"})
    weights_gib = 2 * SHAPE.num_params / 2**30
    assert share_of_device(config, SHAPE, 80.0) == pytest.approx((4.0 + weights_gib) / 80)
    assert share_of_device(config, SHAPE, 2.0) == 1.0  # vLLM allows no more
    config = tiny_config(engine={"kv_cache_gib": 0.0, "memory_fraction": 0.3})
    assert share_of_device(config, SHAPE, 80.0) == 0.3


def test_a_deterministic_engine_compiles_nothing() -> None:
    for deterministic in (True, False):
        config = tiny_config(debug={"deterministic": deterministic})
        assert cuda_arguments(config, 0.5)["enforce_eager"] is deterministic


def test_vllm_builds_the_text_model_alone() -> None:
    from transformers import Qwen3_5MoeConfig

    published = KNOWN_SHAPES["Qwen/Qwen3.5-35B-A3B"]
    shape, config = ModelShape.from_hf(published), tiny_config()
    found = overrides(config, shape)(Qwen3_5MoeConfig(text_config=published["text_config"]))
    assert (found.model_type, found.head_dtype) == ("qwen3_5_moe_text", "model")
    assert found.architectures == ["Qwen3_5MoeForCausalLM"]
    assert found.num_experts == 256
    assert overrides(config, SHAPE) == {"head_dtype": "model"}


def test_vllm_ties_embeddings_as_the_policy_does_wherever_the_key_is() -> None:
    """Qwen3.5-4B has it around the text model's section, 9B and 27B untied, with a head."""
    from transformers import Qwen3_5Config

    text = family("qwen3_5")
    del text["architectures"]
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    for tied in (True, False):
        shape = ModelShape.from_hf(whole | {"tie_word_embeddings": tied})
        found = overrides(tiny_config(), shape)(Qwen3_5Config(text_config=text))
        assert (shape.tied, found.tie_word_embeddings) == (tied, tied)


def test_vllm_runs_sparse_attention_as_latent_attention_without_indexers() -> None:
    from transformers import GlmMoeDsaConfig

    keys = family("glm-5")
    found = overrides(tiny_config(), ModelShape.from_hf(keys))(GlmMoeDsaConfig(**keys))
    assert (found.architectures, found.model_type) == (["DeepseekV3ForCausalLM"], "deepseek_v3")
    assert not hasattr(found, "index_topk"), "vLLM would build the indexers"
    for key in ("kv_lora_rank", "n_routed_experts", "rms_norm_eps", "routed_scaling_factor"):
        assert getattr(found, key) == keys[key]


def test_an_architecture_that_vllm_would_leave_to_transformers_is_refused() -> None:
    require_architecture(SHAPE.architecture)
    with pytest.raises(EngineConfigError, match=r"vLLM [0-9.]+\S* has no NoSuchForCausalLM"):
        require_architecture("NoSuchForCausalLM")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("Free memory on device cuda:0 (20/80 GiB) on"), "does not fit beside the"),
        (AssertionError("Memory usage increased after sleeping."), "another process took memory"),
    ],
)
def test_errors_about_other_processes_name_them(
    error: Exception, reason: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(neighbours, "processes", lambda _: ["python (process 77, 59000 MiB)"])
    monkeypatch.setattr(Device, "memory_gib", lambda _: (20.0, 80.0))  # another program uses it
    device = replace(CPU, torch=torch.device("cuda", 0), is_cuda=True)
    with pytest.raises(DeviceMemoryError) as found, neighbours.neighbours_named(device, 0.6):
        raise error
    said = str(found.value)
    assert reason in said and "python (process 77, 59000 MiB)" in said
    assert "20.0 of 80.0 GiB are free; the engine asks for 48.0" in said
    other = type(error)("of another kind")
    with pytest.raises(type(error)) as kept, neighbours.neighbours_named(device, 0.6):
        raise other
    assert kept.value is other


def test_programs_of_one_gpu_are_listed() -> None:
    mine = os.getpid()
    listed = f"GPU-a, 7, python, 10 MiB\nGPU-b, 8, python, 20 MiB\nGPU-a, {mine}, r3, 30 MiB\n"
    assert neighbours.programs_on("a", listed + "No running processes found\n") == [
        "python (process 7, 10 MiB)",
        f"r3 (process {mine}, this one, 30 MiB)",
    ]


@pytest.fixture
def vllm_logger() -> Any:
    """vLLM's logger, restored after the test."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers), logger.level, logger.propagate
    logger.setLevel("WARNING")
    logger.propagate = False
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_warnings_of_vllm_do_not_break_lines(
    vllm_logger: logging.Logger, capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.stderr", sys.stdout)  # one console for both
    show_as_lines()
    module = vllm_logger.getChild("worker")
    with stage("building the engine"):
        module.warning("unusual: %s", "a kernel")
        module.warning("Using default MoE config. Performance might be sub-optimal!")
        module.warning("%s %s during inference: %s", "Triton", "JIT compilation", "_swiglu")
        module.warning("The seed: VLLM_ENABLE_V1_MULTIPROCESSING is set to False")
        module.info("hidden")
    with stage("building the policy"):
        pass
    say("step 1")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+\.\d", "0.1", line) for line in lines] == [
        "building the engine ...",
        "vllm warning: unusual: a kernel",
        "building the engine ... 0.1 s",
        "building the policy ... 0.1 s",
        "step 1",
    ]


def test_logging_that_a_user_configures_stays(
    vllm_logger: logging.Logger, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "mine.json")
    before = list(vllm_logger.handlers)
    show_as_lines()
    assert vllm_logger.handlers == before
