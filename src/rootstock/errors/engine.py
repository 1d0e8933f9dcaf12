"""Errors of the server's own work."""

from __future__ import annotations

from rootstock.errors.base import RootstockError


class InternalError(RootstockError):
    def __init__(self, path: str, cause: Exception) -> None:
        detail = f"{type(cause).__name__}. The server's log says more. Please report it."
        super().__init__(f"The server failed on {path}: {detail}")


class EngineError(RootstockError):
    code = "engine_error"


class StepFailed(EngineError):
    code = "step_failed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            # The cause's message is left out: it may describe other requests of the same forward.
            f"The forward pass of this request failed: {type(cause).__name__}; the server's log says why. Other "
            "requests go on; send it again, and report it if it fails again."
        )
        self.cause = cause


class ImageFailed(EngineError):
    """Error: the model's vision tower failed on an image, before the forward wrote anything."""

    code = "image_failed"
    http_status = 400

    def __init__(self, segment: int, cause: BaseException) -> None:
        super().__init__(
            f"The model cannot read an image of this request: {type(cause).__name__}; the server's log says why. "
            "Other requests go on. Send the image in another size."
        )
        self.segment = segment  # of the forward
        self.cause = cause


class PoolsLost(EngineError):
    """Error: a forward failed and took the content of the pools with it. The cache must be emptied."""

    code = "pools_lost"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"A forward failed and took the KV cache with it: {type(cause).__name__}; the server's log says why. "
            "Every open request is dropped, and the cache is empty. Send the request again, and report it if it "
            "fails again."
        )
        self.cause = cause


class EngineFault(EngineError):
    code = "engine_fault"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"The engine failed: {type(cause).__name__}; the server's log says why. Every open request is dropped, "
            "and it has started with an empty cache. Send the request again, and report this: it is a bug."
        )
        self.cause = cause


class CacheMisuse(RootstockError):
    """Error of the engine that calls the cache: an argument, or a call at the wrong time. The cache is unchanged."""

    code = "cache_misuse"

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(f"KVCache.{call}: {reason}.")
        self.call = call
        self.reason = reason


class OutOfBlocks(EngineError):
    code = "out_of_blocks"

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"The request needs {needed_bytes:,} more bytes of KV cache, and no bytes of the {budget_bytes:,} can be "
            "freed. Serve with a larger --kv-budget."
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class SamplingFailed(EngineError):
    code = "sampling_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"No token could be chosen: {reason}. Other requests go on. If the logits are not finite, the "
            "model overflows in this dtype: serve with --dtype float32 or bfloat16."
        )


class ResponseStoreFailed(EngineError):
    code = "response_store_failed"

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            f"The store of responses failed: {type(cause).__name__}; the server's log says why. Send the history as "
            "'input'."
        )
        self.cause = cause


class ClearFailed(EngineError):
    code = "clear_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Records may remain on the disk: {reason}. The server's log says more. Try again, or stop the server "
            "and delete the directory of --disk-dir."
        )
        self.reason = reason


class ConstraintFailed(EngineError):
    code = "constraint_failed"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The grammar or schema of this request could not be followed any further: {reason}. Other requests go "
            "on. Ask with a simpler one: this one would fail again."
        )
        self.reason = reason


class EngineStopped(EngineError):
    code = "engine_stopped"
    http_status = 503

    def __init__(self, reason: str = "The server is shutting down") -> None:
        super().__init__(f"{reason}. Try again when it is back.")


class LLMForked(EngineStopped):
    """Error: a fork of the process has the library's objects, but not the thread that runs the model."""

    code = "llm_forked"

    def __init__(self) -> None:
        RootstockError.__init__(
            self,
            "This LLM was made before the process was forked, and its engine runs in the parent only. Make the LLM "
            "in the process that uses it, or start processes with multiprocessing's 'spawn'.",
        )


class LLMClosed(EngineStopped):
    code = "llm_closed"

    def __init__(self) -> None:
        RootstockError.__init__(self, "This LLM was closed, which ended its requests. Make another one.")
