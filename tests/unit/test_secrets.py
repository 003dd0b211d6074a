"""Secrets in settings: what is hidden, what is not, and every place that settings go to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from r3.cli import parse as cli
from r3.config import ConfigError, Problem, fixed_changes, from_yaml, public, to_yaml
from r3.configs import PRESETS
from r3.metrics.trackers import public_settings
from r3.run.failures import failure_text

pytestmark = pytest.mark.unit

S = "hunter2"  # looks like nothing: only its name tells
BY_NAME = [
    *(
        f"{name}={S}"
        for name in (
            *("api_key", "judge.api_key", "apiKey", "token", "HF_TOKEN", "accessToken"),
            *("password", "pwd", "passwd", "db_pass", "passphrase", "PGPASSWORD", "MYSQL_PWD"),
            *("secret", "client_secret", "credentials", "access_key", "private_key", "openai_key"),
            *("auth", "subscription-key"),
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
    f"curl -H 'Cookie: session={S}' http://host",
    f"curl -H 'Ocp-Apim-Subscription-Key: {S}' http://host",
    f"curl -H 'PRIVATE-TOKEN: {S}' http://host",
    f"curl -u me:{S} http://host",
    f"curl --user me:{S} http://host",
    f"http://user:{S}@host:8000/v1",
    f"https://:{S}@host",
    f"postgres://me:{S}@db/x",
    f"proxy=http://user:{S}@host:3128",
    f"Look at http://user:{S}@host/x please.",
    f"https://host/v1?key={S}",
    f"https://host/v1?api-version=2024-02-01&api-key={S}",
    f"https://host/v1?a=1&token={S}&b=2",
    f"https://blob/x?sv=1&sig={S}%3D",
    f"https://host/v1?access_token={S}#top",
    f"DefaultEndpointsProtocol=https;AccountKey={S}",
]
# In two parts, so that no scanner takes this file for a leak.
BY_FORM = [
    *("sk-" + "Ab12Cd34Ef56Gh78Ij90", "hf_" + "AbCdEfGhIjKlMnOpQrSt", "AKIA" + "IOSFODNN7EXAMPLE"),
    *("ghp_" + "0123456789abcdefghijABCDEF", "xoxb-" + "123456789012-abcdef"),
    *("AIza" + "SyA1234567890abcdefghijklmnopqrstuv", "sk-ant-" + "api03-Ab12Cd34Ef56Gh78Ij90"),
    "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxIn0.abc-DEF_123",
    "a1b2c3d4e5f6g7h8i9j0",
]
AROUND = ["{}", "use {} now", "argument={}"]
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


@pytest.mark.parametrize("text", BY_NAME)
def test_a_secret_is_found_by_its_name(text: str) -> None:
    shown = public(text)
    assert S not in shown and "[hidden]" in shown
    assert public(shown) == shown


@pytest.mark.parametrize("secret", BY_FORM[:-1])
@pytest.mark.parametrize("around", AROUND)
def test_a_secret_is_found_by_its_form(secret: str, around: str) -> None:
    assert public(around.format(secret)) == around.format("[hidden]")


def test_a_key_without_a_known_form_needs_a_name() -> None:
    assert public(f"key={BY_FORM[-1]}") == "key=[hidden]"
    assert public(f"Bearer {BY_FORM[-1]}") == "Bearer [hidden]"
    assert public(BY_FORM[-1]) == BY_FORM[-1]  # a model or a folder may be named so


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_is_not_touched(text: str) -> None:
    assert public(text) == text


def test_there_are_fifty_forms_and_as_many_harmless_ones() -> None:
    assert len(BY_NAME) + len(BY_FORM) >= 50 and len(HARMLESS) >= 50


def test_no_place_that_settings_go_to_has_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(response, prompt, api_key='', n=0): return 1.0\n")
    argv = ["--parallel.ep", "1", "--reward.function", "mine.py:f", "--reward.args", "n=3"]
    invocation = cli.parse(["tiny", *argv, f"api_key={S}"])
    assert f"api_key={S}" in invocation.config.reward.args
    config_yaml = to_yaml(invocation.config)
    places = [
        config_yaml,
        invocation.overrides,
        *invocation.differences,
        json.dumps(public_settings(invocation.config)),
        str(ConfigError([Problem("reward.args", (f"api_key={S}",), f"f(api_key='{S}')", "x")])),
        failure_text(ValueError(f"401 for Bearer {BY_FORM[-1]}"), rank=0, path=tmp_path / "a/b"),
    ]
    assert all("hidden" in place for place in (*places[:2], *places[-3:]))
    assert not any(S in place or BY_FORM[-1] in place for place in places)
    # Ranks that a Python program starts get the secret, in a file that no one else can read.
    assert S in invocation.overrides_with_secrets
    with pytest.raises(SystemExit):
        cli.parse(["tiny", "--parallel.ep", "1", "--reward.args", f"api_key={S}"])
    assert S not in capsys.readouterr().err


def test_a_run_with_a_secret_resumes_by_its_command_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(response, prompt, api_key=''): return 1.0\n")
    argv = ["--parallel.ep", "1", "--reward.function", "mine.py:f", "--log.dir", "run"]
    config = cli.parse(["tiny", *argv, "--reward.args", f"api_key={S}"]).config
    Path("run").mkdir()
    Path("run/config.yaml").write_text(to_yaml(config))
    written = from_yaml(to_yaml(config))
    assert written.reward.args == ("api_key=[hidden]",)
    assert fixed_changes(written, config) == {}
    changed = PRESETS["tiny"]()
    assert "reward.args" in fixed_changes(written, changed)
    with pytest.raises(SystemExit):
        cli.parse(["--from", "run"])
    said = capsys.readouterr().err
    assert (
        "has [hidden], which files of a run have in place of a secret. Fix: give it again" in said
    )
    assert cli.parse(["--from", "run", "--reward.args", "api_key=b"]).config.reward.args == (
        "api_key=b",
    )
