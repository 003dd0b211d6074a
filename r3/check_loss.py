"""Check a loss or an advantage of your own against the contract of the built-in ones.

    python -m r3.check_loss my.py:f                      a loss, f(inputs, bounds)
    python -m r3.check_loss my.py:g --advantage          an advantage, g(rewards_R, groups_R)
    python -m r3.check_loss my.py:f --args tau=0.5       with values for further parameters

Takes seconds and needs no model. Exit code 1: a check fails. Exit code 2: the function cannot be
loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from r3.config import ADVANTAGES, LOSSES, SETTINGS, AlgoConfig, ConfigError, Problem
from r3.runtime.terminal import own_streams, say
from r3.tools.contract import run_contract
from r3.user_code.algorithm import AlgorithmError


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="r3.check_loss",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("function", help="path/to/file.py:function, or the name of a built-in one")
    parser.add_argument("--advantage", action="store_true", help="the function is an advantage")
    parser.add_argument(
        "--args", nargs="*", default=[], help="keyword arguments, each key=value, as in algo.args"
    )
    return parser.parse_args(argv)


def algo_of(words: argparse.Namespace) -> AlgoConfig:
    """The settings of a run that would use the function.

    Raises:
        ConfigError: there is no such function, or an argument is not key=value.
    """
    name = "advantage" if words.advantage else "loss"
    values = {f"algo.{name}": words.function, "algo.args": tuple(words.args)}
    problems = [SETTINGS[field].problem(value) for field, value in values.items()]
    if words.args and words.function in (*LOSSES, *ADVANTAGES):
        rule, fix = f"the built-in {words.function} takes none", "leave them out"
        problems.append(Problem("algo.args", words.args, rule, fix))
    if found := [problem for problem in problems if problem]:
        raise ConfigError(found)
    args = values["algo.args"]
    if words.advantage:
        return AlgoConfig(advantage=words.function, args=args)
    return AlgoConfig(loss=words.function, args=args)


def main(argv: Sequence[str] | None = None) -> None:
    """Print every check with its result; end with code 1 if one fails."""
    words = parse(sys.argv[1:] if argv is None else argv)
    role = "advantage" if words.advantage else "loss"
    try:
        findings = run_contract(algo_of(words), role)
    except (AlgorithmError, ConfigError) as error:
        say(f"r3.check_loss: {error}", error=True)
        raise SystemExit(1 if isinstance(error, AlgorithmError) else 2) from None
    say(f"{words.function} as algo.{role}")
    for each in findings:
        word = "ok" if not each.fault else "FAILS" if each.required else "note"
        say(f"  {word:6}{each.claim}")
        if each.fault:
            say(f"        {each.fault}")
    failed = sum(bool(each.fault) and each.required for each in findings)
    if failed:
        say(f"{failed} of {len(findings)} checks failed: do not train with this function")
        raise SystemExit(1)
    say(f"no check of {len(findings)} failed")


if __name__ == "__main__":
    own_streams()
    main()
