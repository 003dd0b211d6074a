"""Keys in settings are refused: which texts look like one, and which do not."""

from pathlib import Path

import pytest
import yaml

from r3.checks import problems
from r3.cli import parse as cli
from r3.config import looks_like_key, to_yaml
from tests.errors import Patch
from tests.tables import table
from tests.tiny import tiny_config

TEXTS = table("keys")
# In two parts, so that no scanner takes this file for a leak.
BY_FORM = [
    *("sk-" + "Ab12Cd34Ef56Gh78Ij90", "hf_" + "AbCdEfGhIjKlMnOpQrSt", "AKIA" + "IOSFODNN7EXAMPLE"),
    *("ghp_" + "0123456789abcdefghijABCDEF", "xoxb-" + "123456789012-abcdef"),
    *("AIza" + "SyA1234567890abcdefghijklmnopqrstuv", "sk-ant-" + "api03-Ab12Cd34Ef56Gh78Ij90"),
]


@pytest.mark.parametrize("text", [*(text for what, text in TEXTS if what == "refused"), *BY_FORM])
def test_a_setting_with_a_key_is_refused_without_showing_it(text: str) -> None:
    config = tiny_config(reward={"args": ("n=3", text)})
    (problem,) = [each for each in problems(config, 1) if "looks like a key" in each.rule]
    assert problem.place == "reward.args"
    assert text[2:] not in str(problem) and "hunter2" not in str(problem)
    assert "reward.api_key_env" in problem.fix


@pytest.mark.parametrize("text", [text for what, text in TEXTS if what == "accepted"])
def test_what_is_no_key_is_accepted(text: str) -> None:
    assert not looks_like_key(text)


def test_a_path_that_exists_is_no_key(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "hf_" + "ExportOfOurModelWithAVeryLongName"
    assert looks_like_key(name)
    Path(name).mkdir()
    assert not looks_like_key(name) and not looks_like_key(f"{name}:f")


def test_settings_that_an_earlier_version_hid_are_to_be_given_again(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(response, prompt, api_name=''): return 1.0\n")
    argv = ["--parallel.ep", "1", "--reward.function", "mine.py:f", "--log.dir", "run"]
    config = cli.parse(["tiny", *argv]).config
    Path("run").mkdir()
    settings = yaml.safe_load(to_yaml(config))
    settings["reward"]["args"] = ["api_key=[hidden]"]
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit):
        cli.parse(["--from", "run"])
    said = capsys.readouterr().err
    words = "has [hidden], which earlier versions wrote in place of a key. Fix: give it again"
    assert words in said
    again = cli.parse(["--from", "run", "--reward.args", "api_name=b"])
    assert again.config.reward.args == ("api_name=b",)


@pytest.mark.timeout(20)  # patterns that try every beginning take minutes
def test_a_long_text_is_no_reason_to_wait() -> None:
    for text in ("a" * 20000, "--" * 10000, "--a" * 7000):
        assert not looks_like_key(text)
