"""Errors of a server that has no room or no time for a request now."""

from __future__ import annotations

import math

from rootstock.errors.base import RootstockError, shown
from rootstock.units import MIB


class Overloaded(RootstockError):
    code = "overloaded"
    http_status = 429


class QueueFull(Overloaded):
    code = "queue_full"

    def __init__(self, max_batch: int, max_queue: int) -> None:
        super().__init__(
            f"The server is full: {max_batch} requests run (--max-batch) and {max_queue} wait (--max-queue). Try "
            "again in a moment."
        )
        self.max_batch = max_batch
        self.max_queue = max_queue


class SessionsFull(Overloaded):
    code = "sessions_full"

    def __init__(self, most: int, most_wait_s: float) -> None:
        super().__init__(
            f"{most} requests wait for their session's place in memory (--max-held), each for up to "
            f"{most_wait_s:g} s (--max-session-wait). Try again later."
        )
        self.most = most
        self.retry_after_s = most_wait_s / 10


class ImagesFull(Overloaded):
    code = "images_full"

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            f"The images of open requests would take more than {most_bytes:,} bytes. Try again in a moment."
        )
        self.most_bytes = most_bytes


class EmbeddingsFull(Overloaded):
    code = "embeddings_full"

    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            f"The embeddings of requests that run, wait or are being answered have {most_bytes // MIB} MiB together, "
            "and there is no room for those of this request. Read answers to their end, and try again in a moment."
        )
        self.most_bytes = most_bytes


class ModelUnavailable(Overloaded):
    code = "model_unavailable"
    http_status = 503

    def __init__(self, name: str, cause: str, retry_s: float) -> None:
        super().__init__(
            f"The model {shown(name)} could not be loaded ({cause}); the server's log has the details. The server "
            f"tries again for a request that comes after {max(1, round(retry_s))} s."
        )
        self.cause = cause
        self.retry_s = retry_s


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"

    def __init__(self, name: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            f"The tenant has reached its limit: {name} is {limit:,} (--api-keys). Try again in "
            f"{max(1, math.ceil(retry_after_s))} s."
        )
        self.name = name
        self.limit = limit
        self.retry_after_s = retry_after_s


class ClearUnderWay(Overloaded):
    code = "clear_under_way"

    def __init__(self) -> None:
        super().__init__("Records are being removed for an earlier request. Try again in a moment.")


class IdleWorkFull(Overloaded):
    code = "idle_work_full"

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(
            f"Too many prompts wait to be cached in idle time: {waiting:,} of yours, of at most {limit:,}. Try again "
            "when some of them are cached."
        )


class CompilerBusy(Overloaded):
    code = "compiler_busy"
    http_status = 503

    def __init__(self) -> None:
        super().__init__(
            "Too many grammars and schemas of other requests are being compiled or followed. Try again in a moment, "
            "or send a smaller one."
        )


class TooManyConnections(Overloaded):
    code = "too_many_connections"
    http_status = 503

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server has its most connections, {limit:,} (--max-connections). Try again in a moment."
        )


class TooManyBodyBytes(Overloaded):
    code = "too_many_body_bytes"
    http_status = 503

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"With this request, the bodies that the server holds would exceed {limit_bytes:,} bytes. Try again in a "
            "moment."
        )


class Draining(Overloaded):
    code = "draining"
    http_status = 503

    def __init__(self) -> None:
        super().__init__(
            "The server finishes its requests and stops. Send this one to another server, or try again."
        )
