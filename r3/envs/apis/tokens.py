"""Token ids in and out, with routes: vLLM's `/inference/v1/generate`."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from r3.envs.apis.common import (
    SAMPLING,
    ApiError,
    Request,
    check_fields,
    check_model,
    sampled_request,
    typed,
)
from r3.envs.apis.memory import Memory
from r3.envs.workflow import Completion, Model

_REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_SPACE = "\u2581"  # stands for a space in vocabularies of SentencePiece

# What the sampling parameters of a request for tokens may only be: anything else would sample from
# another distribution than the policy's log-probabilities are taken of.
_PARAMETERS: dict[str, Any] = {
    "n": 1,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "bad_words": [],
}
_IGNORED = {
    *("seed", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    *("include_stop_str_in_output", "extra_args"),
}
_TAKEN = {
    *("model", "token_ids", "sampling_params", "train"),
    *("request_id", "cache_salt", "priority", "return_token_ids"),
}


def tokens_request(body: Mapping[str, Any], memory: Memory) -> Request:
    """Read the body of `/inference/v1/generate`, vLLM's request with token ids in and out.

    Raises:
        ApiError: it cannot be served.
    """
    check_model(body.get("model"))
    check_fields(body, _TAKEN, {"stream": False})
    parameters = typed(body, "sampling_params", dict) or {}
    known = {"max_tokens", "stop", "stop_token_ids", "logprobs", "routed_experts_prompt_start"}
    check_fields(parameters, known | SAMPLING.keys() | _IGNORED, _PARAMETERS)
    if (count := typed(parameters, "logprobs", int)) not in (None, 0, 1):
        text = f"logprobs = {count}: only the sampled token's is returned, which 0 and 1 ask for"
        raise ApiError(400, text, param="logprobs")
    if not isinstance(tokens := body.get("token_ids"), list):
        raise ApiError(400, "token_ids must be a list of token ids", param="token_ids")
    start = typed(parameters, "routed_experts_prompt_start", int) or 0
    if not 0 <= start <= len(tokens):
        text = f"routed_experts_prompt_start = {start}: the prompt has {len(tokens)} tokens"
        raise ApiError(400, text, param="routed_experts_prompt_start")
    rest = {name: body.get(name) for name in ("train", "request_id")}
    request = sampled_request(parameters | rest, logprobs=count is not None, routes_from=start)
    request.arguments["prompt"] = tokens
    request.arguments["stop_tokens"] = typed(parameters, "stop_token_ids", list) or []
    return request


def tokens_reply(
    completion: Completion, request: Request, memory: Memory, model: Model
) -> list[Any]:
    """Return the reply to a request for tokens, as the only item of a list."""
    choice = {
        "index": 0,
        "token_ids": list(completion.tokens),
        "logprobs": logprobs_of(completion, model) if request.logprobs else None,
        "finish_reason": completion.finish_reason,
        "routed_experts": _routes_of(completion, request.routes_from),
        "sampling_mask": [ids.tolist() for ids in completion.kept] or None,
    }
    name = request.name or f"reply-{memory.num_replies}"
    ids = {"request_id": name, "prompt_token_ids": list(completion.prompt)}
    return [{**ids, "choices": [choice], "usage": usage_of(completion)}]


def _routes_of(completion: Completion, start: int) -> dict[str, Any] | None:
    """The experts of each token from `start` on but the last, as verifiers' client reads them."""
    rows = completion.routes(start)
    if rows is None:
        return None
    if not rows.size or rows.min() >= 0:  # the types that vLLM has; -1 is a row that is missing
        rows = rows.astype("uint16" if rows.size and rows.max() > 255 else "uint8")
    data = base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": rows.dtype.name}


def logprobs_of(completion: Completion, model: Model) -> dict[str, Any]:
    """Return the log-probabilities of the sampled tokens as chat replies have them."""
    tokens = zip(completion.tokens, completion.logprobs, strict=True)
    listed = [
        {
            "token": model.token_bytes(token).decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(model.token_bytes(token)),
            "top_logprobs": [],
        }
        for token, logprob in tokens
    ]
    return {"content": listed, "refusal": None}


def usage_of(completion: Completion) -> dict[str, int]:
    """The token counts of a reply."""
    count = len(completion.tokens)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": count,
        "total_tokens": completion.prompt_tokens + count,
    }


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the UTF-8 bytes of a token, which may be part of a character."""
    text: str = tokenizer.decode([token])
    piece: str = tokenizer.convert_ids_to_tokens(token) or ""
    if _REPLACEMENT not in text:
        # SentencePiece leaves out a space at the beginning of what it decodes.
        spaces = len(piece) - len(piece.lstrip(_SPACE))
        return b" " * (spaces - len(text) + len(text.lstrip(" "))) + text.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # of SentencePiece
        return bytes.fromhex(byte[1])
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # Letters in the vocabularies of byte-level BPE, which have no control characters.
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    try:
        return bytes(byte_of[letter] for letter in piece)
    except KeyError:
        return text.encode()
