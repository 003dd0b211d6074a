"""Keys in settings are refused: which texts look like one, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from r3.checks import problems
from r3.cli import parse as cli
from r3.config import looks_like_key, to_yaml
from tests.tiny import tiny_config

pytestmark = pytest.mark.unit

S = "hunter2"  # looks like nothing: only its name tells
BY_NAME = [
    *(
        f"{name}={S}"
        for name in (
            *("api_key", "judge.api_key", "apiKey", "token", "HF_TOKEN", "accessToken"),
            *("password", "pwd", "passwd", "db_pass", "passphrase", "PGPASSWORD", "MYSQL_PWD"),
            *("secret", "client_secret", "credentials", "access_key", "private_key", "openai_key"),
            "subscription-key",
        )
    ),
    f"api_key={S} {S}",
    f"auth=Bearer {S}",
    f"authorization=Bearer {S}",
    f'headers={{"Authorization": "Bearer {S}"}}',
    f'headers={{"X-Api-Key": "{S}"}}',
    f"headers={{'api-key': '{S}'}}",
    f'config={{"a": 1, "password": "{S}"}}',
    f"python agent.py --api-key={S} --n 3",
    f"python agent.py --api-key {S} --n 3",
    f"agent --token {S}",
    f"agent --password '{S}'",
    f"agent --judge.api_key {S}",
    f"OPENAI_API_KEY={S} python agent.py",
    f"env A=1 OPENAI_API_KEY={S} python agent.py",
    f'A=1 OPENAI_API_KEY="{S} x" python agent.py',
    f"AWS_SECRET_ACCESS_KEY={S} aws s3 ls",
    f"curl -H 'Authorization: Bearer {S}' http://host",
    f'curl -H "X-Api-Key: {S}" http://host',
    f"curl -H 'Ocp-Apim-Subscription-Key: {S}' http://host",
    f"curl -H 'PRIVATE-TOKEN: {S}' http://host",
    f"http://user:{S}@host:8000/v1",
    f"https://:{S}@host",
    f"postgres://me:{S}@db/x",
    f"proxy=http://user:{S}@host:3128",
    f"Look at http://user:{S}@host/x please.",
    f"https://host/v1?api-version=2024-02-01&api-key={S}",
    f"https://host/v1?a=1&token={S}&b=2",
    f"https://host/v1?access_token={S}#top",
    f"DefaultEndpointsProtocol=https;AccountKey={S}",
]
# In two parts, so that no scanner takes this file for a leak.
BY_FORM = [
    *("sk-" + "Ab12Cd34Ef56Gh78Ij90", "hf_" + "AbCdEfGhIjKlMnOpQrSt", "AKIA" + "IOSFODNN7EXAMPLE"),
    *("ghp_" + "0123456789abcdefghijABCDEF", "xoxb-" + "123456789012-abcdef"),
    *("AIza" + "SyA1234567890abcdefghijklmnopqrstuv", "sk-ant-" + "api03-Ab12Cd34Ef56Gh78Ij90"),
]
HARMLESS = [
    *("max_tokens=512", "token_budget=5", "eos_token=<|im_end|>", "pad_token=x", "stop_token=END"),
    *("token_id=151645", "tokenizer=qwen", "prompt_key=question", "answer_key=solution", "key=q"),
    *("sort_key=name", "public_key=abc", "cache_key=k1", "api_key_env=OPENAI_API_KEY", "token=3"),
    *("pass_at=4", "n_pass=3", "secretary=Ann", "compass=north", "bypass=true", "auth=none"),
    *("auth=oauth2", "auth_type=basic", "password=", "api_key=$KEY", "api_key=${JUDGE_KEY}"),
    *("PWD=/home/me", "credentials=/etc/key.json", "monkey=banana", "Sign=1", "x = y"),
    "https://host.openai.azure.com/openai/deployments/x?api-version=2024-02-01",
    "http://localhost:8000/v1",
    "https://medium.com/@user/post",
    "ssh://git@github.com/o/n",
    "Look at https://example.com/a?b=c and answer.",
    "What is the password? It is a secret: never tell.",
    "Say Bearer of bad news, Basic understanding.",
    "The token is in the answer: key point.",
    "python agent.py --max-tokens 512 --temperature 0.7",
    "python agent.py --eos-token </s>",
    "agent --api-key $KEY run",
    "docker run -u 1000:1000 image",
    "a == b and token == c",
    "token = tokens[0]",
    "hub:owner/name@0123456789abcdef0123456789abcdef01234567",
    "0123456789abcdef0123456789abcdef01234567",
    "runs/Qwen3-30B-A3B-FP8-w4a16-lr1e-6-g8/hf/step_000025",
    "hf-internal-testing/tiny-random-model",
    "sk-learn-contrib-models",
    "Put the answer after ####. Use \\boxed{}.",
    "<think>token</think>",
    "gym:chain_sum,size=20,seed=3",
    "num-tokens: 5",
    "answer-key: B",
    "my_reward.py:score_with_token",
]


@pytest.mark.parametrize("text", [*BY_NAME, *BY_FORM])
def test_a_setting_with_a_key_is_refused_without_showing_it(text: str) -> None:
    config = tiny_config(reward={"args": ("n=3", text)})
    (problem,) = [each for each in problems(config, 1) if "looks like a key" in each.rule]
    assert problem.field == "reward.args"
    assert text[2:] not in str(problem) and S not in str(problem)
    assert "reward.api_key_env" in problem.fix


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_key_is_accepted(text: str) -> None:
    assert not looks_like_key(text)


def test_a_path_that_exists_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "hf_" + "ExportOfOurModelWithAVeryLongName"
    assert looks_like_key(name)
    Path(name).mkdir()
    assert not looks_like_key(name) and not looks_like_key(f"{name}:f")


def test_settings_that_an_earlier_version_hid_are_to_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
