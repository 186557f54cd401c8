"""Notices by e-mail: one message for each, over TLS only."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate

from barnraise.agent.notifications.delivery import (
    DELIVERED,
    TIMEOUT_S,
    Delivery,
    certificate_delivery,
    mail_delivery,
)
from barnraise.agent.notifications.notice import Notice
from barnraise.agent_client.notifications.targets import TLS_PORT, EmailTarget


def mail_message(target: EmailTarget, notice: Notice) -> EmailMessage:
    """Return the mail with a notice. Its Message-ID is the same in each attempt. Pure."""
    message = EmailMessage()
    message["From"] = target.sender
    message["To"] = target.address
    message["Subject"] = notice.header_title
    message["Date"] = formatdate(notice.at)
    message["Message-ID"] = f"<{notice.id}@barnraise.invalid>"
    message["Auto-Submitted"] = "auto-generated"  # no automatic reply comes back (RFC 3834)
    message.set_content(f"{notice.title}: {notice.text}\n\nSent by {notice.sender}.\n")
    return message


def send_mail(target: EmailTarget, notice: Notice) -> Delivery:
    """Send a notice by e-mail; the server must offer TLS with a valid certificate."""
    context = ssl.create_default_context()
    host = target.host.strip("[]")
    is_accepted = False
    try:
        with (
            smtplib.SMTP_SSL(host, target.port, timeout=TIMEOUT_S, context=context)
            if target.port == TLS_PORT
            else smtplib.SMTP(host, target.port, timeout=TIMEOUT_S)
        ) as server:
            if target.port != TLS_PORT:
                server.starttls(context=context)
            if target.user:
                server.login(target.user, target.password)
            server.send_message(mail_message(target, notice))
            is_accepted = True
    except (OSError, smtplib.SMTPException, ValueError) as error:
        if not is_accepted:  # a failure to say goodbye does not matter
            return mail_failure(error)
    return DELIVERED


def mail_failure(error: Exception) -> Delivery:
    """Return why a mail was not sent, in words without the server's own. Pure."""
    match error:
        case smtplib.SMTPAuthenticationError():
            return mail_delivery(error.smtp_code, "the login")
        case smtplib.SMTPRecipientsRefused():
            codes = [code for code, _ in error.recipients.values()]
            return mail_delivery(max(codes, default=0), "the address")
        case smtplib.SMTPResponseException():
            return mail_delivery(error.smtp_code, "the mail")
        case smtplib.SMTPNotSupportedError():
            return Delivery("the mail server offers no TLS, or no login that is known here", is_final=True)
        case ssl.SSLCertVerificationError():
            return certificate_delivery("mail server", error.verify_code, error.verify_message)
        case TimeoutError():
            return Delivery(f"the mail server did not answer within {TIMEOUT_S:g} s")
        case OSError() if error.strerror:
            return Delivery(f"the mail server cannot be reached: {error.strerror}")
    # A ValueError comes from our side, such as a password that is not ASCII.
    return Delivery(f"the mail was not sent: {type(error).__name__}", isinstance(error, ValueError))
