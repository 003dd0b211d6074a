"""Which setting or flag brings which extra. The core reaches an extra through this file alone.

An extra is a folder that a run can do without. The core imports none; each function below imports
one when it is needed, and says when that is.

| extra | brought by |
|---|---|
| `tools.planning` | `--dry-run`, `--plan-for`, `--device-gib`; a start compares plan and device |
| `tools.dry_run`, `tools.help` | `--dry-run`; `--help`, `--models`, no words at all |
| `tools.own_algorithm`, `tools.check` | a file as `algo.loss`, `algo.advantage`; `--check` |
| `tools.dumps` | `log.rollouts_every`, `log.show_every` |
| `tools.beside` | every start: warnings, header, last line, needs of the machine; users' code |
| `tools.beside.digests` | every start: what changed since the run was started |
| `tools.beside.processes` | worker processes for users' code, and for math |
| `tools.beside.tables`, `tools.beside.lines` | a terminal as stdout, or stderr |
| `tools.beside.step_trace` | `debug.profile` |
| `tools.beside.watchdog` | every start: stalls are reported (`debug.stall_s`) or end it |
| `tools.tensorboard`, `tools.trackers` | `log.tensorboard`, `log.tracker` |
| `tools.download`, `tools.rows` | models `hub:`; rows of all but a file of JSON: tables, `gym:` |
| `tools.mismatch.jumps` | every step: jumps of the mismatch, growth with the conversation |
| `tools.beside.step_notes` | every step: no signal, limits, failures, collapsed routers |
| `tools.mismatch.shadow` | `replay.shadow_every` |
| `tools.proof` | the first two syncs, `debug.prove_sync_every` |
| `envs` | `env.name` calculator and guess_number, `env.path`, `env.command` |
| `mixture` | several sources of rows, `data.env`, `data.curriculum` |
| `partial` | `rollout.step_token_budget`, `algo.dynamic_sampling` |
| `lora` | `lora.rank`, `train.freeze` |
| `quantised` | `quantization_config` in a model's config.json; files in fp8, int4 or mxfp4 |
| `objectives` | `train.objective` sft and distill, `algo.teacher` |
| `judges` | `reward.function` http, self_judge, model, math, gym |
| `backends` | `model.experts` fused; exchanges between ranks; `parallel.cp`, `parallel.pp` |
| `backends` | `train.optimizer` streamed, `rollout.top_k`; windows, sinks, gated delta layers |
| `engine.reload` | an engine whose layers have no plain layout |
| `backends.cpu`, `backends.cuda` | ranks on CPU, on CUDA |
| `launch` | `from r3 import train`; the commands of `launch/` |
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from r3.config import AlgoConfig, Config, RewardConfig


def experts(*, is_cuda: bool) -> type[Any]:
    """The class of `model.experts fused` (Megatron's experts of a layer) for a device."""
    if is_cuda:
        from r3.backends.cuda.fused_experts import DeviceExperts

        return DeviceExperts
    from r3.backends.cpu.fused_experts import FusedExperts

    return FusedExperts


def dispatch() -> ModuleType:
    """What brings tokens to fused experts, and exchanges without copies: r3.backends.dispatch."""
    from r3.backends import dispatch

    return dispatch


def stages() -> ModuleType:
    """Exchanges between pipeline stages: r3.backends.stages."""
    from r3.backends import stages

    return stages


def attention() -> ModuleType:
    """Attention of `parallel.cp` above 1, of windows and of sinks: r3.backends.attention."""
    from r3.backends import attention

    return attention


def gated_delta() -> type[Any]:
    """The class of the gated delta layers of Qwen3-Next and later models."""
    from r3.backends.delta import GatedDelta

    return GatedDelta


def streamed() -> ModuleType:
    """The step of `train.optimizer streamed`: r3.backends.streamed."""
    from r3.backends import streamed

    return streamed


def kept_tokens(llm: Any) -> Any:
    """The tokens that an engine's sampler keeps (`rollout.top_k`): `KeptTokens`."""
    from r3.backends.kept_tokens import KeptTokens

    return KeptTokens(llm)


def device_problems(config: Config, shape: Any, *, is_cuda: bool) -> list[Any]:
    """What a device cannot run (r3.backends.check)."""
    from r3.backends.check import device_problems

    return device_problems(config, shape, is_cuda=is_cuda)


def triton_kernels() -> ModuleType:
    """Kernels for tensors on CUDA, by the names of the operators in torch.ops.r3."""
    from r3.backends.cuda import triton_kernels

    return triton_kernels


def engine_on_cpu() -> ModuleType:
    """What an engine on CPU needs: r3.backends.cpu.engine."""
    from r3.backends.cpu import engine

    return engine


def megatron_on_cpu() -> ModuleType:
    """Stand-ins that let Megatron-Core run without CUDA."""
    from r3.backends.cpu import megatron

    return megatron


def cpu_memory() -> ModuleType:
    """How ranks on CPU keep and return memory."""
    from r3.backends.cpu import memory

    return memory


def reload_weights(*args: Any, **more: Any) -> Any:
    """Push weights through vLLM's reload (r3.engine.reload)."""
    from r3.engine.reload import reload_weights

    return reload_weights(*args, **more)


def neighbours_named(device: Any, share: float) -> Any:
    """Inside, errors about other programs' memory name these (r3.backends.cuda.neighbours)."""
    from r3.backends.cuda.neighbours import neighbours_named

    return neighbours_named(device, share)


def host_memory() -> ModuleType:
    """Page-locked host memory for copies from and to CUDA."""
    from r3.backends.cuda import host_memory

    return host_memory


def share_gloo_thread() -> None:
    """Let all gloo process groups of a rank on CPU share one thread."""
    from r3.backends.cpu import gloo

    gloo.share_gloo_thread()


def runner() -> ModuleType:
    """Environments of several turns, workflows, and readers of messages: r3.envs.runner."""
    from r3.envs import runner

    return runner


def environments() -> ModuleType:
    """Classes of environments, and the checks of `env`: r3.envs.find."""
    from r3.envs import find

    return find


def workflow_episode() -> type[Any]:
    """The class of a workflow's episode."""
    from r3.envs.workflow_episode import WorkflowEpisode

    return WorkflowEpisode


def source_of_rounds(config: Config) -> type[Any]:
    """The source of samples that refills a step, or goes on with conversations of earlier ones."""
    if config.rollout.step_token_budget:
        from r3.partial.source import PartialSource

        return PartialSource
    from r3.partial.refill import RefillingSource

    return RefillingSource


def mixture() -> ModuleType:
    """Several sources of rows, and what `data` says of them: r3.mixture."""
    from r3 import mixture

    return mixture


def step_notes(*args: Any) -> Any:
    """What a run says of the samples of its steps (r3.tools.beside.step_notes)."""
    from r3.tools.beside.step_notes import StepNotes

    return StepNotes(*args)


def budgeted_episode() -> type[Any]:
    """The class of an episode that a token budget may interrupt."""
    from r3.partial.budgeted import BudgetedEpisode

    return BudgetedEpisode


def adapters() -> ModuleType:
    """Adapters in the policy (`lora.rank`): r3.lora.adapters."""
    from r3.lora import adapters

    return adapters


def check_lora(*args: Any) -> list[str]:
    """Check adapters and their base (r3.lora.check)."""
    from r3.lora.check import check_lora

    return check_lora(*args)


def adapter_plan() -> ModuleType:
    """Which matrices have adapters, without torch (`lora.rank`): r3.lora.plan."""
    from r3.lora import plan

    return plan


def frozen_tensors(*args: Any) -> frozenset[str]:
    """The tensors that `train.freeze` names (r3.lora.freeze)."""
    from r3.lora.freeze import frozen_tensors

    return frozen_tensors(*args)


def quantised() -> ModuleType:
    """How quantised checkpoints are stored, without torch: r3.quantised.formats."""
    from r3.quantised import formats

    return formats


def dequantised(*args: Any) -> Any:
    """A slice of a quantised tensor of a checkpoint, in bfloat16 (r3.quantised.values)."""
    from r3.quantised.values import read

    return read(*args)


def teachers(config: Config, device: Any, mesh: Any) -> Any:
    """The frozen checkpoints of `algo.teacher`."""
    from r3.objectives.teacher import Teachers

    return Teachers(config, device, mesh)


def span_finder(renderer: Any, source: str) -> Any:
    """Finds the messages that supervised rows teach (`train.objective sft`)."""
    from r3.objectives.spans import span_finder

    return span_finder(renderer, source)


def rows_of_step(*args: Any) -> Any:
    """The rows that a step of `train.objective sft` learns (r3.objectives.rows)."""
    from r3.objectives.rows import rows_of_step

    return rows_of_step(*args)


def judge(name: str, spec: str, settings: RewardConfig, **more: Any) -> Any:
    """The component of `reward.function` http, self_judge, model or math (r3.judges.components)."""
    from r3.judges.components import component

    return component(name, spec, settings, **more)


def reward_model(settings: RewardConfig) -> Any:
    """The model that `reward.function model` asks."""
    from r3.judges.reward_model import RewardModel

    return RewardModel(settings)


def questions(judge: Any, max_model_len: int) -> Any:
    """The questions of self_judge among the turns of a round; None without such a judge."""
    if judge is None:
        return None
    from r3.judges.self_judge import Judging

    return Judging(judge, max_model_len)


def planner() -> ModuleType:
    """The plan of memory and the search for layouts: `r3.tools.planning.verdict`."""
    from r3.tools.planning import verdict

    return verdict


def dry_run() -> ModuleType:
    """The report of `--dry-run`."""
    from r3.tools import dry_run

    return dry_run


def help_texts() -> ModuleType:
    """What `--help` and `--models` print."""
    from r3.tools import help

    return help


def notes_on(*args: Any) -> list[str]:
    """The warnings of a start (r3.tools.beside.notes)."""
    from r3.tools.beside.notes import notes_on

    return notes_on(*args)


def teacher_rules() -> ModuleType:
    """The checks of `algo.teacher`: r3.objectives.check."""
    from r3.objectives import check

    return check


def own_function(algo: AlgoConfig, role: str) -> Any:
    """A user's loss or advantage (r3.tools.own_algorithm)."""
    from r3.tools.own_algorithm import own_function

    return own_function(algo, role)


def check_judges(*args: Any) -> None:
    """Check what the judges of `reward.function` need (r3.judges.check)."""
    from r3.judges.check import check_judges

    check_judges(*args)


def check() -> ModuleType:
    """The report of `--check`, and the trial of users' functions."""
    from r3.tools import check

    return check


def tensorboard() -> ModuleType:
    """The writer of TensorBoard's events, and samples as text: r3.tools.tensorboard."""
    from r3.tools import tensorboard

    return tensorboard


def tracker(config: Config, run_id: str) -> Any:
    """The writer of `log.tracker` (r3.tools.trackers)."""
    from r3.tools.trackers import Tracker

    return Tracker(config, run_id)


def downloads() -> ModuleType:
    """Downloads of models of the hub: r3.tools.download."""
    from r3.tools import download

    return download


def proof() -> ModuleType:
    """The proof that an engine has the policy's weights: r3.tools.proof."""
    from r3.tools import proof

    return proof


def shadow_sample(*args: Any, turn: int) -> Any:
    """Tokens that are scored with live routes too (r3.tools.mismatch.shadow)."""
    from r3.tools.mismatch.shadow import shadow_sample

    return shadow_sample(*args, turn=turn)


def mismatch_watch() -> Any:
    """What compares the mismatch of a run's rows with each other (r3.tools.mismatch.jumps)."""
    from r3.tools.mismatch.jumps import MismatchWatch

    return MismatchWatch()


def sources() -> ModuleType:
    """Rows of other sources than plain files of JSON: r3.tools.rows.sources."""
    from r3.tools.rows import sources

    return sources


def record_samples(run: Any, step: int, *args: Any) -> None:
    """Dump and show the samples of a step, each when due (r3.tools.dumps). All ranks must call."""
    if run.config.log.rollouts_every or run.config.log.show_every:
        from r3.tools.dumps import record_samples

        record_samples(run, step, *args)


def machine() -> ModuleType:
    """What every start needs of its machine (r3.tools.beside.machine)."""
    from r3.tools.beside import machine

    return machine


def surroundings() -> ModuleType:
    """What users' code may change of the process: r3.tools.beside.surroundings."""
    from r3.tools.beside import surroundings

    return surroundings


def terminal() -> ModuleType:
    """The console of a run on a terminal: r3.tools.beside.tables."""
    from r3.tools.beside import tables

    return tables


def fitted(text: str, width: int) -> str:
    """Lines as a terminal shows them, broken between words (r3.tools.beside.lines)."""
    from r3.tools.beside.lines import fitted

    return fitted(text, width)


def header(*args: Any) -> list[str]:
    """The lines that describe a run before its first step (r3.tools.beside.header)."""
    from r3.tools.beside.header import header

    return header(*args)


def result() -> ModuleType:
    """What a run came to, and its last line: r3.tools.beside.result."""
    from r3.tools.beside import result

    return result


def step_trace(folder: Any, step: int, rank: int) -> Any:
    """What records the operations of the step `debug.profile`; None without it."""
    if not step:
        return None
    from r3.tools.beside.step_trace import StepTrace

    return StepTrace(folder, step=step, rank=rank)


def watchdog() -> type[Any]:
    """The class that has a rank watched (r3.tools.beside.watchdog)."""
    from r3.tools.beside.watchdog import Watchdog

    return Watchdog


def exhausted(error: BaseException, where: str) -> list[str]:
    """The lines about a machine without memory or files (r3.tools.beside.failures)."""
    from r3.tools.beside.failures import exhausted

    return exhausted(error, where)


def placed(*args: Any, **more: Any) -> tuple[Config, str]:
    """The folder of a start, and a note about it (r3.tools.beside.placing)."""
    from r3.tools.beside.placing import placed

    return placed(*args, **more)


def digests() -> ModuleType:
    """Digests of data and models that a resumed run is compared by: r3.tools.beside.digests."""
    from r3.tools.beside import digests

    return digests


def processes(count: int, *, preload: Sequence[str] = ()) -> Any:
    """Worker processes for users' code (r3.tools.beside.processes)."""
    from r3.tools.beside.processes import Processes

    return Processes(count, preload=preload)
