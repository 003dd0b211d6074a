"""Settings that contradict `train.objective`."""

from __future__ import annotations

from r3.checks.findings import Findings
from r3.config import OF_OBJECTIVE, Config, as_typed, shown


def check_objective(config: Config, found: Findings) -> None:
    """What the objective brings has its value; a teacher alone says what is learnt by distill."""
    objective = config.train.objective
    for name, value in OF_OBJECTIVE[objective].items():
        if found.sound(name) and found.values[name] != value:
            fix = f"leave it out, or add --{name} {as_typed(value) or repr('')}"
            found.add(name, f"train.objective {objective} needs {shown(value)}", fix)
    if objective == "distill" and config.algo.takes_kl_from_reward:
        rule = "train.objective distill learns from the teacher alone, not from rewards"
        found.add("algo.kl_in", rule, "add --algo.kl_in loss, or --algo.kl_coef 0")
