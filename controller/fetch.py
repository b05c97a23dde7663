"""Ask a sidecar's HTTP side for JSON; what commands share."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(address: str, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON at `path` of the sidecar at `address` (http://host:port).

    Raises ValueError where the sidecar says what is wrong or the address is none, OSError where
    nobody answers there.
    """
    base = address if "://" in address else f"http://{address}"
    parts = urllib.parse.urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--address {address}: write it as http://host:port")
    url = f"{base.rstrip('/')}{path}"
    if query:
        url += f"?{urllib.parse.urlencode(query)}"
    try:
        with _DIRECT.open(url, timeout=TIMEOUT_S) as answer:
            return _object(answer.read(), address)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            error.close()
            raise OSError(f"the sidecar at {address} failed; its log says why") from None
        with error:
            said = _object(error.read(), address).get("error", error.reason)
        raise ValueError(str(said)) from None
    except urllib.error.URLError as error:
        raise OSError(
            f"no sidecar answers at {address} ({_reason(error)}): start one with"
            " parlay serve --http host:port"
        ) from None


def _reason(error: urllib.error.URLError) -> str:
    reason = error.reason
    return reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)


def _object(body: bytes, address: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"what answers at {address} is not a parlay sidecar")
    return found
