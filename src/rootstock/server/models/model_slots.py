"""The places of a server's models: each is loaded, being loaded or unloaded, or has no engine.

One thread loads and unloads, a model at a time, so that each check of the free memory is exact. Requests to loaded
models go on meanwhile.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, assert_never

from rootstock.cache.shared_budget import BudgetShare, SharedBudget
from rootstock.config import EngineConfig, ServedModelConfig, Task
from rootstock.engine.clearing import Clearing, ModelNamespaces
from rootstock.engine.device_thread import DeviceThread
from rootstock.engine.stats import Cleared
from rootstock.errors import (
    ClearFailed,
    ClearUnderWay,
    EngineStopped,
    MemoryLacks,
    ModelBusy,
    ModelTooLarge,
    ModelUnavailable,
    QueueFull,
    RootstockError,
)
from rootstock.pipeline.model import ServedModel
from rootstock.runtime.host_memory import return_free_memory
from rootstock.server.models.embedding_model import AnyModel, EmbeddingModel
from rootstock.tiers.disk.tier import clear_directory

log = logging.getLogger(__name__)

M = TypeVar("M", bound=AnyModel)

RETRY_S = 30.0  # a model that could not be loaded is tried again by the first request after this time
_STOP_S = 60.0  # for the end of an unload when the server stops
_WATCH_S = 0.25  # between two looks whether the server stops
_MOST_TO_CLEAR = 1024  # of one model that is not loaded
_MOST_BYTES_PER_PARAMETER = 8  # float32 weights, and copies of them in another layout

Load = Callable[[ServedModelConfig], AnyModel]  # makes a model whose engine was not started


@dataclass(slots=True)
class UnloadedSlot:
    error: RootstockError | None = None  # of the last try to load it
    retry_at: float = 0.0


@dataclass(slots=True)
class LoadingSlot:
    done: Future[None]
    awaited: int = 0  # requests that will use the model
    loaded: LoadedSlot | None = None  # the model, once its load has succeeded


@dataclass(slots=True)
class LoadedSlot:
    model: AnyModel
    uses: int = 0  # requests
    idle_since: float = 0.0


@dataclass(slots=True)
class UnloadingSlot:
    done: Future[None]
    held: list[AnyModel]  # the model, until its engine is being stopped


State = UnloadedSlot | LoadingSlot | LoadedSlot | UnloadingSlot


class ModelSlot:
    """The place of one model. `ModelSlots` changes it under its lock."""

    def __init__(self, name: str, config: ServedModelConfig | None, state: State) -> None:
        self.name = name
        self.config = config  # None: the model is always loaded
        self.state = state
        self.created = int(time.time())
        self.card: Mapping[str, Any] = {}  # numbers of the model, as it was loaded last
        self.namespaces: ModelNamespaces | None = None  # as it was loaded last
        self.to_clear: set[Clearing] = (
            set()
        )  # when it is loaded: before, the namespaces of its records are not known
        # None: not known before its first load.
        self.task: Task | None = "generate" if config is None else config.task

    @property
    def model(self) -> AnyModel | None:
        """The model, if it is loaded."""
        state = self.state
        return state.model if isinstance(state, LoadedSlot) else None

    @property
    def loaded(self) -> ServedModel | None:
        """The generation model, if it is one and loaded."""
        model = self.model
        return model if isinstance(model, ServedModel) else None

    @property
    def loaded_embedding(self) -> EmbeddingModel | None:
        """The embedding model, if it is one and loaded."""
        model = self.model
        return model if isinstance(model, EmbeddingModel) else None

    @property
    def status(self) -> str:
        state = self.state
        match state:
            case LoadedSlot():
                return "loaded"
            case LoadingSlot():
                return "loading"
            case UnloadingSlot():
                return "unloading"
            case UnloadedSlot():
                return "unloaded" if state.error is None else "failed"
            case _:
                assert_never(state)


class ModelUse(Generic[M]):
    """A request's use of a model, which stays loaded until the use ends."""

    def __init__(self, model: M, end: Callable[[], None]) -> None:
        self.model = model
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        """Ends the use. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()


class AwaitedModel:
    """A request's wait for the end of a load or an unload. It ends by `take` or by `drop`.

    A loaded model counts the requests that waited for it as its uses: else the next load, of a model that another
    client asks for, could take its memory before one of them came to it, again and again.
    """

    def __init__(self, done: Future[None], end: Callable[[], ModelUse[AnyModel] | None]) -> None:
        self.done = done
        self._end: Callable[[], ModelUse[AnyModel] | None] | None = end

    def take(self) -> ModelUse[AnyModel] | None:
        """Returns the use of the model, after the end; None: ask again."""
        end, self._end = self._end, None
        return None if end is None else end()

    def drop(self) -> None:
        """Gives up the wait. Idempotent."""
        use = self.take()
        if use is not None:
            use.end()


class ModelSlots:
    """All models of a server, and the thread that loads and unloads them. Any thread may call the methods."""

    def __init__(
        self,
        slots: Sequence[ModelSlot],
        load: Load | None = None,
        device: DeviceThread | None = None,
        budget: SharedBudget | None = None,
        limits: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        records_of: Callable[[ServedModelConfig], Path | None] = lambda config: None,
    ) -> None:
        """Without a `device`, the caller starts the engines. `limits` bound the requests that wait for loads.

        `records_of` returns the directory of a model's disk tier.
        """
        self.all = tuple(slots)
        self.budget = budget
        self._load_model = load
        self._device = device
        self._limits = limits or EngineConfig()
        self._clock = clock
        self._records_of = records_of
        self._clearing = threading.Lock()  # held by a request that clears a model which was not loaded
        self._lock = threading.Lock()  # of the slots' states and of the fields below
        self._waiting = 0
        self._stopping = False
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unload_followers: list[Callable[[], None]] = []

    def follow_unloads(self, follower: Callable[[], None]) -> None:
        """Calls `follower` on the models' thread while a model is unloaded, to drop its references to the model."""
        self._unload_followers.append(follower)

    # ---------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Starts the thread, and loads the models that are served from the start. Raises StartupError."""
        assert self._thread is None, "slots are started once"
        if self._device is not None:
            self._device.thread.start()
        try:
            for slot in self.all:
                if slot.config is not None and slot.config.load == "start":
                    slot.state = LoadingSlot(Future())
                    self._finish_loading(slot, self._loaded(slot))
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(target=self._run, name="rootstock-models", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the engines. A load that is under way goes on, and its model ends at once. Idempotent."""
        with self._lock:
            self._stopping = True
            models = [slot.model for slot in self.all]
            waited = [slot.state.done for slot in self.all if isinstance(slot.state, LoadingSlot)]
            ending = list[Future[None]]()
            for state in (slot.state for slot in self.all):
                if isinstance(state, UnloadingSlot) and state.held:  # the thread has not come to it
                    models.append(state.held.pop())
                    waited.append(state.done)
                elif isinstance(state, UnloadingSlot):
                    ending.append(state.done)
        for done in waited:
            if not done.done():
                done.set_result(None)  # those who wait find that the server stops
        self._tasks.put(lambda: None)
        for model in models:
            if model is not None:
                model.engine.stop()
        wait(ending, _STOP_S)  # their engines write to the tiers
        if self._device is not None and self._device.thread.ident is not None:
            self._device.stop()

    # ------------------------------------------------------------------------------------------- uses

    def use(self, slot: ModelSlot) -> ModelUse[AnyModel] | AwaitedModel:
        """Returns a use of a loaded model, or the wait for the end of its load or unload.

        Begins to load a model that is unloaded. Raises ModelUnavailable and EngineStopped.
        """
        with self._lock:
            if self._stopping:
                raise EngineStopped
            state = slot.state
            match state:
                case LoadedSlot():
                    state.uses += 1
                    return ModelUse(state.model, lambda: self._end_use(slot, state))
                case LoadingSlot():
                    return self._awaited(slot, state)
                case UnloadingSlot():
                    return AwaitedModel(state.done, lambda: None)
                case UnloadedSlot():
                    left_s = state.retry_at - self._clock()
                    if state.error is not None and left_s > 0:
                        raise ModelUnavailable(slot.name, state.error.code, left_s)
                    slot.state = loading = LoadingSlot(Future())
                    awaited = self._awaited(slot, loading)
                case _:
                    assert_never(state)
        self._tasks.put(lambda: self._load(slot))
        return awaited

    def _awaited(self, slot: ModelSlot, loading: LoadingSlot) -> AwaitedModel:
        """Counts a request that waits for a load. Under the lock."""
        loading.awaited += 1

        def end() -> ModelUse[AnyModel] | None:
            with self._lock:
                loaded = loading.loaded
                if loaded is None:
                    loading.awaited -= 1  # it goes before the end, or the load has failed
                    return None
            return ModelUse(loaded.model, lambda: self._end_use(slot, loaded))

        return AwaitedModel(loading.done, end)

    def _end_use(self, slot: ModelSlot, state: LoadedSlot) -> None:
        with self._lock:
            state.uses -= 1
            if state.uses:
                return
            state.idle_since = self._clock()
        if slot.config is not None and slot.config.idle_unload_s is not None:
            self._tasks.put(lambda: None)  # the thread waits for another time now

    def wait(self) -> ModelWait:
        """Counts a request that waits for a load. Raises QueueFull."""
        with self._lock:
            if self._waiting >= self._limits.max_queue:
                raise QueueFull(self._limits.max_batch, self._limits.max_queue)
            self._waiting += 1
        return ModelWait(self._end_wait)

    def _end_wait(self) -> None:
        with self._lock:
            self._waiting -= 1

    # -------------------------------------------------------------------------------- loads and unloads

    def unload(self, slot: ModelSlot) -> Future[None] | None:
        """Begins to unload a model without uses. Returns the end to wait for; None: it is not loaded.

        Raises ModelBusy, also for a model that cannot be loaded again.
        """
        with self._lock:
            state = slot.state
            if isinstance(state, UnloadingSlot):
                return state.done
            if isinstance(state, UnloadedSlot):
                slot.state = UnloadedSlot()  # forgets a failure
                return None
            if not isinstance(state, LoadedSlot) or state.uses or slot.config is None:
                raise ModelBusy(slot.name)
            slot.state = unloading = UnloadingSlot(Future(), [state.model])
        self._tasks.put(lambda: self._unload(slot, unloading))
        return unloading.done

    def clear(self, slot: ModelSlot, clearing: Clearing) -> Cleared:
        """Removes the cached prefixes of a model, loaded or not. Waits for the end of its load or unload.

        Raises ClearUnderWay, ClearFailed and EngineStopped. Do not call it on an event loop.
        """
        model = slot.loaded
        if model is not None:
            try:
                return model.clear(clearing)
            except EngineStopped:
                if slot.loaded is model:  # it is not being unloaded: the server stops, or the engine is dead
                    raise
        if not clearing.disk:
            return Cleared(0, 0)
        if not self._clearing.acquire(blocking=False):  # each holds a thread of the server
            raise ClearUnderWay
        try:
            done: Future[Cleared] = Future()
            self._tasks.put(lambda: self._clear(slot, clearing, done))
            while not done.done():
                wait([done], _WATCH_S)
                if self._stopping and not done.done():
                    raise EngineStopped
            return done.result()
        finally:
            self._clearing.release()

    def _clear(self, slot: ModelSlot, clearing: Clearing, done: Future[Cleared]) -> None:
        """Clears a model that was not loaded when it was asked for. For the thread: no model is loaded meanwhile."""
        try:
            model = slot.loaded
            done.set_result(self._clear_records(slot, clearing) if model is None else model.clear(clearing))
        except Exception as error:
            done.set_exception(error)

    def _clear_records(self, slot: ModelSlot, clearing: Clearing) -> Cleared:
        """Clears the disk tier of an unloaded model."""
        folder = None if slot.config is None else self._records_of(slot.config)
        if folder is None or not folder.exists():
            return Cleared(0, 0)
        if not clearing.is_of_all and slot.namespaces is None:
            if len(slot.to_clear) >= _MOST_TO_CLEAR:
                raise ClearUnderWay
            slot.to_clear.add(clearing)
            return Cleared(0, 0, later=True)
        namespaces = [] if slot.namespaces is None else clearing.namespaces(slot.namespaces)
        reason = clear_directory(folder, [each.digest() for each in namespaces])
        if reason is not None:
            raise ClearFailed(reason)
        return Cleared(0, 0)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._tasks.get(timeout=self._next_idle_s())()
            except queue.Empty:
                for slot in self._overdue():
                    self._unload_idle(slot)

    def _next_idle_s(self) -> float | None:
        """Returns the time until a model has been idle for long enough. None: none will be."""
        with self._lock:
            times = [
                state.idle_since + slot.config.idle_unload_s
                for slot in self.all
                if isinstance(state := slot.state, LoadedSlot)
                and not state.uses
                and slot.config is not None
                and slot.config.idle_unload_s is not None
                and not slot.config.pin
            ]
        return max(0.0, min(times) - self._clock()) if times else None

    def _overdue(self) -> list[ModelSlot]:
        now = self._clock()
        return [
            slot
            for slot in self._idle()
            if slot.config is not None
            and slot.config.idle_unload_s is not None
            and isinstance(slot.state, LoadedSlot)
            and slot.state.idle_since + slot.config.idle_unload_s <= now
        ]

    def _idle(self) -> list[ModelSlot]:
        """Returns the slots of models that may be unloaded, the least recently used first."""
        with self._lock:
            found = [
                (state.idle_since, place, slot)
                for place, slot in enumerate(self.all)
                if isinstance(state := slot.state, LoadedSlot)
                and not state.uses
                and slot.config is not None
                and not slot.config.pin
            ]
        return [slot for _, _, slot in sorted(found, key=lambda one: one[:2])]

    def _load(self, slot: ModelSlot) -> None:
        try:
            model = self._loaded(slot)
        except RootstockError as error:
            self._fail(slot, error)
        except Exception as error:
            self._fail(slot, ModelUnavailable(slot.name, type(error).__name__, RETRY_S))
        else:
            self._finish_loading(slot, model)

    def _loaded(self, slot: ModelSlot) -> AnyModel:
        """Loads a model. Unloads idle ones, the least recently used first, until the memory suffices."""
        assert self._load_model is not None
        assert slot.config is not None
        while True:
            try:
                model = self._load_model(slot.config)
                while isinstance(model, ServedModel) and slot.to_clear:
                    model.clear(slot.to_clear.pop())
                return model
            except (ModelTooLarge, MemoryLacks, MemoryError) as error:
                idle = self._idle()
                if isinstance(error, ModelTooLarge) and error.weights_bytes - error.free_bytes > _most_bytes(
                    idle
                ):
                    raise  # unloading them all would not help
                if not any(self._unload_idle(other) for other in idle):
                    raise

    def _finish_loading(self, slot: ModelSlot, model: AnyModel) -> None:
        state = slot.state
        assert isinstance(state, LoadingSlot)
        with self._lock:
            slot.task = "embed" if isinstance(model, EmbeddingModel) else "generate"
            if stopping := self._stopping:
                slot.state = UnloadedSlot()
            else:
                model.engine.start(self._device)
                slot.state = state.loaded = LoadedSlot(model, state.awaited, self._clock())
        if stopping:
            model.engine.stop()
        elif not state.done.done():
            state.done.set_result(None)

    def _fail(self, slot: ModelSlot, error: RootstockError) -> None:
        log.error("the model %r could not be loaded: %s", slot.name, error, exc_info=error)
        state = slot.state
        assert isinstance(state, LoadingSlot)
        with self._lock:
            slot.state = UnloadedSlot(error, self._clock() + RETRY_S)
        if not state.done.done():
            state.done.set_result(None)  # those who wait ask again, and get the error

    def _unload_idle(self, slot: ModelSlot) -> bool:
        """Unloads a model if it is still idle. For the thread."""
        with self._lock:
            state = slot.state
            if not isinstance(state, LoadedSlot) or state.uses:
                return False
            slot.state = unloading = UnloadingSlot(Future(), [state.model])
        del state
        self._unload(slot, unloading)
        return True

    def _unload(self, slot: ModelSlot, unloading: UnloadingSlot) -> None:
        """Stops an engine, which writes its cache to the tiers, and frees the memory.

        Takes the model out of `held`, so that no caller's variable keeps its memory.
        """
        with self._lock:
            if not unloading.held:
                return  # `stop` has taken it
            model = unloading.held.pop()
        if isinstance(model, ServedModel):
            slot.namespaces = model.engine.namespaces
        share = _share_of(model)
        try:
            model.engine.stop()
        except Exception:
            log.exception("the engine of the model %r did not stop cleanly", slot.name)
        with self._lock:
            slot.state = UnloadedSlot()
        engine = weakref.ref(model.engine)
        del model
        for follower in self._unload_followers:
            follower()
        gc.unfreeze()  # objects that were loaded at the start are garbage now, too
        gc.collect()
        if engine() is None:
            gc.freeze()  # else a page still reads from the engine: frozen, its cycles would never be collected
        return_free_memory()
        if share is not None and self.budget is not None:
            self.budget.leave(share)
            if self._device is not None:
                self._device.wake()  # requests of other models may wait for the memory
        unloading.done.set_result(None)


def _most_bytes(slots: Sequence[ModelSlot]) -> int:
    """Returns an upper bound of the memory that unloading models frees."""
    models = [model for slot in slots if (model := slot.model) is not None]
    shares = [_share_of(model) for model in models]
    weights = sum(_MOST_BYTES_PER_PARAMETER * model.description.parameters for model in models)
    generating = [model for model in models if isinstance(model, ServedModel)]
    weights += sum(adapter.loaded.nbytes for model in generating for adapter in model.engine.adapters.all)
    return weights + sum(share.backed_bytes for share in shares if share is not None)


def _share_of(model: AnyModel) -> BudgetShare | None:
    """Returns the part of the shared budget that a model's cache has."""
    return model.engine.budget_share if isinstance(model, ServedModel) else None


class ModelWait:
    """A request's place among those that wait for loads."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __enter__(self) -> ModelWait:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
