"""benchmarks/gpu.sh without its programs: what it types, in which order it runs, what it writes."""

import gzip
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_tables
from benchmarks.gpu_steps import CPU_RUN, FAMILIES, Runner, Step, chosen, figures_of, steps
from benchmarks.gpu_steps import with_bundle as unpacked
from r3.cli.parse import parse
from r3.config import with_values
from r3.models.shape import ModelShape
from r3.rescore import parse as parse_rescore
from r3.tools.planning.memory_plan import fit
from tests.errors import Patch
from tests.families import random_checkpoint
from tests.runs import program
from tests.world import ROOT


def programs(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a program, without what starts it."""
    if words[:2] == ("-m", "torch.distributed.run"):
        assert words[2:5] == ("--standalone", "--nproc_per_node", "2")
        words = words[5:]
    return words[2:] if words[:2] == ("-m", "benchmarks.one_device") else words


@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.large)])
def test_steps_type_what_exists(small: bool, tmp_path: Path, monkeypatch: Patch) -> None:
    made = random_checkpoint(tmp_path / "models/large", num_experts=8, num_experts_per_tok=2)
    for name in ("cut", *FAMILIES):
        (tmp_path / "models" / name).symlink_to(made)
    gpu.rows(tmp_path / "rows.jsonl")
    monkeypatch.chdir(ROOT)
    found, kinds = steps(tmp_path, seeds=1, small=small), set()
    for words in (words for step in found for words in step.commands):
        ranks = "2" if words[:2] == ("-m", "torch.distributed.run") else "1"
        monkeypatch.setenv("WORLD_SIZE", ranks)
        match programs(words):
            case ("train.py", *flags):
                kinds.add(parse(flags).config.train.objective)
            case ("-m", "r3.doctor", *flags):
                assert parse(flags).config.engine.dtype == "bfloat16"
            case ("-m", "r3.rescore", *flags):
                assert len(parse_rescore(flags).rollouts) > 16
            case ("-m", "benchmarks.gpu", name, *paths):
                paths = [path for path in paths if path != "--rehearse"]
                inspect.signature(gpu.EXPERIMENTS[name]).bind(*paths)
            case ("-m", "pytest", *flags):
                assert "tests/gpu" in flags and (ROOT / "tests/gpu/test_gpu.py").exists()
            case _:
                raise AssertionError(words)
    assert kinds == {"rl", "sft"}
    order = [step.name for step in found]
    assert all(order.index(each) < order.index(step.name) for step in found for each in step.after)
    assert len(set(order)) == len(order)
    is_alone = [step.alone for step in found]
    assert is_alone == sorted(is_alone), "steps that share the device come first"


def test_the_large_steps_fit_an_h100(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    random_checkpoint(tmp_path / "models/large")
    (tmp_path / "models/cut").symlink_to(tmp_path / "models/large")
    gpu.rows(tmp_path / "rows.jsonl")
    found = {step.name: step for step in steps(tmp_path, seeds=1, small=False)}
    for name, model in (("large", "large"), ("sft", "cut"), ("sft-kept", "cut")):
        config = parse(list(programs(found[name].commands[0])[1:])).config
        shape = ModelShape.from_hf(gpu.MODELS[model] | {"architectures": ["Qwen3MoeForCausalLM"]})
        assert fit(config, shape, 1, 80).fits, name
        if name == "large":
            less = with_values(config, {"engine.kv_cache_gib": 0.06})
            assert not fit(less, shape, 1, 80).fits, "a cache of tiny's holds nothing"


def test_the_page_names_every_step(tmp_path: Path) -> None:
    page = (ROOT / "benchmarks/gpu.md").read_text().partition("| step |")[2].partition("\n\n")[0]
    for step in steps(tmp_path, seeds=1, small=False):
        name = step.name.removesuffix("-0")
        shown = "doctor-FAMILY" if name.removeprefix("doctor-") in FAMILIES else name
        assert f"`{shown}`" in page, shown


def marked(folder: Path, name: str, code: str = "", **facts: Any) -> Step:
    """A step that writes when it begins and ends."""
    file = f"open({str(folder / name)!r}, 'a').write(f'{{time.monotonic()}} ')"
    script = f"import time; {file}; {code or 'time.sleep(0.3)'}; {file}"
    return Step(name=name, commands=(("-c", script),), **({"limit_s": 60} | facts))


def run(folder: Path, *wanted: Step, seconds: float = 60) -> dict[str, Any]:
    """Run steps; returns their lines."""
    runner = Runner(folder, sys.executable, dict(os.environ), "a machine", slack=1)
    runner.run(wanted, jobs=3, deadline=time.monotonic() + seconds)
    lines = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return {"failed": runner.failed} | {line["step"]: line for line in lines}


def test_timed_steps_have_the_device_alone_and_others_share_it(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        marked(tmp_path, "one", "time.sleep(2)"),
        marked(tmp_path, "two", "time.sleep(2)"),
        marked(tmp_path, "later", after=("one",)),
        marked(tmp_path, "timed", alone=True),
        marked(tmp_path, "timed-too", alone=True),
    )
    assert found["failed"] == []
    names = ("one", "two", "later", "timed", "timed-too")
    spans = [[*map(float, (tmp_path / name).read_text().split())] for name in names]
    one, two, later, timed, too = spans
    assert one[0] < two[1] and two[0] < one[1], "side by side"
    assert later[0] > one[1]
    assert timed[0] > max(one[1], two[1], later[1]) and too[0] > timed[1]
    assert [found[name]["alone"] for name in ("one", "timed")] == [False, True]
    assert found["one"]["machine"] == "a machine" and "torch" in found["one"]["versions"]


def test_a_limit_ends_one_step_and_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"__import__('subprocess').run(['bash', '-c', 'sleep 4; touch {alive}'])"
    found = run(
        tmp_path,
        marked(tmp_path, "hangs", child, limit_s=1),
        marked(tmp_path, "curve", "time.sleep(60)", limit_s=1, until_limit=True),
        marked(tmp_path, "fails", "raise SystemExit(7)"),
        marked(tmp_path, "works"),
    )
    exits = [found[name]["exit"] for name in ("hangs", "curve", "fails", "works")]
    assert exits == [124, 0, 7, 0]
    assert sorted(found["failed"]) == ["fails", "hangs"]
    time.sleep(4)
    assert not alive.exists()


def test_a_failed_command_ends_its_step_and_time_runs_out(tmp_path: Path) -> None:
    both = Step(name="both", commands=(("-c", "raise SystemExit(1)"), ("-c", "no")), limit_s=60)
    assert run(tmp_path, both)["both"]["exit"] == 1
    assert "no" not in (tmp_path / "both.log").read_text()
    late = run(tmp_path, marked(tmp_path, "late"), seconds=0)
    assert late["late"]["exit"] == 124 and not (tmp_path / "late").exists()
    assert "both" in late, "a second run adds its lines"


def test_names_choose_steps_and_what_they_need(tmp_path: Path) -> None:
    found = steps(tmp_path, seeds=1, small=False)
    assert [step.name for step in chosen(found, ["sft", "curves"])] == [
        *("curve-r3-0", "curve-off-0", "model-cut", "curves", "sft")
    ]
    assert chosen(found, []) == found
    with pytest.raises(ValueError, match=r"no such step: docter\. Steps: facts, "):
        chosen(found, ["docter"])


def test_figures_are_read_from_the_output_of_commands() -> None:
    doctor = (
        "pass  replay on and off   live k3 2.97e-06 max 1.38e-02; replay k3 1.55e-06 max 5.26e-03; "
        "live routing agrees in 97.64% of slots\n7 of 7 passed\n"
    )
    expected = {"passed": 7, "of": 7, "k3_live": 2.97e-6, "k3_replay": 1.55e-6, "agreement": 0.9764}
    assert figures_of(doctor) == expected
    rescore = "layout  1\n       replay  live\nk3     6.600000e-06  1.400000e-02\nf2     0.0  0.1\n"
    assert figures_of(rescore) == {"k3_replay": 6.6e-6, "k3_live": 1.4e-2}
    assert figures_of("==== 1 failed, 9 passed in 80.1s ====\n") == {"tests": "1 failed, 9 passed"}
    ipc = {"experiment": "ipc", "passed": True}
    assert figures_of(f"{json.dumps(ipc)}\nbye\n") == ipc
    assert figures_of("Traceback") is None


def test_a_bundle_is_found_beside_the_packages_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the archives of `make gpu-bundle` are not there"):
        unpacked(tmp_path / "absent", tmp_path / "out")
    for name in ("vllm", "packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}.py").write_text("here = 1")
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / name, name)
    for _ in range(2):  # the second one unpacks nothing
        python = unpacked(tmp_path, tmp_path / "out")
    code = "import of_vllm, of_packages, importlib.util as found; assert found.find_spec('torch')"
    subprocess.run([python, "-c", code], check=True)


def test_no_gpu_is_said(tmp_path: Path) -> None:
    no_gpu = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = program("benchmarks/gpu.sh", "--out", tmp_path / "out", env=no_gpu)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "no GPU: torch finds no CUDA device (nothing was run)\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("figure", ["reward/mean", "loss/total"])
def test_figures_of_runs_with_and_without_rewards_are_compared(figure: str, tmp_path: Path) -> None:
    def written(name: str, **changes: float) -> Path:
        row = {figure: 0.5, "time/train_s": 1.0, "perf/tokens_per_s": 9.0, "memory/peak_gib": 2.0}
        rows = [{"step": step} | row | changes for step in (1, 2)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
        return tmp_path / name

    one = written("one", **{"optim/grad_norm": float("nan")})
    slower = {"time/train_s": 3.0, "perf/tokens_per_s": 3.0, "memory/peak_gib": 1.0}
    equal = written("slower", **slower, **{"optim/grad_norm": float("nan")})
    assert gpu.same(one, equal) == {"different": [], "passed": True}
    other = written("other", **{figure: 0.6, "perf/packing_efficiency": 0.9})
    different = sorted([figure, "optim/grad_norm", "perf/packing_efficiency"])
    assert gpu.same(one, equal, other) == {"different": different, "passed": False}


def test_a_trace_says_where_the_time_went(tmp_path: Path) -> None:
    def event(category: str, name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": begin, "dur": length, "args": more}

    events = [
        event("kernel", "gemm", 0, 400),
        event("kernel", "add", 300, 200),  # beside the other: busy until 500
        event("gpu_memcpy", "Memcpy HtoD", 450, 10, bytes=2**10),
        event("gpu_memcpy", "Memcpy HtoD", 600, 200, bytes=2**30),  # the optimizer begins
        event("kernel", "adam", 900, 100),
        event("cpu_op", "aten::mm", 0, 5000),
        {"name": "an instant"},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = gpu.trace(tmp_path / "trace.json.gz")
    assert found["milliseconds"] == 1.0 and found["launches"] == 5
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["without_kernel_share"] == pytest.approx(0.4)
    assert found["optimizer_share"] == pytest.approx(0.4)
    assert found["largest"][0] == ["gemm", 0.4, 1]


def test_tables_and_curves_of_the_page_are_those_of_the_results(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in gpu_tables.RESULTS.read_text().splitlines()]
    page = gpu_tables.PAGE.read_text()
    assert gpu_tables.with_tables(page, rows) == page, "python -m benchmarks.gpu_tables"
    assert gpu_tables.with_tables(page, rows[:5]) != page
    gpu_tables.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_step_that_failed_is_a_failed_row() -> None:
    row = {"step": "ipc", "when": "2026-11-27", "machine": "one", "versions": {}, "seconds": 3.2}
    assert gpu_tables.summary(row | {"figures": None, "exit": 124})[2] == "failed"
    assert gpu_tables.summary(row | {"figures": {"passed": False}, "exit": 0})[2] == "failed"
    assert gpu_tables.summary(row | {"figures": {"passed": 7}, "exit": 0})[2:4] == ["passed", "3"]


def test_the_carried_rollouts_name_no_machine() -> None:
    assert not re.search(r"[ \[]/", (CPU_RUN / "config.yaml").read_text()), "an absolute path"
