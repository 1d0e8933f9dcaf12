"""Identity: what may share cached bytes with what, and content keys for whoever needs to name a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock.cache.plan import Tokens


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for KV to be interchangeable. Different namespaces never share a byte."""

    weights: str  # fingerprint of the loaded weights
    kv_dtype: str
    rope_regime: str = ""  # what the frequencies depend on, where that is not the weights alone
    adapter: str = ""
    salt: str = ""  # tenant: an isolation boundary chosen by the caller
    is_private: bool = False  # kept in memory only, and nobody else can name it

    @classmethod
    def of_model(
        cls, weights_fingerprint: str, layout: str, dtype: str, kv_dtype: str, rope_regime: str
    ) -> Namespace:
        """Returns the namespace of a loaded model, without a salt.

        The dtype of the computation is a part: float32 rows computed in bfloat16 differ from those computed in
        float32.
        """
        return cls(
            weights=weights_fingerprint + (f"/{layout}" if layout else ""),
            kv_dtype=f"{dtype}:{kv_dtype}",
            rope_regime=rope_regime,
        )

    def digest(self) -> bytes:
        """16 bytes; fields are length-prefixed, so that no two namespaces spell the same input."""
        parts = [self.weights, self.kv_dtype, self.rope_regime, self.adapter, self.salt]
        if self.is_private:
            parts.append("private")
        h = xxhash.xxh3_128()
        for part in parts:
            raw = part.encode()
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
        return h.digest()


def prefix_digest(namespace: Namespace, prefix: Tokens) -> bytes:
    """16 bytes that name exactly these tokens from position 0 on, in exactly this namespace."""
    h = xxhash.xxh3_128(namespace.digest())
    h.update(np.ascontiguousarray(prefix, "<i4").data)
    return h.digest()


def block_keys(namespace: Namespace, tokens: Tokens, block_tokens: int) -> Iterator[bytes]:
    """Content keys of the whole blocks of `tokens`: key[i] = xxh3-128(key[i-1] | tokens of block i).

    key[-1] is the namespace's digest. A key therefore names the whole prefix up to the end of its block: equal
    keys mean equal prefixes in equal namespaces (up to 2^-64 by the birthday bound). For tiers and routing;
    the tree itself compares tokens and hashes nothing.
    """
    key = namespace.digest()
    raw = memoryview(tokens.astype("<i4", copy=False).tobytes())
    step = block_tokens * 4
    for start in range(0, len(raw) - step + 1, step):
        h = xxhash.xxh3_128(key)
        h.update(raw[start : start + step])
        key = h.digest()
        yield key
