"""Collect the problems that the checks find."""

from __future__ import annotations

from r3.config import Config, Problem, flatten


class Findings:
    """Problems so far, and the settings they are about.

    A rule that combines several settings first asks whether each is `sound` by itself.
    """

    def __init__(self, config: Config) -> None:
        self.values = flatten(config)
        self.problems: list[Problem] = []

    def add(
        self, name: str, rule: str, fix: str, value: object = None, *, is_missing: bool = False
    ) -> None:
        """Add a problem with a setting, or with `value`, a part of it; each problem once."""
        shown = self.values[name] if value is None else value
        problem = Problem(name, shown, rule, fix, is_missing=is_missing)
        if problem not in self.problems:
            self.problems.append(problem)

    def sound(self, *names: str) -> bool:
        """Whether none of these settings has a problem yet."""
        return not any(problem.field in names for problem in self.problems)
