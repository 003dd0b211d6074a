"""Experiment trackers behind `log.tracker`: Weights & Biases, trackio, MLflow.

A tracker gets the settings once, a row per step, and the samples that TensorBoard shows. It runs in
a thread of its own: a server that is slow or gone costs the training no time and does not end it.
Rows are in metrics.jsonl in any case. Addresses, commands and requests
are not sent, nor are code, console output and the command line.

Accounts, servers and offline mode are set as the packages have it: WANDB_MODE=offline,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from r3.config import Config, flatten
from r3.metrics.meter import TrackerError
from r3.run.folder import RunDir
from r3.runtime.terminal import say

_START_S = 120.0  # a login may ask the user for a key
_FINISH_S = 60.0
_PRIVATE = ("reward.url", "reward.request", "env.command")
_TAG = "r3.run_id"  # by which MLflow finds a run again


class Client(Protocol):
    """One run of a tracking service."""

    def log(self, row: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, samples: Mapping[str, str], step: int) -> None: ...

    def finish(self, *, failed: bool) -> None: ...


class Wandb:
    """A run of Weights & Biases. Its id is that of the run's folder, so a resumed run continues."""

    def __init__(
        self, project: str, name: str, run_id: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=True, x_disable_meta=True
            ),
        )
        # W&B drops rows whose own step number went back, as it does for steps that are repeated
        # after a resume. Charts take the step from the row instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log({**row, "step": step})

    def log_samples(self, samples: Mapping[str, str], step: int) -> None:
        rows = [[step, name, text] for name, text in samples.items()]
        table = self._table(columns=["step", "sample", "text"], data=rows)
        self._run.log({"samples": table, "step": step})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, which knows runs by name: the name has the id of the run's folder."""

    def __init__(
        self, project: str, name: str, run_id: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        import trackio

        self._markdown = trackio.Markdown
        self._run = trackio.init(
            project=project,
            name=f"{name}-{run_id[:6]}",
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, row: Mapping[str, float], step: int) -> None:
        self._run.log(dict(row), step=step)

    def log_samples(self, samples: Mapping[str, str], step: int) -> None:
        texts = {f"samples/{name}": self._markdown(text) for name, text in samples.items()}
        self._run.log(texts, step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow, found again by a tag. Its server chooses the id."""

    def __init__(
        self, project: str, name: str, run_id: str, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client = MlflowClient()
        self._metric = Metric
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{run_id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=name, tags={_TAG: run_id})
            self._id = run.info.run_id
            # Parameters of a run never change. The settings of later starts are in the artifact.
            params = [Param(key, str(value)[:6000]) for key, value in settings.items()]
            for first in range(0, len(params), 100):  # the most that a server takes at once
                self._client.log_batch(self._id, params=params[first : first + 100])
        self._client.log_dict(self._id, dict(settings), "settings.yaml")

    def log(self, row: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, value, now, step) for key, value in row.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_samples(self, samples: Mapping[str, str], step: int) -> None:
        for name, text in samples.items():
            self._client.log_text(self._id, text, f"samples/step_{step:06d}_{name}.md")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


CLIENTS: Mapping[str, Callable[[str, str, str, Path, Mapping[str, Any]], Client]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""Values of `log.tracker`, each the name of a package."""


class Tracker:
    """A client in its own thread. Its first failure after the start is reported, then it stops.

    Args:
        config: of the run; `log.tracker` is not none.
        run_id: of the run's folder.

    Raises:
        TrackerError: the package refuses to start.
    """

    def __init__(self, config: Config, run_id: str) -> None:
        self._name = config.log.tracker
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"r3-{self._name}")
        self._failed = False
        folder = RunDir.of(config).path
        folder.mkdir(parents=True, exist_ok=True)
        started = self._pool.submit(
            CLIENTS[self._name],
            config.log.project,
            folder.resolve().name,
            run_id,
            folder,
            public_settings(config),
        )
        wait([started], _START_S)
        if not started.done() or (error := started.exception()):
            what = str(error) if started.done() else f"no answer for {_START_S:.0f} s"
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise TrackerError(
                f"log.tracker {self._name} could not start: {what}. Set up the account or the "
                "server, work offline, or leave out --log.tracker"
            ) from (error if started.done() else None)
        self._client = started.result()

    def log(self, row: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step."""
        self._later(lambda: self._client.log(row, step))

    def log_samples(self, samples: Mapping[str, str], step: int) -> None:
        """Send samples as text, by a name such as "best"."""
        self._later(lambda: self._client.log_samples(samples, step))

    def close(self, *, failed: bool) -> None:
        """Send the rest and end the run of the service; gives up after a minute."""
        self._later(lambda: self._client.finish(failed=failed))
        last = self._pool.submit(lambda: None)
        wait([last], _FINISH_S)
        if not last.done():
            self._say(f"did not take the last rows within {_FINISH_S:.0f} s")
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _later(self, call: Callable[[], None]) -> None:
        if not self._failed:
            self._pool.submit(call).add_done_callback(self._note)

    def _note(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) and not self._failed:
            self._failed = True
            self._say(f"failed and gets nothing more: {error}")

    def _say(self, what: str) -> None:
        text = f"warning: log.tracker {self._name} {what}. All rows are in metrics.jsonl"
        say(text, error=True)


def public_settings(config: Config) -> dict[str, Any]:
    """The settings by full names, without those that may hold what is private."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flatten(config).items()
        if name not in _PRIVATE
    }
