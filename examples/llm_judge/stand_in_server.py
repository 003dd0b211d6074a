"""Stands in for a chat server: grades by the rule in judge.txt, without a model."""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FINAL = re.compile(r"####\s*(-?\d+)")


def grade(prompt: str) -> float:
    """The score that judge.txt asks for."""
    _, _, rest = prompt.partition("Reference answer:")
    answer, _, rest = rest.partition("Response:")
    response, _, _ = rest.partition("Give 1 if")
    expected, found = FINAL.findall(answer), FINAL.findall(response)
    if expected and found and found[-1] == expected[-1]:
        return 1.0
    return 0.2 if "=" in response else 0.0


class Handler(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions as OpenAI's API does."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Grade the one user message."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"Score: {grade(body['messages'][-1]['content'])}"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()


if __name__ == "__main__":
    main()
