"""Metrics of a run: what each key means, how the ranks' parts become one row a step, and where rows go."""

from __future__ import annotations

import difflib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import numpy as np

from r3.config import Config
from r3.console import Console, step_line
from r3.diagnostics import LOG10_EDGES, SHADOW, LogHistogram, Max, Partial
from r3.heatmap import STEPS, heat_strip
from r3.rundir import RunDir


@dataclass(frozen=True)
class Entry:
    """What a metric is: its formula in words or symbols, and the code or paper it comes from."""

    formula: str
    source: str


PHASES: dict[str, str] = {
    "sync": "weights from policy to engine",
    "prove_sync": "log-probabilities of engine and policy compared after a sync",
    "generate": "sampling, rewards judged meanwhile",
    "score": "advantages",
    "pack": "rollouts moved to the ranks that train on them, packed",
    "train": "old log-probabilities and updates",
    "evaluate": "answers to held-out questions",
    "checkpoint": "checkpoint written; counted in the row after it",
    "export": "Hugging Face files written",
}

_R3 = "arXiv 2510.11370"
_LAYER = "routing/agreement_layer/"
_TOKENS = "over the loss tokens; D = log pi_old - log mu: policy at the rollout's weights against engine"
# Rollouts that an older version began (rollout.step_token_budget) are left out of the mismatch panels.

GLOSSARY: dict[str, Entry] = {
    "reward/mean": Entry("mean reward of the step's rollouts", "r3/rollout.py"),
    "reward/std": Entry("standard deviation of the rewards of the step's rollouts", "r3/rollout.py"),
    "reward/shaped_mean": Entry("mean reward with the overlong penalty taken off", "r3/exchange.py"),
    "reward/group_zero_std_frac": Entry("share of groups whose rewards are all equal", "r3/rollout.py"),
    "reward/COMPONENT/mean": Entry(
        "mean of what one function of reward.function gave, before its weight", "r3/rollout.py"
    ),
    "reward/calls": Entry("calls of functions that do not run at once", "r3/workers.py"),
    "reward/errors": Entry(
        "of their attempts, those that raised, were refused or gave no score", "r3/workers.py"
    ),
    "reward/timeouts": Entry(
        "of their attempts, those that took longer than reward.timeout_s", "r3/workers.py"
    ),
    "reward/crashes": Entry("of their attempts, those that took their worker process down", "r3/workers.py"),
    "reward/retries": Entry("attempts after a failed one", "r3/workers.py"),
    "reward/dropped": Entry("answers left out after a failure (reward.on_error)", "r3/rollout.py"),
    "reward/zeroed": Entry("answers given 0 after a failure (reward.on_error)", "r3/rollout.py"),
    "time/judge_mean_s": Entry("mean seconds from an answer's end to its reward", "r3/rollout.py"),
    "eval/SET/accuracy": Entry(
        "share of answers to the held-out questions with reward >= 1", "r3/evaluate.py"
    ),
    "eval/SET/unjudged": Entry("answers given 0 because their reward failed", "r3/evaluate.py"),
    "eval/SET/avg_at_K": Entry("mean reward of the K answers to each held-out question", "r3/evaluate.py"),
    "eval/SET/pass_at_K": Entry(
        "mean of 1 - C(n-c, K) / C(n, K), c of n answers right", "arXiv 2107.03374, eq. 1"
    ),
    "rollout/response_tokens_mean": Entry("mean of sampled tokens per rollout", "r3/rollout.py"),
    "rollout/truncated_frac": Entry("share of rollouts that ended at max_response_tokens", "r3/rollout.py"),
    "rollout/tokens": Entry("tokens of all rollouts, prompts included", "r3/rollout.py"),
    "rollout/rounds": Entry("rounds of prompts the step took (algo.dynamic_sampling)", "r3/refill.py"),
    "rollout/groups_sampled": Entry("groups answered in all rounds", "r3/refill.py"),
    "rollout/groups_trained": Entry("of them, those with signal that are trained on", "r3/refill.py"),
    "rollout/carried": Entry(
        "conversations that rollout.step_token_budget interrupted and that go on in the next step",
        "r3/refill.py",
    ),
    "rollout/dropped_by_budget": Entry(
        "conversations it interrupted that were dropped: they would have exceeded rollout.max_staleness",
        "r3/refill.py",
    ),
    "rollout/stale_tokens_frac": Entry(
        "share of sampled tokens that an older version than the step's sampled", "r3/refill.py"
    ),
    "env/turns_mean": Entry("mean of the model's messages per conversation", "r3/rollout.py"),
    "env/max_turns_frac": Entry("share of conversations that ended at env.max_turns", "r3/rollout.py"),
    "env/calls": Entry("calls of environments in the step", "r3/workers.py"),
    "env/errors": Entry("of their attempts, those that raised or returned nonsense", "r3/workers.py"),
    "env/timeouts": Entry("of their attempts, those that took longer than env.timeout_s", "r3/workers.py"),
    "env/crashes": Entry("of their attempts, those that took their worker process down", "r3/workers.py"),
    "env/retries": Entry("attempts after a failed one", "r3/workers.py"),
    "env/dropped": Entry("conversations left out after a failure (env.on_error)", "r3/rollout.py"),
    "env/zeroed": Entry("conversations ended with reward 0 after a failure (env.on_error)", "r3/rollout.py"),
    "routing/overlap_differs": Entry(
        "of (token, layer) slots the engine gave twice, in a turn and in the next, the share with other experts",
        "r3/engine/generate.py",
    ),
    "mismatch/k3": Entry(
        f"mean(e^D - D - 1) {_TOKENS}; estimates KL(mu || pi_old)", f"r3/diagnostics.py; {_R3}"
    ),
    "mismatch/k1": Entry(f"mean(-D) {_TOKENS}; estimates KL(mu || pi_old), noisier", "r3/diagnostics.py"),
    "mismatch/weight": Entry(f"mean(e^D) {_TOKENS}; 1 in expectation", "r3/diagnostics.py"),
    "mismatch/f2": Entry(f"mean(|D| > ln 2) {_TOKENS}", f"r3/diagnostics.py; {_R3}"),
    "mismatch/abs_mean": Entry(f"mean |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/abs_p50": Entry(f"median of |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/abs_p90": Entry(f"90th percentile of |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/abs_p99": Entry(f"99th percentile of |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/abs_p999": Entry(f"99.9th percentile of |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/abs_log10": Entry(
        f"histogram of log10 |D| {_TOKENS}; in TensorBoard only", "r3/diagnostics.py"
    ),
    "mismatch/abs_max": Entry(f"max |D| {_TOKENS}", "r3/diagnostics.py"),
    "mismatch/ess": Entry(f"(sum w)^2 / (n sum w^2), w = e^D, {_TOKENS}", "r3/diagnostics.py; Kish 1965"),
    **{
        f"mismatch/{name}_{arm}": Entry(
            f"mismatch/{name} of a sampled micro-batch of each rank, with {what} routes", "r3/updates.py"
        )
        for arm, what in (("replay", "replayed"), ("live", "live"))
        for name in SHADOW
    },
    "mismatch/k3_ratio": Entry(
        "mismatch/k3_live / mismatch/k3_replay, of the same tokens; above 1 = replay lowers it",
        "r3/updates.py",
    ),
    "routing/coverage": Entry("routing/rows_captured / routing/rows_expected", "r3/ledger.py"),
    "routing/agreement": Entry(
        "share of replayed (token, layer) slots whose live top-k is the replayed set, at the rollout's weights",
        "r3/policy/replay.py",
    ),
    "routing/agreement_layer/LAYER": Entry(
        "the same of one MoE layer, by its number in the decoder from 0", "r3/policy/replay.py"
    ),
    "routing/agreement_update_K": Entry(
        "routing/agreement in update K of several of a step, K from 1: later ones route with changed weights",
        "r3/updates.py",
    ),
    "routing/margin": Entry(
        "mean over slots that disagree of: weakest live score - weakest replayed score, in the units the router chooses by",
        "r3/policy/replay.py",
    ),
    "routing/replaced_frac": Entry(
        "share of replayed experts that replay.plausibility replaced by live ones", "r3/policy/replay.py"
    ),
    "routing/rows_expected": Entry("tokens the engine processed: tokens - 1 a rollout", "r3/ledger.py"),
    "routing/rows_captured": Entry("of these, tokens that came with routes", "r3/ledger.py"),
    "routing/rows_missing": Entry("of these, tokens without routes among others with", "r3/ledger.py"),
    "routing/rows_missing_rollout": Entry(
        "of these, tokens of rollouts that came without any routes", "r3/ledger.py"
    ),
    "routing/rows_last_token": Entry(
        "last tokens of sequences, which the engine never processed", "r3/ledger.py"
    ),
    "routing/rows_replayed": Entry(
        "tokens that the policy's routers routed as told, counted there, in the updates; must be rows_captured "
        "(r2: tokens routed as recorded)",
        "r3/policy/replay.py",
    ),
    "routing/rows_live": Entry(
        "tokens that they routed live, counted there; must be rows_last_token + rows_missing + rows_missing_rollout",
        "r3/policy/replay.py",
    ),
    "routing/rows_filler": Entry("packed tokens of no rollout, counted there", "r3/policy/replay.py"),
    "routing/bytes": Entry("bytes of routes that reached ranks to train on, all ranks", "r3/exchange.py"),
    "loss/total": Entry("loss, global denominators, mean over the step's updates", "r3/loss.py"),
    "loss/clip_frac": Entry(
        "share of loss tokens whose ratio pi / pi_old (pi / mu with algo.correction bypass) was out of bounds",
        "r3/loss.py",
    ),
    "loss/kl_ref": Entry(
        "mean of the estimate of KL(pi || starting model) over loss tokens; of pi_old with algo.kl_in reward",
        "r3/loss.py",
    ),
    "correction/weight_mean": Entry(
        "mean over loss tokens of the weight against the engine, after its bounds", "r3/loss.py"
    ),
    "correction/cut_frac": Entry(
        "share of loss tokens whose weight against the engine was truncated or masked", "r3/loss.py"
    ),
    "policy/entropy": Entry("mean over loss tokens of -sum_v p_v log p_v", "r3/policy"),
    "optim/grad_norm": Entry("global gradient norm before clipping, mean over updates", "r3/policy"),
    "optim/router_grad_norm": Entry("the same over router weights alone", "r3/policy"),
    "optim/lr": Entry("learning rate, mean over updates", "r3/policy"),
    "time/step_s": Entry("seconds from the row's first phase to its end, slowest rank", "r3/metrics.py"),
    **{
        f"time/{phase}_s": Entry(f"seconds of: {what}; slowest rank", "r3/metrics.py")
        for phase, what in PHASES.items()
    },
    "perf/tokens_per_s": Entry("rollout/tokens / time/step_s", "r3/metrics.py"),
    "perf/packing_efficiency": Entry(
        "tokens of rollouts / those there would be if every micro-batch were as large as its update's largest",
        "r3/packing.py",
    ),
    "memory/peak_gib": Entry("largest memory in use in the step, fullest rank", "r3/residency.py"),
    "memory/residue_gib": Entry(
        "memory in use when both worlds have given up theirs, fullest rank", "r3/residency.py"
    ),
    **{
        f"memory/{phase}_gib": Entry(f"memory in use in {phase}, fullest rank", "r3/residency.py")
        for phase in ("sync", "generate", "train")
    },
}

_PATTERNS = {
    re.compile(
        re.escape(key)
        .replace("SET", "[A-Za-z0-9_.-]+")
        .replace("COMPONENT", r"\w+")
        .replace("_K", r"_[1-9][0-9]*")
        .replace("LAYER", "[0-9]+")
    ): key
    for key in GLOSSARY
    if "SET" in key or "COMPONENT" in key or key.endswith(("_K", "/LAYER"))
}


class UnknownMetricError(ValueError):
    """A key that GLOSSARY does not explain."""


def explain(key: str) -> Entry:
    """The entry of a key, its SET and K filled in or not."""
    if key in GLOSSARY:
        return GLOSSARY[key]
    for pattern, name in _PATTERNS.items():
        if pattern.fullmatch(key):
            return GLOSSARY[name]
    near = difflib.get_close_matches(key, GLOSSARY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "give it a line in r3.metrics.GLOSSARY"
    raise UnknownMetricError(f"unknown metric {key!r}: {hint}")


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the machine's speed and memory, and so differs between two equal runs."""
    explain(key)
    return key.startswith(("time/", "memory/")) or key == "perf/tokens_per_s"


def tensorboard_layout(eval_names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: the page to watch, then what replay is worth in this very run."""
    pages = {
        "1 health": {
            "reward and evaluation": ["reward/mean", *(f"eval/{name}/accuracy" for name in eval_names)],
            "mismatch k3": ["mismatch/k3"],
            "mismatch tail": ["mismatch/f2", "mismatch/abs_p99", "mismatch/abs_max"],
            "routes": ["routing/agreement", "routing/coverage"],
            "importance-weight ESS": ["mismatch/ess"],
            "gradient norms": ["optim/grad_norm", "optim/router_grad_norm"],
            "entropy": ["policy/entropy"],
            "response length": ["rollout/response_tokens_mean"],
        },
        "2 replay against live routes": {
            "k3": ["mismatch/k3_replay", "mismatch/k3_live"],
            "k3, live / replayed": ["mismatch/k3_ratio"],
            "f2": ["mismatch/f2_replay", "mismatch/f2_live"],
            "largest difference": ["mismatch/abs_max_replay", "mismatch/abs_max_live"],
        },
    }
    # TensorBoard takes a tag for the beginning of a regular expression's match: mismatch/f2 would draw f2_live too.
    return {
        page: {
            chart: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]] for chart, tags in charts.items()
        }
        for page, charts in pages.items()
    }


class Gathering(Protocol):
    """The axis over which rows are gathered; `r3.mesh.Axis` is one."""

    @property
    def rank(self) -> int: ...

    def all_gather_object(self, item: Any) -> list[Any]: ...


class Meter:
    """Collects the parts of metrics on every rank; once a step they meet, and rank 0 writes and shows the row.

    Args:
        run_dir: where rank 0 writes metrics.jsonl and TensorBoard's events; None = nowhere.
        axis: the ranks whose parts make a row. All of them call `close_step`.
        config: of the run.
        on_phase: told the phase whenever it changes or proceeds: the watchdog's `beat`.
        first_step: steps that a resumed run has behind it; its rows go on from there.
        stream: the console; None = stdout.
    """

    def __init__(
        self,
        run_dir: RunDir | None,
        axis: Gathering,
        config: Config,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        first_step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self._axis = axis
        self._steps = config.train.steps
        self._on_phase = on_phase
        self._console = Console(speaks=axis.rank == 0, progress=config.log.progress, stream=stream)
        self._run_dir = run_dir if axis.rank == 0 else None
        self._events: Any = None
        if self._run_dir and config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run hides what the killed one wrote after the checkpoint it resumes from.
            purge_step = first_step + 1 if first_step else None
            self._events = SummaryWriter(str(self._run_dir.tensorboard), purge_step=purge_step)
            self._events.add_custom_scalars(tensorboard_layout(config.eval.name))
        self._last_step = first_step if first_step else -1  # a fresh run may report a step 0
        self._agreement: deque[dict[int, float]] = deque(maxlen=STEPS)
        self._parts: dict[str, list[Partial]] = {}
        self._seconds: dict[str, float] = {}
        self._open_phases: list[str] = []
        self._began: float | None = None

    def header(self, lines: Sequence[str]) -> None:
        """Show what runs."""
        self._console.header(lines)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Phases may nest (the outer one's time includes the inner one's) and repeat (times add up)."""
        explain(f"time/{name}_s")
        began = time.perf_counter()
        self._began = began if self._began is None else self._began
        self._open_phases.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self._open_phases.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
            self._beat()

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Callable[..., None]]:
        """A progress bar on rank 0's terminal; the yielded `tick(count=1)` moves it, and tells the watchdog."""
        with self._console.progress(total, label) as advance:

            def tick(count: int = 1) -> None:
                advance(count)
                self._beat()

            yield tick

    def add(self, parts: Mapping[str, Partial]) -> None:
        """Take this rank's parts of some metrics. May be called any number of times a step, on any ranks."""
        for key, part in parts.items():
            explain(key)
            if not callable(getattr(part, "reduce", None)):
                raise TypeError(
                    f"{key}: {part!r} is no partial of r3.diagnostics, so nobody knows how to merge it"
                )
            self._parts.setdefault(key, []).append(part)

    def close_step(self, step: int) -> dict[str, float]:
        """Merge everything since the last row into one, in one collective; all ranks call and get the same row."""
        if step <= self._last_step:
            raise ValueError(
                f"a row of step {step} after one of step {self._last_step} would repeat the step"
            )
        self._on_phase("report")
        now = time.perf_counter()
        mine: dict[str, list[Partial]] = self._parts | {
            f"time/{name}_s": [Max(seconds)] for name, seconds in self._seconds.items()
        }
        if self._began is not None:
            mine["time/step_s"] = [Max(now - self._began)]
        self._parts, self._seconds, self._began, self._last_step = {}, {}, None, step

        ranks = self._axis.all_gather_object(mine)
        row = _merge(ranks)
        if row.get("time/step_s") and "rollout/tokens" in row:
            row["perf/tokens_per_s"] = row["rollout/tokens"] / row["time/step_s"]
        row = dict(sorted(row.items()))
        if self._run_dir:
            self._run_dir.append_metrics({"step": step, **row})
        if self._events:
            by_layer = {int(key.removeprefix(_LAYER)): row[key] for key in row if key.startswith(_LAYER)}
            for key, value in row.items():
                if not key.startswith(_LAYER):  # a picture instead of as many curves as layers
                    self._events.add_scalar(key, value, global_step=step)
            if by_layer:
                self._agreement.append(by_layer)
                self._events.add_image(
                    _LAYER.rstrip("/"), heat_strip(self._agreement), global_step=step, dataformats="HWC"
                )
            for key, counts in _histograms(ranks).items():
                self._draw(key, counts, step)
            self._events.flush()
        self._console.line(step_line(row, step, self._steps))
        self._beat()
        return row

    def close(self) -> None:
        """Write out what TensorBoard still holds."""
        if self._events:
            self._events.close()

    def _draw(self, key: str, counts: np.ndarray, step: int) -> None:
        if not counts.any():
            return
        middles = (LOG10_EDGES[1:] + LOG10_EDGES[:-1]) / 2
        self._events.add_histogram_raw(
            key,
            min=float(LOG10_EDGES[0]),
            max=float(LOG10_EDGES[-1]),
            num=int(counts.sum()),
            sum=float((counts * middles).sum()),
            sum_squares=float((counts * middles**2).sum()),
            bucket_limits=LOG10_EDGES[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def _beat(self) -> None:
        self._on_phase(self._open_phases[-1] if self._open_phases else "between phases")


def _histograms(ranks: Sequence[Mapping[str, Sequence[Partial]]]) -> dict[str, np.ndarray]:
    found: dict[str, list[LogHistogram]] = {}
    for rank in ranks:
        for key, parts in rank.items():
            found.setdefault(key, []).extend(part for part in parts if isinstance(part, LogHistogram))
    return {key: LogHistogram.merge(parts) for key, parts in sorted(found.items()) if parts}


def _merge(ranks: Sequence[Mapping[str, Sequence[Partial]]]) -> dict[str, float]:
    row = {}
    for key in set().union(*ranks):
        parts = [part for rank in ranks for part in rank.get(key, ())]
        if len(kinds := {type(part) for part in parts}) > 1:
            raise TypeError(
                f"{key}: its parts are of different kinds: {sorted(kind.__name__ for kind in kinds)}"
            )
        value = type(parts[0]).reduce(parts)
        if value is not None:
            row[key] = value
    return row
