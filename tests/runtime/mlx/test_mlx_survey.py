"""The survey of an mlx-lm model: what it keeps, and the caches that are refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as mlx_cache

from mlx_checkpoints import make_mlx_model
from rootstock.cache.families import ChunkedAttention, Family, FullAttention, RecurrentState, SlidingWindow
from rootstock.runtime.mlx.survey import UnsupportedModel, survey

OF_LAYER = 2 * 4 * 16 * 4  # bytes of K and V in float32, with 4 heads of 16
OF_SHARED_HEADS = OF_LAYER // 2
LATENTS = 4 * (32 + 8)  # and RoPE's part, which all heads share


@pytest.mark.parametrize(
    ("kind", "families"),
    [
        ("llama", [FullAttention(3, 3 * OF_LAYER)]),
        (
            "gemma3_text",
            [FullAttention(2, 2 * OF_SHARED_HEADS), SlidingWindow(2, 2 * OF_SHARED_HEADS, window=7)],
        ),
        ("llama4", [FullAttention(1, OF_SHARED_HEADS), ChunkedAttention(3, 3 * OF_SHARED_HEADS, chunk=8)]),
        ("deepseek_v3", [FullAttention(4, 4 * LATENTS)]),
        ("mamba", [RecurrentState(4, 4 * 4 * (128 * 16 + 3 * 128))]),
    ],
)
def test_the_families_of_a_model(kind: str, families: list[Family]) -> None:
    assert list(survey(make_mlx_model(kind)).families) == families


class Model(nn.Module):
    """Model with one cache, that does with it what a test asks for."""

    def __init__(self, cache: Any, use: Callable[[Any, int], object]) -> None:
        super().__init__()
        self.layers = [None]
        self._made = cache
        self._use = use

    def make_cache(self) -> list[Any]:
        return [self._made]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self._use(cache[0], tokens.shape[1])
        return mx.zeros((1, tokens.shape[1], 7))


def write(cache: Any, tokens: int) -> None:
    cache.update_and_fetch(mx.zeros((1, 2, tokens, 8)), mx.zeros((1, 2, tokens, 8)))


class AnotherCache(mlx_cache.KVCache):
    """Cache that may keep something else than the one it is made from."""


class NoCache:
    """Cache of another library."""


@pytest.mark.behaviour(22)
@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (NoCache(), "keeps a NoCache, which this version does not know"),
        (AnotherCache(), "keeps a AnotherCache, which this version does not know"),
        (mlx_cache.QuantizedKVCache(), "keeps a QuantizedKVCache, which this version does not know"),
        (mlx_cache.RotatingKVCache(8, keep=4), "keeps the first 4 positions beside a window"),
        (mlx_cache.CacheList(mlx_cache.KVCache(), NoCache()), "keeps a NoCache"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_cache_of_an_unknown_kind_is_refused_by_its_name(cache: Any, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        survey(Model(cache, lambda cache, tokens: None))


def twice(cache: Any, tokens: int) -> None:
    write(cache, tokens)
    write(cache, tokens)


def more_positions(cache: Any, tokens: int) -> None:
    write(cache, 2 * tokens)


def unlike(cache: Any, tokens: int) -> None:
    cache.update_and_fetch(mx.zeros((1, 2, tokens, 8)), mx.zeros((1, 2, tokens, 8), mx.float16))


def growing(cache: Any, tokens: int) -> None:
    cache[0] = mx.zeros((1, tokens, 4))


def last_tokens(cache: Any, tokens: int) -> None:
    cache[0] = mx.zeros((1, min(tokens, 3), 4))


@pytest.mark.behaviour(22)
@pytest.mark.parametrize(
    ("cache", "use", "said"),
    [
        (mlx_cache.KVCache(), twice, "gives K and V to a cache more than once in a forward"),
        (mlx_cache.KVCache(), more_positions, r"gives a cache an array of shape \[1, 2, 2, 8\] for 1 tokens"),
        (mlx_cache.KVCache(), unlike, "K and V of different dtypes or numbers of heads"),
        (mlx_cache.ArraysCache(1), growing, "keeps states whose size depends on the number of tokens"),
        (mlx_cache.ArraysCache(1), last_tokens, "keeps states whose size depends on the number of tokens"),
        (mlx_cache.ArraysCache(1), lambda cache, tokens: None, "keeps no memory between forwards"),
    ],
    ids=["twice", "more positions", "unlike", "growing", "last tokens", "nothing"],
)
def test_a_known_cache_that_is_used_in_another_way_is_refused(
    cache: Any, use: Callable[[Any, int], object], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        survey(Model(cache, use))


def test_values_that_are_the_keys_are_kept_once() -> None:
    def shared(cache: Any, tokens: int) -> None:
        latents = mx.zeros((1, 1, tokens, 8))
        cache.update_and_fetch(latents, latents)

    layout = survey(Model(mlx_cache.KVCache(), shared))
    assert layout.families == (FullAttention(1, 8 * 4),)
