"""Environments: what happens in a conversation. Yours is one class: `--env.path my_env.py:MyEnv`.

    class MyEnv:
        def reset(self, prompt):        # returns the first messages; the model answers them
            return prompt.messages

        def step(self, message):        # returns (new messages, reward or None, done)
            return [], None, True

        def close(self):                # optional; called once, however the conversation ends
            ...

`step` may return metrics as a fourth value, `return [], 1.0, True, {"tool_calls": 3}`: numbers that
become `env/tool_calls`, averaged over conversations. If several turns report one name, the last
value counts.

R3 creates one instance per conversation. Methods may be `async def`. Rewards of several turns are
added; if the environment gives none, reward functions score the last message. Optional class
attributes are `tools`, JSON schemas for the chat template, and `stop`, strings that end a turn.
With `env.workers` the instance is pickled between calls. Take randomness from `prompt.id`: what is
drawn elsewhere differs from run to run.

A class with a method `run` instead is a workflow, which calls the model itself
(`r3/envs/workflow.py`).
"""

from r3 import names_of

# A worker process that runs environments loads few of them.
__getattr__ = names_of(
    __name__,
    **{"apis.common": "ApiError", "apis.tokens": "token_bytes"},
    calculator="Calculator evaluate",
    environment="Environment checked_step",
    chat="Chat",
    command="Command Resident",
    endpoint="host_of serve",
    find="ENVIRONMENTS find is_workflow",
    guess_number="GUESSES LARGEST GuessNumber",
    options="sampling_faults",
    parsers="message_parser",
    runner="Environments",
    tool_calls="MessageReader Parse Parsed built_in parsed_calls read_json",
    workflow="Model ModelLimit",
    workflows="Workflows checked_result",
)
