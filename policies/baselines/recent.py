"""A record for each request of late, for policies that keep more than one number of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from parlay.policies.types import BatchView

Record = TypeVar("Record")
_MOST_REQUESTS = 4096


class Recent(Generic[Record]):
    """Records by request id, made when first asked for; the longest unseen ones are forgotten."""

    def __init__(self, make: Callable[[], Record]) -> None:
        self._make = make
        self._of: dict[int, Record] = {}

    def of(self, view: BatchView) -> list[Record]:
        """Return the record of each row; one without output is new, though its id be known."""
        found = []
        new = (view.output_tokens == 0).tolist()
        for request_id, starts in zip(view.request_id.tolist(), new, strict=True):
            known = self._of.pop(request_id, None)
            record = self._make() if known is None or starts else known
            self._of[request_id] = record
            found.append(record)
        for request_id in list(self._of)[: len(self._of) - max(_MOST_REQUESTS, len(found))]:
            del self._of[request_id]
        return found

    def get(self, request_id: int) -> Record | None:
        """Return a request's record, None where there is none."""
        return self._of.get(request_id)

    def items(self) -> list[tuple[int, Record]]:
        """Return every request with its record, the longest unseen first."""
        return list(self._of.items())

    def load(self, ids: Sequence[int], records: Sequence[Record]) -> None:
        """Take what `items` gave."""
        self._of = dict(zip(ids, records, strict=True))
