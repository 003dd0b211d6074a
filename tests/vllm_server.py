"""vLLM's own OpenAI-compatible server: `python -m tests.vllm_server FLAGS`.

vLLM spawns its engine and a worker, which import what is `__main__` here: not all of the server.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
