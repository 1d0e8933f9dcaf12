"""Masks that are computed on other threads while the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from rootstock.text.constraints.progress import AnswerProgress


class MaskWorker:
    """A thread that waits for masks, which the processes of grammars compute.

    Between `begin` and `wait`, nothing else may use the given answers' progress.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None  # started with the first mask
        self._begun: Future[None] | None = None

    def begin(self, answers: Sequence[AnswerProgress]) -> None:
        assert self._begun is None, "masks are being computed"
        wanted = [answer for answer in answers if answer.needs_mask]
        if not wanted:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "rootstock-masks")
        self._begun = self._threads.submit(_prepare, wanted)

    def wait(self) -> None:
        """Waits for the masks that were begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _prepare(answers: Sequence[AnswerProgress]) -> None:
    for answer in answers:
        with suppress(Exception):
            answer.begin()
    for answer in answers:  # all processes compute at once
        answer.send()
    for answer in answers:
        with suppress(Exception):  # the answer computes the mask again when it needs it, and fails alone
            answer.prepare()
