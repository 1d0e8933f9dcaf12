"""Limits of tenants: token buckets of requests and of tokens, requests in progress, and headers that tell of them.

A bucket holds as much as one minute's limit and fills evenly. A request is admitted if its tenant's buckets hold its
request and the tokens of its prompt. Tokens of the answer are taken as they come, so that a bucket may owe some: the
next request then waits. Methods may be called from any thread.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from rootstock.errors import RateLimited
from rootstock.server.access.rules import NO_LIMITS, TenantLimits

MAX_TENANTS = 10_000  # whose use is remembered; more may be in progress
CONCURRENCY_RETRY_S = 1.0

Headers = list[tuple[bytes, bytes]]


# The headers that `TenantUse.headers` makes.
LIMIT_HEADERS = tuple(
    form.format(kind=kind, part=part)
    for form in ("x-ratelimit-{part}-{kind}", "anthropic-ratelimit-{kind}-{part}")
    for kind in ("requests", "tokens")
    for part in ("limit", "remaining", "reset")
)


class Bucket:
    """A token bucket. Not safe for threads by itself."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        if now > self._at:
            self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60.0)
            self._at = now
        return self._level

    def missing_s(self, amount: float, now: float) -> float:
        """Returns how long it takes until the bucket holds `amount`, or is full if it cannot hold so much."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * 60.0 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes an amount, which may be more than the bucket holds, or negative."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def change(self, per_minute: int, now: float) -> None:
        self._level = min(self.level(now), float(per_minute))
        self.per_minute = per_minute


class TenantUse:
    """The use that one tenant makes of its limits."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.in_progress = 0
        self._clock = clock
        self._limits = NO_LIMITS
        self._buckets: dict[str, Bucket] = {}  # by the limit's name
        self._lock = threading.Lock()

    def enter(self, limits: TenantLimits) -> None:
        """Takes a request, which `leave` ends. Raises RateLimited, without any change."""
        with self._lock:
            now = self._clock()
            if limits != self._limits:
                self._change(limits, now)
            if limits.max_concurrency is not None and self.in_progress >= limits.max_concurrency:
                raise RateLimited("max_concurrency", limits.max_concurrency, CONCURRENCY_RETRY_S)
            self._refuse("requests_per_minute", 1, now)
            for name in ("tokens_per_minute", "uncached_tokens_per_minute"):  # debts of earlier answers
                self._refuse(name, 1, now)
            self._take("requests_per_minute", 1, now)
            self.in_progress += 1

    def leave(self) -> None:
        with self._lock:
            self.in_progress -= 1

    def take_prompts(self, tokens: int) -> None:
        """Takes the tokens of a request's prompts. Raises RateLimited, without any change."""
        with self._lock:
            now = self._clock()
            self._refuse("tokens_per_minute", tokens, now)
            self._take("tokens_per_minute", tokens, now)
            self._take("uncached_tokens_per_minute", tokens, now)

    def take_answer(self, tokens: int) -> None:
        with self._lock:
            self._take("tokens_per_minute", tokens, self._clock())

    def give_back_cached(self, tokens: int) -> None:
        """Gives back the tokens of a prompt that were found in the cache."""
        with self._lock:
            self._take("uncached_tokens_per_minute", -tokens, self._clock())

    def _change(self, limits: TenantLimits, now: float) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "uncached_tokens_per_minute"):
            per_minute = getattr(limits, name)
            if per_minute is None:
                self._buckets.pop(name, None)
            elif name in self._buckets:
                self._buckets[name].change(per_minute, now)
            else:
                self._buckets[name] = Bucket(per_minute, now)
        self._limits = limits

    def _refuse(self, name: str, amount: int, now: float) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None and (wait_s := bucket.missing_s(amount, now)) > 0:
            raise RateLimited(name, bucket.per_minute, wait_s)

    def _take(self, name: str, amount: int, now: float) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None:
            bucket.take(amount, now)

    def headers(self, *, anthropic: bool) -> Headers:
        """Returns the headers of an answer, in the form of Anthropic's API or of OpenAI's."""
        told: Headers = []
        with self._lock:
            now = self._clock()
            for kind, name in (("requests", "requests_per_minute"), ("tokens", "tokens_per_minute")):
                bucket = self._buckets.get(name)
                if bucket is None:
                    continue
                limit, left = str(bucket.per_minute), str(max(0, math.floor(bucket.level(now))))
                full_s = bucket.missing_s(bucket.per_minute, now)
                form, reset = "x-ratelimit-{part}-{kind}", duration(full_s)
                if anthropic:
                    at = datetime.now(UTC) + timedelta(seconds=math.ceil(full_s))
                    form, reset = "anthropic-ratelimit-{kind}-{part}", f"{at:%Y-%m-%dT%H:%M:%SZ}"
                for part, value in (("limit", limit), ("remaining", left), ("reset", reset)):
                    told.append((form.format(part=part, kind=kind).encode(), value.encode()))
        return told


def duration(seconds: float) -> str:
    """Returns a duration as OpenAI's headers write it: 20ms, 1s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class RateLimiter:
    """The use of all tenants. It forgets those that were idle longest: a header may name any number of them."""

    def __init__(self, clock: Callable[[], float], most: int = MAX_TENANTS) -> None:
        self._clock = clock
        self._most = most
        self._uses: OrderedDict[str, TenantUse] = OrderedDict()  # the one used last at the end
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._uses)

    def enter(self, tenant: str, limits: TenantLimits) -> TenantUse:
        """Takes a request of a tenant, which `TenantUse.leave` ends. Raises RateLimited."""
        with self._lock:
            use = self._uses.get(tenant)
            if use is None:
                use = self._uses[tenant] = TenantUse(tenant, self._clock)
                self._forget_idle()
            self._uses.move_to_end(tenant)
        use.enter(limits)
        return use

    def of(self, tenant: str) -> TenantUse | None:
        return self._uses.get(tenant)

    def _forget_idle(self) -> None:
        if len(self._uses) <= self._most:
            return
        idle = next((name for name, use in self._uses.items() if not use.in_progress), None)
        if idle is not None:
            del self._uses[idle]


class Meter:
    """The tokens of one HTTP request, taken from its tenant's buckets."""

    def __init__(self, use: TenantUse) -> None:
        self._use = use
        self._prompts: dict[int, int] = {}  # tokens by the index of a request, until its hit is known

    def begin(self, prompt_tokens: Sequence[int], choices_per_prompt: int) -> None:
        """Takes the tokens of all prompts, before their requests are submitted. Raises RateLimited."""
        prompts = dict(enumerate(prompt_tokens))
        prompts = {index: tokens for index, tokens in prompts.items() if index % choices_per_prompt == 0}
        self._use.take_prompts(sum(prompts.values()))
        self._prompts = prompts

    def prepared(self, tokens: int, cached_tokens: int = 0) -> None:
        """Takes the tokens of a prompt that no request of the engine answers. Raises RateLimited."""
        self._use.take_prompts(tokens)
        self._use.give_back_cached(cached_tokens)

    def generated(self, tokens: int) -> None:
        self._use.take_answer(tokens)

    def admitted(self, index: int, cached_tokens: int) -> None:
        """Learns how much of a prompt was found in the cache. Further calls for one request change nothing."""
        if self._prompts.pop(index, None) is not None and cached_tokens:
            self._use.give_back_cached(cached_tokens)
