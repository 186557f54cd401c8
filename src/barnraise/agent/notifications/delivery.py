"""Result of one attempt to deliver a notice, and whether another attempt follows. Pure."""

from __future__ import annotations

from typing import NamedTuple

from barnraise.core.flow.backoff import SteppedBackoff

RETRIES = SteppedBackoff((5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0))
MAX_ATTEMPTS = 30  # for about a day
TIMEOUT_S = 10.0  # of a connection, and of each answer
LONGEST_S = 40.0  # of a whole attempt

_TRY_AGAIN = (408, 425, 429)
_OTHER_NAMES = (62, 64)  # OpenSSL's codes for a certificate of another name or address


class Delivery(NamedTuple):
    """Result of one attempt. ``failure``: empty if the target took the notice. It quotes no secret.

    ``is_final``: another attempt would fail in the same way.
    """

    failure: str = ""
    is_final: bool = False


DELIVERED = Delivery()


def http_delivery(status: int) -> Delivery:
    """Return what the status code of an HTTP response means."""
    if 200 <= status < 300:
        return DELIVERED
    if 300 <= status < 400:
        return Delivery(
            f"the server answered {status}: it redirects, and notices do not follow", is_final=True
        )
    is_final = 400 <= status < 500 and status not in _TRY_AGAIN
    return Delivery(f"the server answered {status}", is_final)


def mail_delivery(code: int, what: str) -> Delivery:
    """Return what the refusal of a mail server means; codes below 500 are temporary."""
    return Delivery(f"the mail server refused {what} with {code}", is_final=500 <= code < 600)


def certificate_delivery(server: str, code: int, message: str) -> Delivery:
    """Return what an invalid certificate means; ``code`` and ``message`` are those of OpenSSL.

    Its message about a wrong name quotes the name that was asked for, which may be a secret.
    """
    why = "it is for another name" if code in _OTHER_NAMES else message
    return Delivery(f"the certificate of the {server} is not valid: {why}")


def gives_up(delivery: Delivery, attempts: int) -> bool:
    """Tell whether a notice is dropped after its failed attempt number ``attempts``, counted from 1."""
    return delivery.is_final or attempts >= MAX_ATTEMPTS
