"""A model's tokenizer and chat template: conversations to tokens, and what ends a turn.

The text of messages and tools is others' text: `<|im_end|>` in a question is ten characters, not
the token that ends a turn. A template joins it with control tokens of its own, so `Renderer.render`
puts a mark before and after what looks like one in the given text, and `Renderer.tokens` tokenises
that as text. Conversations without such text are tokenised as transformers does.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from r3.config import ConfigError, model_problem
from r3.data.conversation import half_character, read_message
from r3.data.rendering import ChatTemplate, Rendered, Rule, TemplateFault
from r3.errors import Fault
from r3.models.families import text_model
from r3.models.hub import folder_of
from r3.models.shape import ModelShape
from r3.runtime.process import importing, is_leader
from r3.runtime.terminal import say
from r3.types import Message

TIKTOKEN = "tiktoken.model"
TIKTOKEN_FIX = 'convert it, see "Models without tokenizer.json" in docs/models.md'
"""What Kimi-K2 has in place of tokenizer.json, and what to do."""

# Letters, digits, white space, an accent and other scripts, which such rules treat differently.
_PROBE_TEXT = "Tom's 12345 books,\n\n  and 3\u00e9 \u65e5\u672c"

# Stands for the model's message. No template changes letters and digits.
PLACEHOLDER = "R3messageofthemodel"

_CONTENT = PLACEHOLDER[::-1]  # stands for that of another message
# Unicode keeps this code point for programs: it is no character of any text. In a text that has it
# all the same it is doubled.
_MARK = "\ufdd0"

_QUESTION: Sequence[Message] = ({"role": "user", "content": "a"},)
_REPLY: Message = {"role": "assistant", "content": PLACEHOLDER}


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model, with the rules of its tokenizer.json.

    Where tokenizer_config.json names certain classes, transformers 5 follows the class instead (its
    issue 45488): with LlamaTokenizerFast, DeepSeek's distilled models see no spaces.

    For a model_type that it does not know (kimi_k2), it may fail at config.json.

    Args:
        path: a folder, or a model of the hub in the cache.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: of transformers,
            for files that are missing or damaged.
    """
    with importing():
        from tokenizers import Tokenizer
        from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder_of(path))
    file, config = folder / "tokenizer.json", folder / "config.json"
    if not file.is_file() and (folder / TIKTOKEN).is_file():
        # transformers would split texts by a rule of its own. The model's is in its code.
        raise ValueError(f"it has {TIKTOKEN} and no tokenizer.json: {TIKTOKEN_FIX}")
    # R3 checks lengths itself and names the row, so the warning of transformers is off. Without
    # trust_remote_code, transformers asks in the terminal whether code of the model may run.
    keys: dict[str, Any] = dict(model_max_length=10**9, trust_remote_code=False)
    values = json.loads(config.read_bytes()) if config.is_file() else {}
    kinds = {part.get("model_type", "llama") for part in (values, values.get("text_config", {}))}
    if file.is_file() and not all(kind in CONFIG_MAPPING for kind in kinds):
        return PreTrainedTokenizerFast.from_pretrained(folder, **keys)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **keys)
    if type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():
        return tokenizer
    tokens = Tokenizer.from_file(str(file)).encode(_PROBE_TEXT, add_special_tokens=False).ids
    if tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"] == tokens:
        return tokenizer
    if is_leader():
        say(
            f"warning: {path}: transformers would read texts as {type(tokenizer).__name__} does, "
            "otherwise than tokenizer.json says. R3 reads them by the file. For servers of the "
            'export, write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json',
            error=True,
        )
    return PreTrainedTokenizerFast.from_pretrained(folder, **keys)


def tokenizer_of(
    shape: ModelShape, refused: Callable[[str, str, str], ConfigError] = model_problem
) -> Any:
    """Load the tokenizer of the model that a shape was read from.

    Args:
        shape: of the model.
        refused: makes the error of a model, a rule and a fix.

    Raises:
        ConfigError: it cannot be loaded, or cannot belong to a model of this shape.
    """
    try:
        tokenizer = load_tokenizer(shape.source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        rule = f"its tokenizer cannot be loaded ({type(error).__name__}: {error})"
        fix = "copy the tokenizer's files from the original model again, or save a fast tokenizer"
        raise refused(shape.source, rule, fix) from None
    # Ids may have gaps, so their number is not enough.
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    rule = ""
    if largest >= shape.vocab_size:
        has = f"its tokenizer has a token {largest} ({token!r})"
        rule = f"{has} and its model {shape.vocab_size} tokens (vocab_size)"
    elif tokenizer.eos_token_id is None:
        rule = "its tokenizer names no eos_token, so that no response would end"
    if rule:
        raise refused(shape.source, rule, "copy tokenizer and config.json of one model")
    return tokenizer


class Renderer:
    """A model's chat template and its tokenizer.

    Rendered text has marks around what looks like a control token in the given text; `text` removes
    them.

    Attributes:
        template: the chat template.
        special: ids of all special and added tokens.
        closing: the token that the template writes after the last message of a conversation, if
            that is the model's; None if it writes none there.
        followers: texts of the tokens that may follow a message of the model: the closing one, or
            the one that opens the next message.
        next_tokens: role -> text of the token that follows a message of the model if a message of
            this role comes next.
        ends: every token that ends a turn, without repetition: the closing token of the template
            (or else what opens the next message), and the end tokens that tokenizer, config.json
            and generation_config.json name.
    """

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        control_tokens: bool = False,
    ) -> None:
        """Find what ends a turn and which tokens are control tokens.

        Args:
            tokenizer: loaded from the model's folder.
            variables: further variables of the template.
            control_tokens: whether control tokens in messages and tools are meant as such.

        Raises:
            ConfigError: config.json or generation_config.json names end tokens that are none.
        """
        self._tokenizer, self.template = tokenizer, ChatTemplate(tokenizer, variables)
        self._for_text: Any = None
        added = tokenizer.added_tokens_decoder
        self.special = set(tokenizer.all_special_ids) | set(added)
        self._set_control_tokens((), (), ())
        closed = self.tokens(self._probe([*_QUESTION, _REPLY], opening=False, after=PLACEHOLDER))
        self.closing = next((token for token in closed[:1] if token in self.special), None)
        roles = ("user", "tool")
        after = [self._after(role) for role in roles]
        between = [self.tokens(text.partition(_CONTENT)[0]) for text in after]
        first = [tokens[0] for tokens in (closed, *between) if tokens and tokens[0] in self.special]
        self.next_tokens = {
            role: self.text_of(tokens[0])
            for role, tokens in zip(roles, between, strict=True)
            if tokens and tokens[0] in self.special
        }
        self.followers = tuple(self.text_of(token) for token in dict.fromkeys(first))
        own = [self.closing] if self.closing is not None else first
        self.ends = tuple(dict.fromkeys([*own, *_named_ends(tokenizer)]))
        # A template may close the last message otherwise than those before it (harmony).
        asked_text = self._probe(_QUESTION, opening=False).rstrip()
        closes = (token for token in first if asked_text.endswith(self.text_of(token)))
        self._closing_tokens = {self.closing, *closes}
        if not control_tokens:
            asked = self.tokens(asked_text)
            opened = self.tokens(self._probe(_QUESTION, opening=True))[len(asked) :]
            header = [token for token in opened if token in self.special][:1]
            declared = {*tokenizer.all_special_ids, *(i for i in added if added[i].special)}
            # What a message of the model may not hold: what ends it or begins another one. Other
            # special tokens, such as <think>, are its own words.
            written = {*asked, *between[0], *first, *header, *self.ends} & self.special
            written |= {*between[1]} & declared
            # Qwen's <tool_response> is not declared as special: it is a token in a question that
            # holds it, and text in a tool's result, which could end itself.
            around = {*self.tokens(after[1])} & self.special
            self._set_control_tokens(written, written | declared, written | declared | around)

    @property
    def end_texts(self) -> list[str]:
        """Texts of the tokens that end a turn."""
        return [self.text_of(token) for token in self.ends]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opening: bool = True
    ) -> str:
        """Return a conversation that goes on as text; see `rendered`."""
        return self.rendered(messages, tools, opening=opening, rule="history").text

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        opening: bool = True,
        rule: Rule = "shown",
    ) -> Rendered:
        """Render a conversation; all that is given appears, or is refused.

        Args:
            messages: in any form that `r3.data.conversation` reads.
            tools: JSON schemas that the template shows.
            opening: whether the text goes on to where the model's message begins.
            rule: what must appear.

        Raises:
            TemplateFault: the template drops or changes a part of the conversation.
            TemplateFault: it refuses the messages, or one is none.
        """
        marked, tools = self.marked(_read(messages)), self.marked(tools)
        rendered = self.template.render(marked, tools, opening=opening, rule=rule)
        if half := half_character(rendered.text):
            raise TemplateFault(f"a message holds {half!r}, half of a character")
        # Every text by itself has marks, so what the template did not write is of two of them.
        if self._count_written(rendered.text) > sum(map(self._count_written, rendered.glue)):
            raise TemplateFault(
                "two texts that the chat template joins make a control token together",
                "leave a character between them",
            )
        return rendered

    def marked(self, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages or tools with marks in their texts."""
        of_others = self._patterns[""]
        return [
            _marked(part, self._patterns.get(part.get("role", ""), of_others)) for part in parts
        ]

    def marked_reply(self, text: str) -> str:
        """Return the text of a message of the model with marks."""
        return self._patterns["assistant"].sub(_with_marks, text)

    def text(self, rendered: str) -> str:
        """Return rendered text without marks."""
        return self._marks.sub(lambda match: match[1] or _MARK, rendered)

    def tokens(self, text: str) -> list[int]:
        """Tokenise rendered text, or a part of it."""
        return self.batch([text])[0]

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise several rendered texts at once."""
        tokens = iter(self._encoded([text for text in texts if _MARK not in text]))
        return [self._cut(text) if _MARK in text else next(tokens) for text in texts]

    def after(
        self, old: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = ()
    ) -> str:
        """Return the text that follows a message of the model which comes after `old`.

        Raises:
            TemplateFault: the template refuses the messages, or the model's message does not appear
                in the text as it is.
        """
        text = self.render([*old, _REPLY, *new], tools)
        _, reply, after = text.partition(PLACEHOLDER)
        if not reply or PLACEHOLDER in after or not after:
            raise TemplateFault("the model's message does not appear unchanged and exactly once")
        return after

    def following(self, tokens: Sequence[int], last: int) -> list[int]:
        """Return what to append after a message of the model.

        An end token that was sampled stands for the closing token of the template. A template
        without one ends a turn by opening the next: what was sampled is not written twice.

        Args:
            tokens: what the template writes there.
            last: last token of the message.
        """
        ended = last == tokens[0] or (tokens[0] in self._closing_tokens and last in self.ends)
        return list(tokens[1:] if ended else tokens)

    def missing_header(self) -> str:
        """Return what the template writes before a message of the model and never as a prompt.

        "" if prompts end where the message begins.
        """
        asked, opened = (self._probe(_QUESTION, opening=opening) for opening in (False, True))
        whole = self._probe([*_QUESTION, _REPLY], opening=False).partition(PLACEHOLDER)[0]
        # A template may write more before a message that is there, such as an empty think block.
        is_missing = asked == opened and whole.startswith(opened)
        return whole[len(opened) :].strip() if is_missing else ""

    def message_text(self, tokens: Sequence[int]) -> str:
        """Return the text of a message of the model: all of it but the token that ends its turn.

        This is its only text: for environments, workflows, reward functions, judges and dumps.
        """
        ended = len(tokens) > 0 and tokens[-1] in self.ends
        return str(self._tokenizer.decode(tokens[:-1] if ended else tokens))

    def _set_control_tokens(
        self, in_replies: Iterable[int], in_texts: Iterable[int], in_results: Iterable[int]
    ) -> None:
        """Set what is marked in messages of the model, in other messages and in tools' results."""
        by_role = {"assistant": in_replies, "": in_texts, "tool": in_results}
        texts = {role: _any_of(map(self.text_of, tokens)) for role, tokens in by_role.items()}
        self._control = set(in_results)
        self._patterns = {role: re.compile(f"{_MARK}|{text}") for role, text in texts.items()}
        self._written = re.compile(texts["assistant"])
        self._marks = re.compile(f"{_MARK}(?:({texts['tool']}){_MARK}|{_MARK})")
        added = list(self._tokenizer.added_tokens_decoder.values())
        added.sort(key=lambda each: len(each.content), reverse=True)
        cuts = [  # spaces beside some tokens belong to them
            r"\s*" * each.lstrip + re.escape(each.content) + r"\s*" * each.rstrip for each in added
        ]
        self._cuts = re.compile("|".join([self._marks.pattern, *cuts]))

    def _count_written(self, rendered: str) -> int:
        """Count the tokens without marks that end or begin a message."""
        return len(self._written.findall(self._marks.sub(_MARK, rendered)))

    def _cut(self, text: str) -> list[int]:
        """Tokenise text with marks: as text what lies between two tokens of the template and
        holds a mark, the rest as it is."""
        tokens: list[int] = []
        plain, start = "", 0
        cuts = [cut.span() for cut in self._cuts.finditer(text) if not cut[0].startswith(_MARK)]
        for first, end in [*cuts, (len(text), len(text))]:
            piece = text[start:first]
            if _MARK in piece:
                tokens += self._encoded([plain])[0] + self._as_text(self.text(piece))
                plain = ""
            else:
                plain += piece
            plain, start = plain + text[first:end], end
        return tokens + self._encoded([plain])[0]

    def _as_text(self, text: str) -> list[int]:
        """Tokenise a text that has no control token, only what looks like one."""
        # The option changes the tokenizer, which other threads use at the same time.
        if self._for_text is None:
            self._for_text = copy.deepcopy(self._tokenizer)
        encoded = self._for_text(text, add_special_tokens=False, split_special_tokens=True)
        tokens: list[int] = encoded["input_ids"]
        if self._control.isdisjoint(tokens):
            return tokens
        # The tokenizer has one that is not declared as special: no token spans the cut.
        halves = self._patterns["tool"].sub(
            lambda match: f"{match[0][:1]}{_MARK}{match[0][1:]}", text
        )
        return [token for half in self._encoded(halves.split(_MARK)) for token in half]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        return list(self._tokenizer(list(texts), add_special_tokens=False)["input_ids"])

    def _after(self, role: str) -> str:
        """What follows a message of the model if one of this role comes next; "" if refused."""
        try:
            return self.after(_QUESTION, [{"role": role, "content": _CONTENT}])
        except TemplateFault:
            return ""

    def _probe(self, messages: Sequence[Message], *, opening: bool, after: str = "") -> str:
        """A rendered conversation, or what follows `after` and spaces; "" if it is refused."""
        try:
            text = self.render(messages, opening=opening)
        except TemplateFault:
            return ""
        return text.partition(after)[2].lstrip() if after else text

    def text_of(self, token: int) -> str:
        """Return the text of a special token."""
        text: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return f"token {token}" if text is None else text


def _read(messages: Sequence[Message]) -> list[Message]:
    read: list[Message] = []
    for place, message in enumerate(messages):
        try:
            read.append(read_message(message, of_model=True))
        except Fault as fault:
            raise TemplateFault(f"message {place} {fault}") from None
    return read


def _named_ends(tokenizer: Any) -> list[int]:
    """End tokens that a tokenizer and the two files of its folder name.

    Raises:
        ConfigError: a file is not JSON, or names something else.
    """
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    folder = Path(tokenizer.name_or_path or "no folder")
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.is_file():
            continue
        rule = ""
        try:
            named = text_model(json.loads(file.read_bytes())).get("eos_token_id")
        except (ValueError, RecursionError, AttributeError) as error:
            rule = f"is not a JSON object ({error})"
        else:
            ids = named if isinstance(named, list) else [] if named is None else [named]
            if all(type(token) is int and token >= 0 for token in ids):
                ends += ids
            else:
                rule = f"names {named!r} as eos_token_id, which is no token id or list of them"
        if rule:
            raise model_problem(file, rule, "copy it from the original model again")
    return ends


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of these texts at a place."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


def _marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """A value with marks around what a pattern finds in its texts."""
    if isinstance(value, str):
        return pattern.sub(_with_marks, value)
    if isinstance(value, Mapping):
        return {_marked(key, pattern): _marked(entry, pattern) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(entry, pattern) for entry in value]
    return value


def _with_marks(match: re.Match[str]) -> str:
    return _MARK * 2 if match[0] == _MARK else f"{_MARK}{match[0]}{_MARK}"
