"""Check a loss or an advantage of your own against the contract of the built-in ones.

    python -m r3.check_loss my.py:f                      a loss, f(inputs, bounds)
    python -m r3.check_loss my.py:g --advantage          an advantage, g(rewards_R, groups_R)
    python -m r3.check_loss my.py:f --args tau=0.5       with values for further parameters

Takes seconds and needs no model. Exit code 1: a check fails. Exit code 2: the function cannot be
loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from r3.config import ADVANTAGES, LOSSES, SETTINGS, AlgoConfig, ConfigError, Problem
from r3.runtime.terminal import own_streams, say
from r3.tools.contract import run_contract
from r3.user_code.algorithm import AlgorithmError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="r3.check_loss", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("function", help="path/to/file.py:function, or the name of a built-in one")
    parser.add_argument("--advantage", action="store_true", help="the function is an advantage")
    parser.add_argument(
        "--args", nargs="*", default=[], help="keyword arguments, each key=value, as in algo.args"
    )
    return parser.parse_args(argv)


def algo_of(args: argparse.Namespace) -> AlgoConfig:
    """The settings of a run that would use the function.

    Raises:
        ConfigError: there is no such function, or an argument is not key=value.
    """
    name = "advantage" if args.advantage else "loss"
    values = {f"algo.{name}": args.function, "algo.args": tuple(args.args)}
    problems = [SETTINGS[field].problem(value) for field, value in values.items()]
    if args.args and args.function in (*LOSSES, *ADVANTAGES):
        rule, fix = f"the built-in {args.function} takes none", "leave them out"
        problems.append(Problem("algo.args", args.args, rule, fix))
    if faults := [problem for problem in problems if problem]:
        raise ConfigError(faults)
    checked_args = values["algo.args"]
    if args.advantage:
        return AlgoConfig(advantage=args.function, args=checked_args)
    return AlgoConfig(loss=args.function, args=checked_args)


def main(argv: Sequence[str] | None = None) -> None:
    """Print every check with its result; end with code 1 if one fails."""
    args = parse(argv)
    role = "advantage" if args.advantage else "loss"
    try:
        findings = run_contract(algo_of(args), role)
    except (AlgorithmError, ConfigError) as error:
        say(f"r3.check_loss: {error}", error=True)
        raise SystemExit(1 if isinstance(error, AlgorithmError) else 2) from None
    say(f"{args.function} as algo.{role}")
    for finding in findings:
        word = "ok" if not finding.fault else "FAILS" if finding.required else "note"
        say(f"  {word:6}{finding.claim}")
        if finding.fault:
            say(f"        {finding.fault}")
    failed = sum(bool(finding.fault) and finding.required for finding in findings)
    if failed:
        say(f"{failed} of {len(findings)} checks failed: do not train with this function")
        raise SystemExit(1)
    say(f"no check of {len(findings)} failed")


if __name__ == "__main__":
    own_streams()
    main()
