"""Ask a sidecar's HTTP side for JSON; what commands share.

Where the page asks for a token, PARLAY_HTTP_TOKEN_FILE names a file with one; PARLAY_HTTP_CA_FILE
names who signed its certificate, where the system does not know them.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from parlay.protos.credentials import Credentials, from_environment, is_private

TIMEOUT_S = 5.0
VARIABLES = "PARLAY_HTTP"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(
    address: str, path: str, query: Mapping[str, str] | None = None, any_name: bool = False
) -> dict[str, Any]:
    """Return the JSON at `path` of the sidecar at `address` (http://host:port).

    any_name: its certificate may be of another name than the address. Raises ValueError where the
    sidecar says what is wrong or the address is none, OSError where nobody answers there.
    """
    base = address if "://" in address else f"http://{address}"
    parts = urllib.parse.urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--address {address}: write it as http://host:port")
    url = f"{base.rstrip('/')}{path}"
    if query:
        url += f"?{urllib.parse.urlencode(query)}"
    credentials = from_environment(VARIABLES)
    if credentials.token is not None and parts.scheme == "http" and not _stays_here(parts.hostname):
        raise ValueError(f"a token for {address} would travel as plain text: use https://")
    request = urllib.request.Request(url, headers=dict(credentials.metadata()))
    opener = _DIRECT if parts.scheme == "http" else _secure(credentials, any_name)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return _object(answer.read(), address)
    except urllib.error.HTTPError as error:
        raise _said(error, address) from None
    except (OSError, HTTPException) as error:
        raise OSError(
            f"no sidecar answers at {address} ({_reason(error)}): start one with"
            " parlay serve --http host:port"
        ) from None


def _stays_here(host: str | None) -> bool:
    return host is not None and is_private(f"[{host}]:0")


def _secure(credentials: Credentials, any_name: bool) -> urllib.request.OpenerDirector:
    trusted = ssl.create_default_context(cafile=credentials.ca)
    trusted.check_hostname = not any_name
    if credentials.cert is not None:
        trusted.load_cert_chain(credentials.cert, credentials.key)
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
    )


def _said(error: urllib.error.HTTPError, address: str) -> Exception:
    """Return what an answer that is an error comes to."""
    with error:
        if error.code >= 500:
            return OSError(f"the sidecar at {address} failed; its log says why")
        said = str(_object(error.read(), address).get("error", error.reason))
    if error.code == 401:
        said += f"; let {VARIABLES}_TOKEN_FILE name a file with it"
    return ValueError(said)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)


def _object(body: bytes, address: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"what answers at {address} is not a parlay sidecar")
    return found
