"""A command that passes its episode to an agent process that stays, and waits for its end.

    --env.command "python -I -S examples/external_agent/pass_on.py SOCKET"

Importing a framework for each episode takes seconds of a core. So one process imports it, listens
at SOCKET, a path, and lives all episodes; it gets the variables of each as a line of JSON.
"""

import json
import os
import socket
import sys

NAMES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "R3_TASK_FILE", "R3_RESULT_FILE")

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(json.dumps({name: os.environ[name] for name in NAMES}).encode() + b"\n")
    answer = connection.makefile().readline().strip()
if answer != "done":
    sys.exit(answer or "the agent's process closed the connection")
