"""The process of an agent that stays: `PYTHON resident.py agent.py:Agent`, started by R3.

It runs in the agent's own Python, so it imports nothing but the standard library. A line of JSON
from its input is an episode or ends one, a line of JSON to its output is a result. What the agent
prints goes to standard error.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import IO, Any

_ERROR_CHARACTERS = 4000
_END_S = 3.0  # for agents to clean up when the run is over


class Host:
    """Runs episodes, several at once: those of an `async def run` on one event loop, those of a
    plain `run` in threads.
    """

    def __init__(self, agent: Any, output: int) -> None:
        """Take an instance of the user's class, and the descriptor for results."""
        self._agent, self._output = agent, output
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(max_workers=10_000)  # as many as there are episodes

    def say(self, **answer: Any) -> None:
        """Write a line. numpy and torch have numbers of their own."""
        line = json.dumps(answer, default=lambda value: value.tolist()).encode() + b"\n"
        while line:
            line = line[os.write(self._output, line) :]

    def take(self, line: bytes) -> None:
        """Begin an episode, or cancel one."""
        order = json.loads(line)
        number = order.pop("episode")
        if order:
            self._tasks[number] = asyncio.ensure_future(self._run_episode(number, **order))
        else:
            if number in self._tasks:
                self._tasks[number].cancel()
            self.say(episode=number, result=None)  # a sign of life

    async def _run_episode(self, number: int, task: Any, **access: str) -> None:
        try:
            run, model = self._agent.run, SimpleNamespace(**access)
            if inspect.iscoroutinefunction(run):
                result = run(task, model)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, run, task, model)
            if inspect.isawaitable(result):  # also of an `async def` below a plain decorator
                result = await result
            if isinstance(result, tuple) and len(result) == 2:
                result = {"reward": result[0], "metrics": result[1]}
            self.say(episode=number, result=result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the agent's: SystemExit would end all episodes
            frames = error.__traceback__ and error.__traceback__.tb_next
            text = "".join(traceback.format_exception(type(error), error, frames))
            self.say(episode=number, error=text[-_ERROR_CHARACTERS:].rstrip())
        finally:
            del self._tasks[number]

    async def end(self) -> None:
        """Cancel what is left."""
        if left := set(self._tasks.values()):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_END_S)


def load(spec: str) -> Any:
    """Return the class of `path/to/file.py:Class`; its file imports as a script does."""
    path, _, name = spec.rpartition(":")
    sys.path[0:1] = [os.path.dirname(os.path.abspath(path))]
    found = importlib.util.spec_from_file_location(os.path.basename(path)[: -len(".py")], path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return getattr(module, name)


def close_all(pipes: list[int]) -> None:
    """Close descriptors, once."""
    while pipes:
        os.close(pipes.pop())


async def serve(agent: Any, orders: IO[bytes], output: int) -> None:
    """Serve episodes until the input ends, with the run or its rank."""
    host, loop, over = Host(agent, output), asyncio.get_running_loop(), asyncio.Event()
    host.say(ready=True)

    def read() -> None:
        for line in orders:
            loop.call_soon_threadsafe(host.take, line)
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()
    await host.end()
    os._exit(0)  # threads of agents may hang


def main() -> None:
    """Keep input and output for R3, load the class, and serve."""
    orders, output = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # A child that the agent forks would keep them open, and hide from R3 that the agent died.
    pipes = [orders.fileno(), output]
    os.register_at_fork(after_in_child=lambda: close_all(pipes))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    del sys.argv[0]
    asyncio.run(serve(load(sys.argv[0])(**json.loads(orders.readline())), orders, output))


if __name__ == "__main__":
    main()
