"""S3 server process: moto, behind a check of every signature that fails on demand.

``python s3_server.py PORT FOLDER``: files in FOLDER switch faults on.

- `slow`: seconds between small parts of a response.
- `late`: seconds before an object is accepted.
- `other`: send different bytes.
- `short`: crash after this number of bytes of an object, in either direction.
- `shut`: reject every request.

All requests are recorded in the file `asked`.
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import hmac
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import botocore.session

from benchmarks.hub.process import free_port

KEY_ID, SECRET, REGION, BUCKET = "AKIDEXAMPLE", "wJalrXUtnFEMI/EXAMPLEKEY", "eu-central-1", "our-blobs"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_CONFIG_FILE": os.devnull,  # the user of this machine may have keys in these files
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_FAULTS = ("slow", "late", "other", "short", "shut")
_DIE = 9
Environ = dict[str, Any]


class Door:
    """WSGI middleware that checks signatures by AWS's specification, independently of the library."""

    def __init__(self, app: Callable[..., Iterable[bytes]], folder: Path) -> None:
        self._app, self._folder = app, folder

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        is_object = path.count("/") > 2
        headers = ",".join(sorted(name for name in environ if name.startswith("HTTP_")))
        with (self._folder / "asked").open("a") as request_log:
            request_log.write(f"{method} {path} {headers}\n")
        if self._told("shut") is not None or not signed(environ):
            start("403 Forbidden", [("content-type", "application/xml")])
            return [b"<Error><Code>SignatureDoesNotMatch</Code><Message/></Error>"]
        short = self._told("short")
        if method == "PUT" and is_object and short is not None:
            environ["wsgi.input"].read(int(short))
            os._exit(_DIE)
        if method == "PUT" and is_object and not has_signed_body(environ):
            start("400 Bad Request", [("content-type", "application/xml")])
            return [b"<Error><Code>XAmzContentSHA256Mismatch</Code><Message/></Error>"]
        late = self._told("late") if method == "PUT" and is_object else None
        if late is not None:
            time.sleep(float(late))
        answer = self._app(environ, start)
        return self._spoilt(answer) if method == "GET" and is_object else answer

    def _spoilt(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        data = b"".join(answer)
        if self._told("other") is not None:
            data = bytes(255 - byte for byte in data)
        slow, short = self._told("slow"), self._told("short")
        for first in range(0, len(data), 1000):
            if short is not None and first >= int(short):
                os._exit(_DIE)
            if slow is not None:
                time.sleep(float(slow))
            yield data[first : first + 1000]

    def _told(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / name).read_text()
        return None


def signed(environ: Environ) -> bool:
    """Check the signature of a link, or of a request with a signed body, against the only key."""
    query = parse_qsl(environ["QUERY_STRING"], keep_blank_values=True)
    parameters = dict(query)
    is_link = "X-Amz-Signature" in parameters
    if not is_link:
        given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("AWS4-HMAC-SHA256 ")
        parameters = dict(part.split("=", 1) for part in given.split(", ") if "=" in part)
    head = "X-Amz-" if is_link else ""
    credential = parameters.get(f"{head}Credential", "").split("/")
    if len(credential) != 5 or credential[0] != KEY_ID or credential[2] != REGION:
        return False
    when = parameters["X-Amz-Date"] if is_link else environ["HTTP_X_AMZ_DATE"]
    names = parameters[f"{head}SignedHeaders"].split(";")
    if is_link:
        age = time.time() - calendar.timegm(time.strptime(when, "%Y%m%dT%H%M%SZ"))
        if not -5 <= age <= float(parameters["X-Amz-Expires"]):
            return False
    values = {name: environ.get("HTTP_" + name.upper().replace("-", "_"), "") for name in names}
    values |= {"content-type": environ.get("CONTENT_TYPE", "")} if "content-type" in names else {}
    body = "UNSIGNED-PAYLOAD" if is_link else environ["HTTP_X_AMZ_CONTENT_SHA256"]
    canonical = "\n".join(
        [
            environ["REQUEST_METHOD"],
            quote(unquote(environ["PATH_INFO"]), safe="/-_.~"),
            "&".join(
                f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
                for name, value in sorted(query)
                if name != "X-Amz-Signature"
            ),
            *(f"{name}:{values[name].strip()}" for name in names),
            "",
            ";".join(names),
            body,
        ]
    )
    scope = "/".join(credential[1:])
    text = f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for part in credential[1:]:
        key = hmac.digest(key, part.encode(), "sha256")
    expected = hmac.digest(key, text.encode(), "sha256").hex()
    return hmac.compare_digest(expected, parameters.get(f"{head}Signature", ""))


def has_signed_body(environ: Environ) -> bool:
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    environ["wsgi.input"] = io.BytesIO(body)
    return bool(environ["HTTP_X_AMZ_CONTENT_SHA256"] == hashlib.sha256(body).hexdigest())


class S3Process:
    """S3 server process that can be killed and restarted; its objects are lost then."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self._port), str(self._folder)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers, "the S3 server")
        self.client().create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})

    def reset(self) -> None:
        """Start the server without faults, and empty it."""
        for name in ("asked", *_FAULTS):
            (self._folder / name).unlink(missing_ok=True)
        if self._process is None or self._process.poll() is not None:
            self.start()
        for entry in self.client().list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            self.client().delete_object(Bucket=BUCKET, Key=entry["Key"])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def has_died(self) -> bool:
        assert self._process is not None
        return self._process.poll() == _DIE

    def tell(self, name: str, text: str = "") -> None:
        draft = self._folder / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self._folder / name)  # a reader never sees half a file

    def untell(self, name: str) -> None:
        (self._folder / name).unlink()

    def fetched(self) -> list[tuple[str, set[str]]]:
        """Return the paths of requested objects, with the headers of each request."""
        lines = (line.split(" ") for line in (self._folder / "asked").read_text().splitlines())
        return [
            (path, set(headers.split(",")))
            for method, path, headers in lines
            if method == "GET" and path.count("/") > 2
        ]

    def client(self) -> Any:
        return botocore.session.get_session().create_client("s3", endpoint_url=self.endpoint)

    def names(self) -> set[str]:
        """Return the names of all objects, without their folders."""
        listed = self.client().list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return {entry["Key"].rpartition("/")[2] for entry in listed}

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
            return True
        return False


def until(holds: Callable[[], bool], event: str, seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, f"waited for {event}"
        time.sleep(0.05)


def main(port: int, folder: Path) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    run_simple("127.0.0.1", port, Door(app, folder), threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
