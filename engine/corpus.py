"""Texts of --corpus, from which every request may be guessed: read and checked, then tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parlay.engine.proposers.ngram import NgramProposer
from parlay.engine.tokenizer import Tokenizer


def read_texts(files: Sequence[Path]) -> list[str]:
    """Return what the files hold; ValueError, one line, where one is missing, empty or no text."""
    return [_text(file) for file in files]


def proposer_from(texts: Sequence[str], tokenizer: Tokenizer) -> NgramProposer:
    """Return an n-gram proposer that looks up what a request's own text lacks in these texts."""
    return NgramProposer(texts=[tokenizer.encode(text) for text in texts])


def _text(file: Path) -> str:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"--corpus {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--corpus {file} is no UTF-8 text") from None
    if "\0" in text:
        raise ValueError(f"--corpus {file} is binary, not a text: it holds a zero byte")
    if not text.strip():
        raise ValueError(f"--corpus {file} is empty: leave it out, or give it a text")
    return text
