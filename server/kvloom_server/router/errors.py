"""What goes wrong for a client, in the shape that OpenAI's clients understand.

RouterError
├── BadRequestError      4xx: the request can't be carried out as it is
└── UnavailableError     503: try again, it is not the request's fault
"""

from typing import Final

import msgspec

RETRY_AFTER_S: Final = 2


class RouterError(Exception):
    """An answer with an error body: ``{"error": {message, type, param, code}}``."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str,
        code: str,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The same as the last event of a stream that can't go on."""
        return b"data: " + self.body() + b"\n\n"


class BadRequestError(RouterError):
    """The client must change something; ``code`` and ``param`` say what."""

    def __init__(
        self, message: str, *, code: str, status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(
            message,
            status=status,
            kind="invalid_request_error",
            code=code,
            param=param,
        )


class UnavailableError(RouterError):
    """No engine could answer; the same request may succeed later."""

    def __init__(self, message: str, *, code: str, status: int = 503) -> None:
        super().__init__(
            message,
            status=status,
            kind="server_error",
            code=code,
            headers=(("retry-after", str(RETRY_AFTER_S)),),
        )


def unknown_model(model: str) -> BadRequestError:
    """404 for a model that no engine serves."""
    return BadRequestError(
        f"The model {model!r} does not exist here: GET /v1/models lists those that do",
        code="model_not_found",
        status=404,
        param="model",
    )


def no_engine() -> UnavailableError:
    """503 while no decode engine is up."""
    return UnavailableError(
        "No decode engine is up: wait for it to start, or look at GET /health",
        code="no_engine",
    )


def engine_failed() -> UnavailableError:
    """503 when every decode engine that was tried broke off or failed."""
    return UnavailableError(
        "No decode engine could answer this request now: send it again in a "
        "moment, or look at GET /health",
        code="engine_failed",
    )


def engine_failed_midway() -> UnavailableError:
    """The error event of a stream whose engine died."""
    return UnavailableError(
        "The decode engine failed in the middle of the answer: what came so far "
        "is incomplete, send the request again",
        code="engine_failed",
    )


def stopping() -> UnavailableError:
    """503, or the error event of a stream, when the router stops before the
    answer's end."""
    return UnavailableError(
        "The router is stopping, and this answer is not complete: send the "
        "request again",
        code="router_stopping",
    )


def not_starting() -> UnavailableError:
    """503 for a turn that comes while the router stops."""
    return UnavailableError(
        "The router is stopping and takes no more requests: send the request again",
        code="router_stopping",
    )


def too_large(limit_bytes: int) -> BadRequestError:
    """413 for a body over the limit."""
    return BadRequestError(
        f"The request is larger than {limit_bytes} bytes, this router's limit "
        "(KVLOOM_BODY_LIMIT_BYTES)",
        code="request_too_large",
        status=413,
    )


def out_of_time() -> UnavailableError:
    """504, or the error event of a stream, when a request took too long."""
    return UnavailableError(
        "The answer took longer than this router lets a request take "
        "(KVLOOM_REQUEST_TIMEOUT_S): ask for fewer tokens, or try again later",
        code="request_timeout",
        status=504,
    )


def body_stopped() -> BadRequestError:
    """408 for a body that does not come to its end."""
    return BadRequestError(
        "The request stopped coming before its end: send it again",
        code="request_incomplete",
        status=408,
    )


def no_model_named() -> BadRequestError:
    """400 where engines serve several models and the request names none."""
    return BadRequestError(
        "Several models are served here: name one in `model`, GET /v1/models lists "
        "them",
        code="model_required",
        param="model",
    )
