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
        vocab: int,
    ) -> None:
        self._model = model
        self._template = template
        self._special = dict(special)
        self._vocab = vocab
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, with what special tokens the tokenizer adds by itself.

        Raises ValueError where the model has no such token, as `chat` does.
        """
        return self._known(self._model.encode(text).ids)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of messages ({"role", "content"}) and of the start of the model's turn.

        Raises ValueError where the checkpoint has no chat template or the template refuses.
        """
        return self._known(self._model.encode(self.render(messages), add_special_tokens=False).ids)

    def _known(self, ids: Sequence[int]) -> list[int]:
        # A tokenizer may well name more tokens than its model reads, as Gemma 3's does with images.
        worst = max(ids, default=0)
        if worst >= self._vocab:
            raise ValueError(
                f"the text has token {worst} ({self.piece(worst)!r}), which is not in the model's"
                f" vocabulary of {self._vocab}; change the text, or the checkpoint's tokenizer.json"
            )
        return list(ids)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that `chat` encodes."""
        if self._template is None:
            raise ValueError(
                "this checkpoint has no chat template; --raw gives it plain text instead"
            )
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
        except Exception as error:  # a template runs code of the checkpoint's
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"the chat template fails: {said}; --raw leaves it out") from None

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
    config = load_config(folder)
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
    special = {n: _token_text(folder, n, settings[n]) for n in _SPECIAL if settings.get(n)}
    template = _template(folder, settings)
    return Tokenizer(model, template, special, config.eos_ids, config.vocab)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _token_text(folder: Path, name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} has a {name} that is no text;"
            " download the checkpoint again"
        )
    return text


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
    except Exception as error:  # the compiler raises more than syntax errors, by depth say
        said = " ".join(str(error).split())
        raise ValueError(
            f"the chat template at {folder} cannot be read: {said}; mend it or take it out"
        ) from None


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Find the template: in a file of its own or in the settings, alone or the default of many."""
    file = folder / "chat_template.jinja"
    try:
        found = file.read_text(encoding="utf-8") if file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; mend it or take it out") from None
    source = settings.get("chat_template") if found is None else found
    if isinstance(source, list):
        many = [t for t in source if isinstance(t, dict) and t.get("name") == "default"]
        source = many[-1].get("template") if many else None
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
