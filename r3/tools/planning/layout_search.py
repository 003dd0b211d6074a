"""Search settings that fit a device: layout, micro-batch, recomputation, optimizer, engine.

Every proposal is checked: it passes the checks of the command line, and its plan fits. Only
settings that change neither data nor algorithm are varied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from r3.config import Config, Problem, flatten, with_values
from r3.config.layout import check_layout, check_lengths
from r3.config.rules import Findings, check_batch
from r3.models.shape import ModelShape
from r3.tools.planning.memory_plan import GIB, PHASES, Fit, fit, memory

_POLICY_PHASES = ("TRAIN", "OPTIMIZER", "SAVE")
_ENGINE_PHASES = ("SYNC", "GENERATE")
RANKS_PER_MACHINE = 8
_RECOMPUTE = ("none", "selective", "moe", "full")
_LONG = 8192  # tokens of a sequence above which context parallelism is tried

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings that fit.

    Attributes:
        changes: full name -> value, where it differs from the config the search began with.
        fit: memory.
    """

    changes: Values
    fit: Fit

    @property
    def flags(self) -> str:
        """The changes as flags of the command line."""
        return " ".join(f"--{name} {value}" for name, value in self.changes.items())


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        proposals: at most one per layout of the ranks, the best first.
        tried: number of layouts.
        lacking_gib: phase -> GiB that even the best layout for that phase lacks.
        refused: what the checks refuse in layouts whose memory suffices; of the layout with the
            fewest such problems.
    """

    proposals: tuple[Proposal, ...]
    tried: int
    lacking_gib: Mapping[str, float]
    refused: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class _Target:
    """What the search is for."""

    config: Config
    shape: ModelShape
    world_size: int
    device_gib: float
    few_changes: bool

    def changes(self, values: Values) -> dict[str, Any]:
        before = flatten(self.config)
        return {name: value for name, value in values.items() if value != before[name]}

    def rank(self, values: Values) -> tuple[Any, ...]:
        """Smaller is better: less is recomputed, streamed and split, then sizes are smaller."""
        all_values = flatten(self.config) | values
        count = len(self.changes(values))
        sizes = [all_values[f"parallel.{name}"] for name in ("tp", "cp", "pp", "engine_tp", "ep")]
        return (
            count if self.few_changes else 0,
            _RECOMPUTE.index(all_values["model.recompute"]),
            all_values["train.optimizer"] == "streamed",
            -all_values["train.micro_batch_tokens"],
            *sizes,
            count,
            -all_values["engine.memory_fraction"],
        )

    def is_short(self, values: Values, plan: Fit) -> bool:
        """Whether the cache holds less than a quarter of what an engine could decode at a time."""
        size = values["parallel.engine_tp"]
        conversations = self.config.rollout.samples_per_step * size / self.world_size
        most = min(conversations, self.config.engine.max_num_seqs)
        return plan.cached_sequences < most / 4

    def fit(self, values: Values) -> Fit:
        config = with_values(self.config, values)
        return fit(config, self.shape, self.world_size, self.device_gib)


def search(
    config: Config,
    shape: ModelShape,
    world_size: int,
    device_gib: float,
    *,
    few_changes: bool = False,
) -> Search:
    """Find settings under which the config fits.

    Those come first that recompute, stream and split the least, and then the smallest sizes.

    Args:
        config: the settings to start from.
        shape: the model's.
        world_size: number of ranks.
        device_gib: memory of a rank's device.
        few_changes: put settings with the fewest changes first.
    """
    target = _Target(config, shape, world_size, device_gib, few_changes)
    phases = PHASES if config.uses_engine else _POLICY_PHASES
    lacking = dict.fromkeys(phases, float("inf"))
    ranked: list[tuple[tuple[Any, ...], Proposal]] = []
    refused: list[Problem] = []
    tried = 0
    for layout in layouts(config, shape, world_size):
        tried += 1
        # The passes do not depend on the engine, nor the engine on the passes.
        passes = [layout | values for values in _pass_settings(config, shape, layout)]
        own = _best(target, passes, _POLICY_PHASES, lacking)
        engine: Values | None = {}
        if not config.uses_engine:  # its size must divide the ranks all the same
            engine = {"parallel.engine_tp": 1} if world_size % config.parallel.engine_tp else {}
        else:
            engines = [layout | values for values in _engine_settings(target, layout)]
            engine = _best(target, engines, _ENGINE_PHASES, lacking)
        if own is None or engine is None:
            continue
        values = {**own, **engine}
        candidate = with_values(config, values)
        fits = target.fit(values)
        if not fits.fits:
            continue
        if problems := refusals(candidate, shape, world_size):
            refused = min(refused or problems, problems, key=len)
            continue
        ranked.append((target.rank(values), Proposal(changes=target.changes(values), fit=fits)))
    ranked.sort(key=lambda item: item[0])
    return Search(
        proposals=tuple(proposal for _, proposal in ranked),
        tried=tried,
        lacking_gib={phase: gib for phase, gib in lacking.items() if gib > 0},
        refused=tuple(refused),
    )


def _best(
    target: _Target, options: Sequence[Values], phases: Sequence[str], lacking: dict[str, float]
) -> Values | None:
    """The best of the options that fit in these phases; notes in `lacking` what is missing."""
    ranked = []
    for values in options:
        plan = target.fit(values)
        for phase in phases:
            missing = plan.needs_gib[phase] - plan.usable_gib
            lacking[phase] = min(lacking[phase], missing)
        holds_a_sequence = phases != _ENGINE_PHASES or plan.cached_sequences >= 1
        if holds_a_sequence and not plan.lacking_gib.keys() & set(phases):
            is_short = phases == _ENGINE_PHASES and target.is_short(values, plan)
            ranked.append(((is_short, *target.rank(values)), values))
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def layouts(config: Config, shape: ModelShape, world_size: int) -> Iterator[dict[str, Any]]:
    """The layouts of the ranks that the model allows: tp, cp, pp, ep and etp.

    tp stays inside a machine. cp is tried for long sequences. etp is 1 or tp. Layouts that an
    exact check would refuse may be among them.
    """
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    longest = config.longest_sequence(shape.max_position_embeddings)
    parallel = config.parallel
    tps = [size for size in sizes if size <= RANKS_PER_MACHINE and shape.num_kv_heads % size == 0]
    cps = [size for size in sizes if size in (1, parallel.cp) or (longest > _LONG and size <= 16)]
    pps = [size for size in sizes if size <= shape.num_layers]
    eps = [size for size in sizes if shape.moe_layers and shape.num_experts % size == 0] or [1]
    for tp, cp, pp, ep in product(tps, cps, pps, eps):
        for etp in sorted({0, 1} if tp > 1 and shape.moe_layers else {0}):
            if world_size % (tp * cp * pp) or world_size % ((etp or tp) * ep * pp):
                continue
            values: dict[str, Any] = dict(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
            if pp != parallel.pp:
                values |= {"vpp": 1, "pp_layers": ()}
            yield {f"parallel.{name}": value for name, value in values.items()}


def _pass_settings(config: Config, shape: ModelShape, layout: Values) -> Iterator[Values]:
    """Recomputation, place of the optimizer, and micro-batches down to the smallest that works."""
    multiple = layout["parallel.tp"] * layout["parallel.cp"] * 2
    sizes = [config.train.micro_batch_tokens]
    if config.data.max_prompt_tokens:  # otherwise it bounds prompts, so it stays
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        while sizes[-1] // 2 >= longest and sizes[-1] // 2 % multiple == 0:
            sizes.append(sizes[-1] // 2)
    kinds = [kind for kind in _RECOMPUTE if shape.moe_layers or kind != "moe"]
    for recompute, size, optimizer in product(kinds, sizes, ("resident", "streamed")):
        yield {
            "model.recompute": recompute,
            "train.micro_batch_tokens": size,
            "train.optimizer": optimizer,
        }


def _engine_settings(target: _Target, layout: Values) -> Iterator[Values]:
    """Sizes of an engine, each with the largest share of the device that the policy leaves."""
    config, shape, world_size = target.config, target.shape, target.world_size
    for size in range(1, min(world_size, RANKS_PER_MACHINE) + 1):
        if world_size % size or shape.num_heads % size or shape.moe_ffn_size % size:
            continue
        values = {"parallel.engine_tp": size}
        if config.engine.kv_cache_gib:
            yield values
            continue
        candidate = with_values(config, {**layout, **values})
        parts = memory(candidate, shape, world_size, target.device_gib)["GENERATE"]
        names = ("engine weights", "engine buffers", "KV cache")
        others = sum(size for name, size in parts.items() if name not in names) / GIB
        largest = target.fit({**layout, **values}).usable_gib - others
        share = int(largest / target.device_gib * 20) / 20
        for fraction in {min(share, 0.9), config.engine.memory_fraction}:
            if 0 < fraction < 1:
                yield values | {"engine.memory_fraction": fraction}


def refusals(config: Config, shape: ModelShape, world_size: int) -> list[Problem]:
    """What the checks of batch, layout and lengths find wrong."""
    errors = Findings(config)
    check_batch(config, errors, world_size)
    check_layout(config, errors, shape, world_size)
    check_lengths(config, errors, shape)
    return errors.problems
