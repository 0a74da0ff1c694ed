"""Conversation IDs: deterministic names that say nothing about the thread.

A conversation ID is a hash of (namespace, thread, lane), so that every process
that works on a thread arrives at the same ID without storage, and the raw
thread id never leaves the process.
"""

import base64
import hashlib
import re
from typing import Final

CONVERSATION_ID_PATTERN: Final = r"[A-Za-z0-9_-]{8,128}"
"""What a conversation ID looks like on the wire (the strictest of the routers
that read the same header accepts exactly this alphabet)."""

_CONVERSATION_ID = re.compile(CONVERSATION_ID_PATTERN)
_DIGEST_BYTES = 18  # 24 characters of base64 without padding


def conversation_id(*, namespace: str, thread: str, lane: str = "") -> str:
    """The conversation ID of one lane of one thread.

    Args:
        namespace: whose threads these are (an application, a tenant).
        thread: the thread's own id; hashed, never sent.
        lane: one chain of reasoning inside the thread (a graph node, a
            sub-agent); the empty lane is the thread itself.

    Returns:
        ``kvl-`` and 24 characters of ``[A-Za-z0-9_-]``.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvloom-conv")
    for part in (namespace, thread, lane):
        # Any Python string names a thread, also one that is no valid Unicode.
        encoded = part.encode("utf-8", "surrogatepass")
        # Length first, so that ("ab", "c") and ("a", "bc") differ.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return "kvl-" + base64.urlsafe_b64encode(digest.digest()).decode()


def is_conversation_id(value: str) -> bool:
    """Whether ``value`` may be sent as a conversation ID."""
    return _CONVERSATION_ID.fullmatch(value) is not None
