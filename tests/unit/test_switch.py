"""R3_KERNELS leaves kernels out, and refuses names that no kernel has."""

import pytest

from r3.checks import problems, warnings
from r3.cli.parse import parse
from r3.config import ConfigError
from r3.runtime import KERNELS, VARIABLE, chosen, is_on
from tests.errors import Capsys, Patch
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("words", "names"),
    [("all", set(KERNELS)), ("", set(KERNELS)), ("none", set()), ("triton", {"triton"})]
    + [(" triton, sampled_experts", {"triton"}), ("sampled_attention", set())],
)
def test_kernels_are_used_that_the_variable_names(
    words: str, names: set[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv(VARIABLE, words)
    assert {name for name in KERNELS if is_on(name)} == names
    assert problems(tiny_config(), 1) == []
    removed = [name for name in ("sampled_experts", "sampled_attention") if name in words]
    notes = [note for note in warnings(tiny_config(), 1) if VARIABLE in note]
    assert len(notes) == len(removed)
    assert all(name in note for name, note in zip(removed, notes, strict=True))


@pytest.mark.parametrize("words", ["tritons", "triton,", "none,triton", "all,triton", "ALL"])
def test_a_name_that_no_kernel_has_is_refused_with_the_list(
    words: str, monkeypatch: Patch, capsys: Capsys
) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE} = .*no kernel .*none or some of triton"):
        chosen(words)
    monkeypatch.setenv(VARIABLE, words)
    (problem,) = problems(tiny_config(), 1)
    assert problem.place == VARIABLE
    with pytest.raises(SystemExit):
        parse(["tiny", "--parallel.ep", "1"])
    assert f"{VARIABLE} = {words!r}: " in capsys.readouterr().err  # the preset did not set it


def test_all_kernels_are_used_without_the_variable(monkeypatch: Patch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert all(map(is_on, KERNELS))
