"""A reward model on the rank's own device: a sequence-classification checkpoint with one label.

A thread next to the engine scores conversations in the order in which they end. A batch is complete
when it has `reward.model_batch` conversations or `reward.model_tokens` padded tokens, or when its
first conversation has waited `reward.model_wait_s`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from r3.config import RewardConfig
from r3.data.conversation import replied
from r3.data.rendering import TemplateFault
from r3.data.template import Renderer, load_tokenizer
from r3.errors import ConfigError
from r3.models.hub import folder_of
from r3.rewards import checked
from r3.runtime.device import Device, select_device
from r3.runtime.tensors import Stash
from r3.types import Prompt
from r3.user_code.calls import CallError, failure_of, outcome
from r3.user_code.workers import Place

HEADS = ("value_head", "v_head", "reward_head")
"""Names that other trainers give to the head, which is `score` in transformers."""

Encoded = list[int]


class RewardModel:
    """The model of `reward.model_path` with its own tokenizer and chat template.

    The leader rank of each engine has a copy, loaded on the host. `wake` moves it to the device
    before conversations are sampled, `sleep` frees the device for training. On CPU it stays where
    it is.
    """

    def __init__(self, settings: RewardConfig) -> None:
        """Load the model; `r3.checks` has checked its config.json.

        Raises:
            ConfigError: the files lack a tensor of the model.
        """
        self.settings = settings
        self._tokenizer = load_tokenizer(settings.model_path)
        self._renderer = Renderer(self._tokenizer)
        self._model = _loaded(settings)
        config = self._model.config.get_text_config()
        self._longest = getattr(config, "max_position_embeddings", None)
        # transformers reads the score at the last token that is not this one.
        self._pad_token: int | None = config.pad_token_id
        self._device = torch.device("cpu")
        self._stash: Stash | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def wake(self, device: Device) -> None:
        """Move the weights to the device."""
        if not device.is_cuda:
            return
        if self._stash is None:
            self._model.to(device.torch)
            self._stash, self._device = Stash(device=device), device.torch
        for name, tensor in self._tensors().items():
            self._stash.get(name, tensor)
        device.synchronize()

    def sleep(self, device: Device) -> None:
        """Free the device memory of the weights. Nothing may be in flight."""
        if self._stash is not None:
            for name, tensor in self._tensors().items():
                self._stash.put(name, tensor)
            device.synchronize()
            device.release_memory()

    def batches(self) -> Batches:
        """Return a new place for the calls of one scorer."""
        settings = self.settings
        return Batches(
            self.encode,
            self.score_encoded,
            size=settings.model_batch,
            tokens=settings.model_tokens,
            wait_s=settings.model_wait_s,
        )

    def encode(self, response: str, prompt: Prompt) -> Encoded:
        """Return the tokens of prompt and response, in the chat template of the reward model.

        Raises:
            CallError: the template refuses them, or they exceed the context of the reward model.
                They are never cut: the score would be that of another conversation.
        """
        messages = replied(prompt.messages, response)
        try:
            text = self._renderer.render(messages, prompt.tools, opening=False)
            tokens = self._renderer.tokens(text)
        except TemplateFault as error:
            raise CallError(
                f"the reward model's chat template refuses the conversation: {error}", again=False
            ) from error
        if self._longest and len(tokens) > self._longest:
            raise CallError(
                f"the conversation has {len(tokens)} tokens, the reward model's context "
                f"{self._longest}",
                again=False,
            )
        return tokens

    @torch.inference_mode()
    def score_encoded(self, conversations: Sequence[Encoded]) -> list[float]:
        """Score a batch in one forward pass, padded on the right to the longest conversation.

        Padding is masked and changes a score only by rounding. A model that names no padding token
        is padded with a token that none of the conversations has, so that the score is read at
        the last token of each.
        """
        longest = max(map(len, conversations))
        pad_token = self._pad_token
        if pad_token is None:
            used = set().union(*conversations)
            pad_token = next(token for token in range(len(used) + 1) if token not in used)
            self._model.config.get_text_config().pad_token_id = pad_token
        tokens_BT = torch.full((len(conversations), longest), pad_token)
        mask_BT = torch.zeros_like(tokens_BT)
        for row, tokens in enumerate(conversations):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
            mask_BT[row, : len(tokens)] = 1
        output = self._model(
            input_ids=tokens_BT.to(self._device),
            attention_mask=mask_BT.to(self._device),
            use_cache=False,
        )
        scores: list[float] = output.logits.float().squeeze(-1).tolist()
        return scores

    def score(self, response: str, prompt: Prompt) -> float:
        """Score one conversation by itself."""
        return self.score_encoded([self.encode(response, prompt)])[0]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}


def _loaded(settings: RewardConfig) -> Any:
    """Load the classifier; its head may have another name in the files.

    Raises:
        ConfigError: the files lack a tensor, which transformers would fill with random numbers, or
            have it in another shape.
    """
    from transformers import AutoModelForSequenceClassification

    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder_of(settings.model_path),
        dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.model_dtype],
        key_mapping={rf"^{name}\.weight$": "score.weight" for name in HEADS},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    wrong = sorted(report["missing_keys"]) or sorted(name for name, *_ in report["mismatched_keys"])
    if wrong:
        state = "have no" if report["missing_keys"] else "have another shape of"
        more = f" and {len(wrong) - 3} more tensors" if len(wrong) > 3 else ""
        rule = f"its files {state} {', '.join(wrong[:3])}{more}, which would be random"
        fix = "save the whole classifier again; the head is score.weight, of shape [1, hidden size]"
        raise ConfigError.of("reward.model_path", settings.model_path, rule, fix)
    return model.eval().requires_grad_(False)


class Batches(Place):
    """A place where one thread computes many calls together.

    The submitted function is not called: `encode` and `score_many` do its work for many arguments
    at once.

    Attributes:
        trace: start and end (time.monotonic) and size of every batch.
    """

    def __init__(
        self,
        encode: Callable[..., Encoded],
        score_many: Callable[[Sequence[Encoded]], list[float]],
        *,
        size: int,
        tokens: int,
        wait_s: float,
    ) -> None:
        super().__init__()
        self._encode, self._score_many = encode, score_many
        self._size, self._budget, self._wait_s = size, tokens, wait_s
        self._arrived: queue.SimpleQueue[tuple[int, tuple[Any, ...], float] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._abandoned: set[int] = set()
        self.trace: list[tuple[float, float, int]] = []

    def start(self, token: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="r3-reward-model")
            self._thread.start()
        self._arrived.put((token, arguments, time.monotonic()))

    def abandon(self, token: int) -> None:
        self._abandoned.add(token)

    def close(self) -> None:
        if self._thread is not None:
            self._arrived.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        select_device()
        left_over: tuple[int, Encoded, float] | None = None  # did not fit into the last batch
        try:
            while True:
                first, left_over = left_over or self._next(None), None
                if first is None:
                    return
                batch, until = [first], first[2] + self._wait_s
                while len(batch) < self._size:
                    following = self._next(until)
                    if following is None:
                        break
                    longest = max(len(tokens) for _, tokens, _ in [*batch, following])
                    if longest * (len(batch) + 1) > self._budget:
                        left_over = following
                        break
                    batch.append(following)
                self._score(batch)
        except BaseException as error:  # raised again by `collect`, which ends the run
            self._ended.put(error)

    def _next(self, until: float | None) -> tuple[int, Encoded, float] | None:
        """Return the next conversation in tokens; None at time `until` or after `close`."""
        while True:
            try:
                wait_s = None if until is None else max(0.0, until - time.monotonic())
                arrived = self._arrived.get(timeout=wait_s)
            except queue.Empty:
                return None
            if arrived is None:
                self._arrived.put(None)  # for the next call
                return None
            token, arguments, when = arrived
            if token in self._abandoned:
                continue
            try:
                return token, self._encode(*arguments), when
            except CallError as error:
                self._ended.put((token, None, failure_of(error)))

    def _score(self, batch: Sequence[tuple[int, Encoded, float]]) -> None:
        began = time.monotonic()
        scores = self._score_many([tokens for _, tokens, _ in batch])
        self.trace.append((began, time.monotonic(), len(batch)))
        for (token, _, _), score in zip(batch, scores, strict=True):
            self._ended.put((token, *outcome(checked, (score,))))
