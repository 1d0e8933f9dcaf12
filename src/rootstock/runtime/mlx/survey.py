"""Survey of an mlx-lm model: the caches that it makes for itself tell the families, a probe tells the shapes.

A model of mlx-lm makes one cache for each layer. The cache's type says which positions the layer sees. A forward of a
few tokens through watched caches shows the K and V that each layer gives to its cache, and the states that it leaves
in it. A second forward with another number of tokens shows whether a state's size depends on that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_cache

from rootstock.cache.families import (
    ChunkedAttention,
    Family,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    TokenFamily,
    token_families,
)

CachePath = tuple[int, ...]
"""Place of a cache in the tree of a model's caches: (layer,), and an index more in each CacheList."""

_PROBE_TOKENS = (1, 5)  # a state may keep the last few tokens, as many as there are
# A subclass of one of them may keep something else.
_KNOWN = (
    mlx_cache.KVCache,
    mlx_cache.ConcatenateKVCache,
    mlx_cache.RotatingKVCache,
    mlx_cache.ChunkedKVCache,
    mlx_cache.ArraysCache,
)


class UnsupportedModel(Exception):
    """Error: the model keeps something that the pools cannot hold. Its text is the reason, after the model's name."""


@dataclass(frozen=True, slots=True)
class MlxLayerShape:
    """Tensors that one attention layer keeps of a position, as the probe observed them."""

    family: int  # index into the model's token families
    heads: int  # of K and V
    key_dim: int
    value_dim: int  # 0: the layer keeps K alone, as an indexer of sparse attention does
    dtype: mx.Dtype
    shares_values: bool  # V is K, which is kept once
    is_quantized: bool = False  # K and V are quantized to int8, with a scale for each head

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Returns shape and dtype of the tensors of one position: K, V if there is another one, and the scales of
        both if they are quantized."""
        widths = [(self.heads, self.key_dim)]
        if self.value_dim and not self.shares_values:
            widths.append((self.heads, self.value_dim))
        kept: list[tuple[tuple[int, ...], mx.Dtype]] = [(width, self.kept_dtype) for width in widths]
        return [*kept, *(((self.heads,), mx.float32) for _ in widths)] if self.is_quantized else kept

    @property
    def is_latent(self) -> bool:
        """Returns whether K and V of all heads are made of the one vector that is kept, or whether it is an indexer's
        key. Plain K and V are two arrays of one width."""
        return self.heads == 1 and (self.shares_values or self.key_dim != self.value_dim)

    @property
    def kept_dtype(self) -> mx.Dtype:
        """Returns the dtype of K and V in the pool."""
        return mx.int8 if self.is_quantized else self.dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(math.prod(shape) * int(dtype.size) for shape, dtype in self.tensors)


@dataclass(frozen=True, slots=True)
class MlxStateShape:
    """Recurrent state of one layer, as the probe observed it."""

    shape: tuple[int, ...]  # of one sequence
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.size)


@dataclass(frozen=True, slots=True)
class MlxLayout:
    """Everything that a model keeps between two forwards."""

    families: tuple[Family, ...]  # the full one first, the states last
    layers: Mapping[CachePath, MlxLayerShape]
    # The arrays of each recurrent layer. None: an array that the model never sets.
    states: Mapping[CachePath, tuple[MlxStateShape | None, ...]]
    vocab_size: int

    @property
    def has_states(self) -> bool:
        return bool(self.states)

    def with_quantized_rows(self) -> MlxLayout:
        """Returns the layout with pools that keep K and V in int8, except latents and the indexers' keys."""
        layers = {
            path: replace(shape, is_quantized=not shape.is_latent) for path, shape in self.layers.items()
        }
        rules = token_families(self.families)
        return replace(self, families=(*_sized(rules, layers), *self.families[len(rules) :]), layers=layers)


def survey(model: nn.Module, *, evaluates: bool = True) -> MlxLayout:
    """Runs the model on a few tokens and returns the layout of its caches. Raises UnsupportedModel.

    Shapes and dtypes are known without an evaluation, before the weights are read.
    """
    seen = _probe(model, _PROBE_TOKENS[0], evaluates=evaluates)
    if seen != _probe(model, _PROBE_TOKENS[1], evaluates=evaluates):
        raise UnsupportedModel("keeps states whose size depends on the number of tokens")
    rules = sorted(
        dict.fromkeys(kept.rule for kept in seen.kept.values()),
        key=lambda r: not isinstance(r, FullAttention),
    )
    layers = {
        path: MlxLayerShape(
            rules.index(kept.rule), kept.heads, kept.key_dim, kept.value_dim, kept.dtype, kept.shares_values
        )
        for path, kept in sorted(seen.kept.items())
    }
    families: list[Family] = _sized(rules, layers)
    states = {path: shapes for path, shapes in sorted(seen.states.items()) if any(shapes)}
    if states:
        nbytes = sum(shape.nbytes for shapes in states.values() for shape in shapes if shape is not None)
        families.append(RecurrentState(len(states), nbytes))
    if not families:
        raise UnsupportedModel("keeps no memory between forwards")
    return MlxLayout(tuple(families), layers, states, seen.vocab_size)


def _sized(rules: Sequence[TokenFamily], layers: Mapping[CachePath, MlxLayerShape]) -> list[Family]:
    """Returns the families with the numbers and bytes of their layers."""
    families: list[Family] = []
    for number, rule in enumerate(rules):
        its = [shape for shape in layers.values() if shape.family == number]
        families.append(replace(rule, layers=len(its), bytes_per_token=sum(s.bytes_per_token for s in its)))
    return families


def caches_of(tree: Any, path: CachePath = ()) -> Iterator[tuple[CachePath, Any]]:
    """Yields the caches in a tree of lists and CacheLists, with their places. A layer without a cache has None."""
    inner = _inner(tree)
    if inner is None:
        yield path, tree
    else:
        for index, child in enumerate(inner):
            yield from caches_of(child, (*path, index))


def replaced(tree: Any, replacement: Callable[[CachePath, Any], Any], path: CachePath = ()) -> Any:
    """Returns the same tree with other caches."""
    inner = _inner(tree)
    if inner is None:
        return replacement(path, tree)
    made = [replaced(child, replacement, (*path, index)) for index, child in enumerate(inner)]
    return made if isinstance(tree, list) else mlx_cache.CacheList(*made)


def _inner(tree: Any) -> Any:
    if isinstance(tree, list):
        return tree
    return tree.caches if isinstance(tree, mlx_cache.CacheList) else None


def _rule_of(cache: Any) -> TokenFamily | None:
    """Returns the family of a cache's type, without its sizes; None for recurrent states. Raises UnsupportedModel."""
    if type(cache) not in _KNOWN:
        raise UnsupportedModel(f"keeps a {type(cache).__name__}, which this version does not know")
    match cache:
        case mlx_cache.RotatingKVCache() if cache.keep:
            raise UnsupportedModel(f"keeps the first {cache.keep} positions beside a window")
        case mlx_cache.RotatingKVCache():
            return SlidingWindow(1, 1, int(cache.max_size))
        case mlx_cache.ChunkedKVCache():
            return ChunkedAttention(1, 1, int(cache.chunk_size))
        case mlx_cache.KVCache() | mlx_cache.ConcatenateKVCache():
            return FullAttention(1, 1)
    return None


@dataclass(frozen=True, slots=True)
class _ObservedLayer:
    rule: TokenFamily
    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    shares_values: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    kept: dict[CachePath, _ObservedLayer]
    states: dict[CachePath, tuple[MlxStateShape | None, ...]]
    vocab_size: int


def _probe(model: nn.Module, tokens: int, *, evaluates: bool) -> _Seen:
    """Runs the model on `tokens` tokens with caches that note the K and V that they are given."""
    watched: dict[CachePath, _WatchedCache] = {}
    recurrent: dict[CachePath, Any] = {}

    def watch(path: CachePath, cache: Any) -> Any:
        if cache is None:
            return None
        if _rule_of(cache) is None:
            recurrent[path] = cache
            return cache
        watched[path] = _WatchedCache(cache)
        return watched[path]

    caches = replaced(mlx_cache.make_prompt_cache(model), watch)
    logits = model(mx.arange(1, tokens + 1)[None], cache=caches)
    if evaluates:
        mx.eval(logits, [cache.cache for cache in recurrent.values()])
    return _Seen(
        {path: _kept(cache, tokens) for path, cache in watched.items() if cache.given},
        {path: tuple(_state_shape(state) for state in cache.cache) for path, cache in recurrent.items()},
        int(logits.shape[-1]),
    )


def _kept(cache: _WatchedCache, tokens: int) -> _ObservedLayer:
    if len(cache.given) > 1:
        raise UnsupportedModel("gives K and V to a cache more than once in a forward")
    keys, values = cache.given[0]
    for array in (keys, values):
        if array.ndim != 4 or array.shape[0] != 1 or array.shape[2] != tokens:
            raise UnsupportedModel(f"gives a cache an array of shape {list(array.shape)} for {tokens} tokens")
    if keys.dtype != values.dtype or keys.shape[1] != values.shape[1]:
        raise UnsupportedModel("gives a cache K and V of different dtypes or numbers of heads")
    rule = _rule_of(cache.inner)
    assert rule is not None
    return _ObservedLayer(rule, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys is values)


def _state_shape(state: mx.array | None) -> MlxStateShape | None:
    return None if state is None else MlxStateShape(tuple(state.shape[1:]), state.dtype)


class _WatchedCache:
    """Cache that notes the K and V that it is given, and is otherwise the one inside."""

    inner: Any
    given: list[tuple[mx.array, mx.array]]

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "given", [])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.given.append((keys, values))
        return self.inner.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)
