"""Agents that call the model: workflows, the endpoint, commands."""

from r3.agents.command import Command
from r3.agents.endpoint import host_of, serve
from r3.agents.episode import sampling_faults
from r3.agents.openai_api import ApiError, token_bytes
from r3.agents.parsers import message_parser
from r3.agents.workflows import Workflows, checked_result
