"""Scorers beside a real engine: samples do not depend on them, and scoring runs meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from r3 import assets
from r3.runtime.device import free_port
from tests.e2e import scorer_cases
from tests.families import classifier
from tests.runs import dumped, rows_of, run, soon, words
from tests.warm import interpreter
from tests.world import ROOT, run_world

pytestmark = pytest.mark.e2e

FUNCTIONS = """
import asyncio

async def slow(response, prompt):
    await asyncio.sleep(0.02)
    return float(len(response))

def picky(response, prompt):
    if len(response) % 3 == 0:
        raise ValueError("I do not like its length")
    return 1.0
"""


@pytest.fixture(scope="module")
def vllm_server() -> Iterator[str]:
    """vLLM's own OpenAI-compatible server with the shipped model, on loopback."""
    port = free_port()
    flags = words(
        f"--model {assets.TINY_MOE} --served-model-name grader --host 127.0.0.1 --port {port} "
        "--dtype float32 --max-model-len 512 --max-num-seqs 16 --enforce-eager "
        f"--kv-cache-memory-bytes {2**25}"
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    process = subprocess.Popen(
        [interpreter(), "-m", "tests.vllm_server", *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}/v1"
    try:

        def answers() -> bool:
            assert process.poll() is None, process.communicate()[0][-4000:]
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/models", timeout=5).is_success
            return False

        assert soon(answers, 240.0), "vLLM's server did not answer in four minutes"
        # The first reply takes long: it is not to count against the time limit of calls.
        question = {"model": "grader", "messages": [{"role": "user", "content": "7"}]}
        chat = f"{url}/chat/completions"
        httpx.post(chat, json=question | {"max_tokens": 4}, timeout=240).raise_for_status()
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def judged_rounds(folder: Path, **arguments: str) -> dict[str, SimpleNamespace]:
    """One round with each kind of scorer."""
    (folder / "mine.py").write_text(FUNCTIONS)
    # As much as the shipped model can take
    (folder / "prompt.txt").write_text("{question} {response}")
    (folder / "classifier").mkdir()
    return run_world(
        scorer_cases.kinds,
        1,
        file=str(folder / "mine.py"),
        reward_model=str(classifier(folder / "classifier")),
        prompt_file=str(folder / "prompt.txt"),
        timeout_s=400.0,
        **arguments,
    )[0]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimpleNamespace]:
    return judged_rounds(tmp_path_factory.mktemp("judges"))


def test_samples_do_not_depend_on_the_scorer(rounds: dict[str, SimpleNamespace]) -> None:
    quick = rounds["quick"].tokens
    assert len(quick) == 32
    for name in ("slow", "model", "kept", "self"):
        assert rounds[name].tokens == quick
    assert rounds["drop"].tokens.items() <= quick.items()


def test_responses_are_scored_while_others_are_sampled(rounds: dict[str, SimpleNamespace]) -> None:
    for name in ("slow", "model"):
        assert rounds[name].judged == 32
        overlap, seconds = rounds[name].overlap, rounds[name].seconds
        assert overlap >= 1, f"{name}: {overlap} of 32, in a round of {seconds:.1f} s"


@pytest.mark.slow
@pytest.mark.large
@pytest.mark.timeout(600)
def test_a_vllm_server_is_an_llm_judge(
    rounds: dict[str, SimpleNamespace], vllm_server: str, tmp_path: Path
) -> None:
    """The shipped model is the judge: its reply has a number after ####, or is a failure."""
    http = judged_rounds(tmp_path, url=vllm_server)["http"]
    assert http.tokens.items() <= rounds["quick"].tokens.items(), "samples do not depend on it"
    facts = http.metrics
    assert facts["reward/calls"] == 32 and facts["reward/timeouts"] == 0
    assert facts["reward/errors"] == facts["reward/dropped"] == 32 - len(http.rewards)
    assert http.rewards, "no response was scored"
    assert all(
        reward == parts["http"]
        for reward, parts in zip(http.rewards.values(), http.parts.values(), strict=True)
    )


def test_the_policy_judges_itself_with_calls_that_nobody_trains_on(
    rounds: dict[str, SimpleNamespace],
) -> None:
    """The same scores as when it is asked about one response after the other."""
    own = rounds["self"]
    assert own.rewards == own.single and len(own.rewards) == 32
    judged = [reward for reward in own.rewards.values() if reward != -1.0]
    assert 0 < len(judged) < 32
    assert own.metrics["reward/no_verdict_frac"] == 1 - len(judged) / 32
    assert own.metrics["reward/question_tokens_mean"] > 20
    assert own.metrics["rollout/tokens"] == rounds["quick"].metrics["rollout/tokens"]
    assert own.overlap >= 1, "it is asked while other responses are sampled"


def test_failures_are_left_out_of_training_and_0_in_evaluation(
    rounds: dict[str, SimpleNamespace],
) -> None:
    drop, kept = rounds["drop"], rounds["kept"]
    bad = {name for name, response in kept.responses.items() if len(response) % 3 == 0}
    assert 0 < len(bad) < 32
    assert drop.rewards.keys() == kept.rewards.keys() - bad
    assert {name for name, reward in kept.rewards.items() if reward == 0.0} == bad
    count = len(bad)
    for facts, dropped in ((drop.metrics, count), (kept.metrics, 0)):
        assert (facts["reward/dropped"], facts["reward/zeroed"]) == (dropped, count - dropped)
        assert (facts["reward/errors"], facts["reward/retries"]) == (2 * count, count)


def test_a_run_is_trained_on_several_rewards_each_recorded(tmp_path: Path) -> None:
    """From the command line: a function, a file's async function and a reward model, weighted; the
    held-out set has its own.
    """
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "classifier").mkdir()
    path = classifier(tmp_path / "classifier")
    flags = ["--reward.function", "gsm8k", f"{tmp_path / 'mine.py'}:slow", "model"]
    flags += ["--reward.weights", "1.0", "-0.01", "0.1", "--reward.model_path", str(path)]
    flags += ["--reward.model_dtype", "float32", "--reward.model_ranks", "0", "1"]
    flags += ["--eval.function", "gsm8k", "--train.steps", "1", "--checkpoint.export", "False"]
    flags += ["--rollout.prompts_per_step", "8", "--eval.max_prompts", "32"]
    run(tmp_path / "run", *flags)
    row = rows_of(tmp_path / "run")[-1]
    names = ("gsm8k", "slow", "model")
    total = sum(
        weight * row[f"reward/{name}/mean"]
        for name, weight in zip(names, (1.0, -0.01, 0.1), strict=True)
    )
    # float64 means of the same numbers, summed in other orders
    assert row["reward/mean"] == pytest.approx(total, abs=1e-9)
    assert row["reward/calls"] > 0 and row["reward/errors"] == row["reward/dropped"] == 0
    assert row["time/judge_mean_s"] >= 0.02  # it sleeps so long
    for rollout in dumped(tmp_path / "run"):
        parts = rollout["rewards"]
        assert list(parts) == list(names) and parts["slow"] == len(rollout["response"])
        assert (
            rollout["reward"] == 1.0 * parts["gsm8k"] + -0.01 * parts["slow"] + 0.1 * parts["model"]
        )
    samples = dumped(tmp_path / "run", kind="eval")
    assert all(each["rewards"].keys() == {"gsm8k"} for each in samples)
