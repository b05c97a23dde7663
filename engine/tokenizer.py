"""A checkpoint's tokenizer and chat template, without transformers: its import takes seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from parlay.engine.model_config import load_config, read_json

Message = Mapping[str, str]
_REPLACEMENT = "\ufffd"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Text to token ids and back. eos_ids: the tokens that end a text."""

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        template: jinja2.Template | None,
        special: Mapping[str, str],
        eos_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._template = template
        self._special = dict(special)
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, with what special tokens the tokenizer adds by itself."""
        return list(self._model.encode(text).ids)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages ({"role", "content"}) and of the start of the model's turn.

        Raises ValueError where the checkpoint has no chat template or the template refuses.
        """
        return list(self._model.encode(self.render(messages), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that `chat` encodes."""
        if self._template is None:
            raise ValueError("this checkpoint has no chat template; give it plain text instead")
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return str(self._model.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary writes it, empty where there is none."""
        return str(self._model.id_to_token(token) or "")


class StreamDecoder:
    """Turns tokens into text as they come, holding back what does not yet end in a whole character.

    What `push` and the last `flush` return is, put together, the `decode` of all tokens (save that
    a byte-fallback vocabulary shows bytes that are no valid UTF-8 by its own rule).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A token's text can depend on the one before it (a leading space): keep the last piece.
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete, maybe none."""
        self._held.extend(ids)
        text = self._text()
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """Return the rest, complete or not."""
        return self._emit(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._held)[len(before) :]

    def _emit(self, text: str) -> str:
        if text:
            self._before, self._held = self._held, []
        return text


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder; raises ValueError in one line where it cannot."""
    folder = Path(path)
    eos_ids = load_config(folder).eos_ids
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing; only checkpoints with a fast tokenizer are supported")
    settings = _settings(folder)
    try:
        model = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file} cannot be read: {error}") from None
    # Some checkpoints keep what their training padded and cut to.
    model.no_padding()
    model.no_truncation()
    special = {name: _token_text(settings[name]) for name in _SPECIAL if settings.get(name)}
    return Tokenizer(model, _template(folder, settings), special, eos_ids)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template(folder: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    """Compile the chat template in the environment that transformers gives it."""
    source = _template_source(folder, settings)
    if source is None:
        return None
    # A template comes with the checkpoint, so it is not trusted.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template at {folder} cannot be read: {error}") from None


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Find the template: in a file of its own or in the settings, alone or the default of many."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
