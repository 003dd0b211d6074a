"""Whether a run fits its devices, and which settings would make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from r3.checks import examine
from r3.config import Config, ConfigError, Problem, with_values
from r3.models.shape import ModelShape
from r3.tools.planning.layout_search import RANKS_PER_MACHINE, Proposal, Search, search
from r3.tools.planning.memory_plan import (
    CERTAIN,
    GIB,
    HOST_CERTAIN,
    RESERVE,
    Fit,
    cpu_memory,
    engine_bytes,
    fit,
    host_memory,
)

DEVICES: Mapping[str, float] = {
    "a100-40": 40,
    "a100-80": 80,
    "h100": 80,
    "h200": 141,
    "b200": 180,
}
"""GiB of memory of devices that have a name."""

_SHOWN_PROPOSALS = 3
_SEARCHED = ("parallel.", "rollout.prompts_per_step")  # --plan-for finds what they allow


def verdict(config: Config, shape: ModelShape, world_size: int, device_gib: float) -> str:
    """Lines that say whether the plan fits, and settings that make it fit if it does not."""
    plan = fit(config, shape, world_size, device_gib)
    if plan.fits:
        phase, needs = max(plan.needs_gib.items(), key=lambda item: item[1])
        return f"fits: {phase} needs most, {needs:.1f} of {_usable(plan)}\n{_cache(config, plan)}"
    return "\n".join(
        [
            f"does not fit {_usable(plan)}: {_lacking(plan)}",
            _remedy(config, shape, world_size, device_gib),
        ]
    )


def _usable(plan: Fit) -> str:
    return (
        f"{plan.usable_gib:.1f} GiB ({plan.device_gib:g} less {RESERVE:.0%} kept free for "
        "fragmentation)"
    )


def _lacking(plan: Fit) -> str:
    phases = [
        f"{phase} needs {plan.needs_gib[phase]:.1f} GiB, lacks {missing:.1f}"
        for phase, missing in plan.lacking_gib.items()
    ]
    if plan.cached_sequences < 1:
        phases.append("GENERATE leaves no KV cache for one sequence")
    return "; ".join(phases)


def _cache(config: Config, plan: Fit) -> str:
    if not config.uses_engine:
        return "no engine: nothing is sampled"
    return (
        f"the KV cache of an engine holds {plan.cached_sequences:,.0f} sequences of maximum "
        f"length; at most {config.engine.max_num_seqs} are decoded at a time"
    )


def _remedy(config: Config, shape: ModelShape, world_size: int, device_gib: float) -> str:
    """Tried settings that fit, those with the fewest changes; otherwise, how many devices do."""
    result = search(config, shape, world_size, device_gib, few_changes=True)
    if result.proposals:
        best = result.proposals[0]
        return f"{best.flags} make it fit (tried)"
    return _nowhere(config, shape, world_size, device_gib, result)


def _nowhere(
    config: Config, shape: ModelShape, world_size: int, device_gib: float, result: Search
) -> str:
    if result.refused and not result.lacking_gib:
        return _refused(config, shape, world_size, device_gib, result)
    lacks = ", ".join(f"{phase} {gib:.1f} GiB" for phase, gib in result.lacking_gib.items())
    text = (
        f"none of {result.tried} layouts of {world_size} devices of {device_gib:g} GiB fits, with "
        "any size of engine and micro-batch and any recomputation"
    )
    if lacks:
        text += f"; the best layout lacks: {lacks}"
    else:
        text += "; each lacks memory in another phase, or the checks refuse it"
    if not config.uses_lora:  # not tried: a search with adapters takes a minute
        flags = "--lora.rank 32" + " --lora.expert_rank 4" * bool(shape.moe_layers)
        text += f"\nadapters need less memory: ask again with {flags} (docs/lora.md)"
    for count in (2 * world_size, 4 * world_size, 8 * world_size):
        if search(config, shape, count, device_gib).proposals:
            return f"{text}\n{count} such devices would fit: --plan-for {count}x{device_gib:g}"
    return text


def _refused(
    config: Config, shape: ModelShape, world_size: int, device_gib: float, result: Search
) -> str:
    """Memory suffices: the settings that do not fit so many devices, and a batch that does."""
    lines = [f"memory is enough on {world_size} devices of {device_gib:g} GiB, but"]
    lines += [f"  - {problem}" for problem in result.refused]
    if [problem.place for problem in result.refused] == ["rollout.prompts_per_step"]:
        unit = math.lcm(world_size, config.train.updates_per_step)
        prompts = math.ceil(config.rollout.prompts_per_step / unit) * unit
        larger = with_values(config, {"rollout.prompts_per_step": prompts})
        if proposals := search(larger, shape, world_size, device_gib).proposals:
            flags = f"--rollout.prompts_per_step {prompts} {proposals[0].flags}".strip()
            lines.append(f"{flags} fit (tried)")
    return "\n".join(lines)


def plan_for(
    config: Config, shape: ModelShape, world_size: int, device_gib: float
) -> tuple[bool, str]:
    """The best settings for a number of devices, as flags to paste.

    Args:
        config: the settings to start from.
        shape: the model's.
        world_size: number of devices.
        device_gib: memory of each.

    Returns:
        Whether there are any, and the text to print.
    """
    result = search(config, shape, world_size, device_gib)
    if not result.proposals:
        return False, _nowhere(config, shape, world_size, device_gib, result)
    head = (
        f"{len(result.proposals)} of {result.tried} layouts of {world_size} devices of "
        f"{device_gib:g} GiB fit. Those that recompute, stream and split the least:"
    )
    entries: dict[str, str] = {}  # layouts with the same figures are one choice: the first
    for proposal in result.proposals:
        entries.setdefault(_figures(proposal), proposal.flags or "(the settings as they are)")
    shown = list(entries.items())[:_SHOWN_PROPOSALS]
    texts = [f"{number}. {flags}\n{text}" for number, (text, flags) in enumerate(shown, 1)]
    return True, "\n\n".join([head, *texts])


def _figures(proposal: Proposal) -> str:
    needs = ", ".join(f"{phase} {gib:.1f}" for phase, gib in proposal.fit.needs_gib.items())
    text = f"   GiB of {proposal.fit.usable_gib:.1f}: {needs}"
    cached = proposal.fit.cached_sequences
    if cached < math.inf:  # there is an engine
        text += f"\n   KV cache of an engine: {cached:,.0f} sequences of maximum length"
    return text


def memory_problems(
    config: Config, shape: ModelShape, world_size: int, device_gib: float
) -> tuple[list[Problem], list[str]]:
    """What cannot fit, and what probably does not.

    What cannot fit exceeds the device by parts whose size is certain. The other parts are
    estimates, so they only warn.

    Args:
        config: the settings.
        shape: the model's.
        world_size: number of ranks.
        device_gib: memory of a rank's device.

    Returns:
        Problems and warnings.
    """
    plan = fit(config, shape, world_size, device_gib)
    engine = config.engine
    share = engine.memory_fraction * device_gib
    weights = engine_bytes(config, shape) / GIB
    if not engine.kv_cache_gib and weights > share:
        rule = f"{share:.1f} GiB of the device are less than the engine's weights, {weights:.1f}"
        fix = _remedy(config, shape, world_size, device_gib)
        return [Problem("engine.memory_fraction", engine.memory_fraction, rule, fix)], []
    certain = {
        phase: {name: parts[name] / GIB for name in parts if name in CERTAIN}
        for phase, parts in plan.parts.items()
    }
    phase, sizes = max(certain.items(), key=lambda item: sum(item[1].values()))
    if (needs := sum(sizes.values())) > device_gib:
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in sizes.items() if gib)
        rule = f"{phase} needs {needs:.1f} GiB on each rank without any buffers ({parts})"
        fix = _remedy(config, shape, world_size, device_gib)
        return [Problem("device memory", f"{device_gib:.1f} GiB", rule, fix)], []
    if plan.fits:
        return [], []
    return [], [f"the plan does not fit {_usable(plan)}: {_lacking(plan)}; see --dry-run"]


def host_problems(
    config: Config,
    shape: ModelShape,
    world_size: int,
    host_gib: float,
    *,
    ranks: int | None = None,
    on_gpu: bool = True,
) -> tuple[list[Problem], list[str]]:
    """What cannot fit the memory of a machine, and what probably does not.

    Args:
        config: the settings.
        shape: the model's.
        world_size: number of ranks.
        host_gib: memory of the machine.
        ranks: number of ranks on it; None: as many as a machine of 8 devices has.
        on_gpu: whether ranks have a GPU. Otherwise policy and engine are in host memory too.

    Returns:
        Problems and warnings.
    """
    ranks = ranks or min(world_size, RANKS_PER_MACHINE)
    parts = host_memory(config, shape, world_size) if on_gpu else {}
    certain = {name: size for name, size in parts.items() if name in HOST_CERTAIN}
    if not on_gpu:
        certain = cpu_memory(config, shape, world_size)
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in certain.items() if size)
    needs = ranks * sum(certain.values()) / GIB
    if needs > host_gib:
        rule = f"{ranks} ranks need {needs:.1f} GiB on the host ({listed} per rank)"
        fix = "spread the ranks over more machines"
        fix += ", or set engine.sleep_level 2" * (config.engine.sleep_level == 1 and on_gpu)
        fix += ", or algo.kl_coef 0" * bool(config.algo.kl_coef and on_gpu)
        return [Problem("host memory", f"{host_gib:.1f} GiB", rule, fix)], []
    total = ranks * sum(parts.values()) / GIB
    if total <= host_gib * (1 - RESERVE):
        return [], []
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return [], [
        f"the plan needs {total:.1f} GiB of a host's {host_gib:g} for {ranks} ranks "
        f"({listed} per rank); see --dry-run"
    ]


def read_host(word: str) -> float:
    """Memory of a machine in GiB.

    Raises:
        ValueError: the word is no such number.
    """
    return _read_gib(word, "must be GiB of memory of a machine")


def _read_gib(word: str, rule: str) -> float:
    try:
        gib = float(word)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise ValueError(rule)
    return gib


def read_device(word: str) -> float:
    """GiB of a device, by its name (`DEVICES`) or as a number.

    Raises:
        ValueError: the word is neither.
    """
    if word in DEVICES:
        return DEVICES[word]
    return _read_gib(word, f"must be GiB of memory such as 80, or one of {', '.join(DEVICES)}")


def answer(
    word: str,
    config: Config,
    shape: ModelShape | None,
    named: Collection[str],
    problems: list[Problem],
    needed: Callable[[list[Problem]], list[Problem]],
) -> tuple[int, str]:
    """The best settings for the devices of --plan-for, and an exit code: 1 if none fits.

    Args:
        word: of the flag.
        shape: of a model that need not be here.
        named: settings that the user named.
        problems: what is wrong already, of which `needed` are no obstacles.
    """
    try:
        world_size, device_gib = read_plan_for(word)
    except ValueError as error:
        problems.append(Problem("--plan-for", word, str(error), "such as 8x80"))
        return 2, str(ConfigError(problems))
    # The search replaces the layout: a layout that does not fit these devices is no mistake.
    report = examine(replace(config, parallel=Config().parallel), world_size, shape, named)
    problems += [problem for problem in report.problems if not problem.place.startswith(_SEARCHED)]
    if len(problems) > len(needed(problems)) or report.shape is None:
        return 2, str(ConfigError(problems))
    fits, text = plan_for(config, report.shape, world_size, device_gib)
    return (0 if fits else 1), text


def read_plan_for(word: str) -> tuple[int, float]:
    """The number of devices and the memory of each that `8x80` or `8xh200` names.

    Raises:
        ValueError: the word is not of that form.
    """
    count, times, device = word.partition("x")
    if not times or not count.isdecimal() or not int(count):
        raise ValueError("must be the number of devices and their memory in GiB or name, as 8x80")
    return int(count), read_device(device)


def read_sizes(
    flags: Mapping[str, str], problems: list[Problem], *, plans: bool
) -> tuple[float | None, float | None]:
    """GiB of a device and of a host to plan for; None where no flag or a wrong one says it."""
    sizes: list[float | None] = []
    for name, read in (("device_gib", read_device), ("host_gib", read_host)):
        sizes.append(None)
        if name not in flags:
            continue
        rule, fix = "is for --dry-run and --check: a run knows its machine", "leave it out"
        if plans:
            try:
                sizes[-1] = read(flags[name])
                continue
            except ValueError as error:
                rule, fix = str(error), "such as 80"
        problems.append(Problem(f"--{name.replace('_', '-')}", flags[name], rule, fix))
    return sizes[0], sizes[1]


def unfit(
    config: Config,
    shape: ModelShape,
    world_size: int,
    device_gib: float | None,
    host_gib: float | None,
) -> tuple[list[Problem], list[str]]:
    """What does not fit devices and hosts of these sizes, and what fits hardly."""
    problems, doubts = list[Problem](), list[str]()
    if device_gib:
        problems, doubts = memory_problems(config, shape, world_size, device_gib)
    if host_gib:
        of_host = host_problems(config, shape, world_size, host_gib)
        problems, doubts = problems + of_host[0], doubts + of_host[1]
    return problems, doubts
