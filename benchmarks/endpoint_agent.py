"""The agent of endpoint.py: the calculator's conversation by OpenAI's official client.

    endpoint_agent.py serve SOCKET     one process that lives all episodes of a run
    endpoint_agent.py SOCKET           what `--env.command` starts: it passes its episode on

Importing the client takes longer than an episode of the embedded model. So the commands are small,
and the process that has imported it stays.
"""

import json
import os
import socket
import sys

MAX_CALLS = 8  # more than env.max_turns: the endpoint ends a conversation that is too long


def pass_on(path: str) -> str:
    """Hand this command's episode to the agent; return its reply."""
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "R3_TASK_FILE", "R3_RESULT_FILE")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps({name: os.environ[name] for name in names}).encode() + b"\n")
        return connection.makefile().readline().strip()


def serve(path: str) -> None:
    """Live every episode that arrives, several at once."""
    import asyncio

    import httpx
    import openai

    from r3.envs import Calculator

    async def solve(client: openai.AsyncOpenAI, messages: list[dict[str, object]]) -> None:
        for _ in range(MAX_CALLS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=Calculator.tools
            )
            said = {"role": "assistant", "content": reply.choices[0].message.content or ""}
            replies, _, is_over = Calculator().step(said)
            if is_over:
                return
            messages += [said, *replies]

    async def main() -> None:
        clients: dict[str, openai.AsyncOpenAI] = {}

        async def live(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            given = json.loads(await reader.readline())
            with open(given["R3_TASK_FILE"], encoding="utf-8") as file:
                task = json.load(file)
            url = given["OPENAI_BASE_URL"]
            if url not in clients:
                http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
                # By default a connection may take 5 s, which is short where cores are shared.
                clients[url] = openai.AsyncOpenAI(
                    base_url=url, api_key="-", http_client=http, timeout=600.0
                )
            client = clients[url].with_options(api_key=given["OPENAI_API_KEY"])
            try:
                await solve(client, task["messages"])
                with open(given["R3_RESULT_FILE"], "w", encoding="utf-8") as file:
                    file.write("null")  # reward.function scores the last message
                reply = "done"
            except openai.APIError as error:
                reply = str(error)
            writer.write(reply.encode() + b"\n")
            writer.close()

        async with await asyncio.start_unix_server(live, path, backlog=512) as server:
            await server.serve_forever()

    asyncio.run(main())


if sys.argv[1] == "serve":
    serve(sys.argv[2])
elif (answer := pass_on(sys.argv[1])) != "done":
    sys.exit(answer)
