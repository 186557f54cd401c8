"""Client of an S3 bucket, for the blobs of one hub. Every method blocks.

Only this module imports the S3 library, and only if a store is configured. The library finds the credentials
itself (environment, files, instance role). They never appear in a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from barnraise.core.errors import HubError, StoreAway
from barnraise.core.installation import install_hint
from barnraise.hub.object_store.redirects import origin_of
from barnraise.transport.addresses import network_of

LINK_S = 3600  # that a link can be used
MOST_BYTES = 5 << 30  # that may be put at once, by the protocol
_STORE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/[A-Za-z0-9._/-]{0,400})?")
_NAME = re.compile("[0-9a-f]{64}")
_CODE = re.compile("[A-Za-z0-9.]{1,64}")
_CONNECT_S, _SILENCE_S = 10.0, 60.0
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


class BucketUrl(NamedTuple):
    """Address of a bucket. ``endpoint``: None for Amazon's, or what the environment says."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None  # None: Amazon's, or what the environment says


def parse_bucket_url(store: str, endpoint: str = "") -> BucketUrl:
    """Parse a bucket URL of the form ``s3://bucket/folder``.

    Raise HubError if it is invalid, or if the S3 library is missing.
    """
    match = _STORE.fullmatch(store)
    if match is None:
        raise HubError(f"{store!r} names no bucket", hint="Write it as in: --store s3://bucket/folder")
    if endpoint:
        _origin(endpoint)
    if find_spec("botocore") is None:
        raise HubError("what an object store needs is not installed here", hint=install_hint("hub", "s3"))
    return BucketUrl(match[1], (match[2] or "").strip("/"), endpoint or None)


class S3Bucket:
    """Folder of one hub in a bucket. Two hubs never touch each other's blobs."""

    def __init__(self, place: BucketUrl, folder: str) -> None:
        """Connect to the bucket. Raise HubError if there is no private connection to it."""
        self._bucket = place.bucket
        self._folder = "".join(f"{part}/" for part in (place.prefix, folder) if part)
        self._client = _client(place)
        self.origin = _origin(_link(_client(place, signed=False), self._at("")))

    def names(self) -> dict[str, int]:
        """Return the blobs in the bucket with their sizes; other objects are ignored."""
        with _translated():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._folder
            )
            listed = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}
        sizes = {key.removeprefix(self._folder): size for key, size in listed.items()}
        return {name: size for name, size in sizes.items() if _NAME.fullmatch(name)}

    def put(self, name: str, path: Path) -> None:
        """Upload a file completely or not at all.

        Raise FileNotFoundError if the blob was removed meanwhile.
        """
        with path.open("rb") as file, _translated():
            self._client.put_object(**self._at(name), Body=file, ContentType="application/octet-stream")

    def remove(self, name: str) -> None:
        with _translated():
            self._client.delete_object(**self._at(name))

    def link(self, name: str) -> str:
        """Return a presigned URL, valid for `LINK_S` seconds. It contains the key's id, not its secret."""
        with _translated():
            url = _link(self._client, self._at(name))
        if origin_of(url) != self.origin:  # the library follows a bucket to its region, members do not
            raise StoreAway("the bucket is in another region", hint="Set AWS_DEFAULT_REGION to that region.")
        return url

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._folder + name}


def _client(place: BucketUrl, *, signed: bool = True) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    logging.getLogger("botocore").setLevel(logging.WARNING)
    # By path where others serve it, which all of them can, and where a dot would not fit a certificate.
    is_elsewhere = place.endpoint or any(os.environ.get(name) for name in _ENDPOINTS)
    style = "path" if is_elsewhere or "." in place.bucket else "virtual"
    config = Config(
        signature_version="s3v4" if signed else UNSIGNED,
        s3={"addressing_style": style},
        connect_timeout=_CONNECT_S,
        read_timeout=_SILENCE_S,
        retries={"total_max_attempts": 1},  # the caller retries
        request_checksum_calculation="when_required",  # others do not know the newer ones
        response_checksum_validation="when_required",
    )
    try:
        return get_session().create_client("s3", endpoint_url=place.endpoint, config=config)
    except (BotoCoreError, ValueError) as error:
        raise HubError(
            f"the store's settings cannot be used ({type(error).__name__})",
            hint="See that AWS_PROFILE and AWS_DEFAULT_REGION, if they are set, are right.",
        ) from error


def _link(client: Any, place: dict[str, str]) -> str:
    return str(client.generate_presigned_url("get_object", Params=place, ExpiresIn=LINK_S))


def _origin(url: str) -> str:
    """Return the origin of a URL. Raise HubError if there is none, or if it is not private."""
    origin = origin_of(url)
    if origin is None:
        raise HubError(
            "the store's endpoint is no address",
            hint="Write it as in: --store-endpoint https://s3.example.org",
        )
    host = urlsplit(origin).hostname or ""
    if not origin.startswith("https:") and host != "localhost" and network_of(host) != "machine":
        raise HubError(
            f"a store without TLS may not be at {host}",
            hint="Give an https:// endpoint; http:// is for a store on this machine.",
        )
    return origin


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn every error into StoreAway, with a text that names only its kind.

    Credential lookup and bad responses raise other error types.
    """
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        raise StoreAway(f"it answered {code if _CODE.fullmatch(code) else 'something else'}") from None
    except Exception as error:  # noqa: BLE001
        raise StoreAway(f"it cannot be used now ({type(error).__name__})") from None
