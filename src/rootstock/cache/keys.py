"""Cache namespaces and content hashes of prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock.cache.types import Tokens


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal for K/V to be interchangeable. Different namespaces never share a byte."""

    weights: str  # fingerprint of the loaded weights
    kv_dtype: str
    rope_regime: str = ""  # the part of the RoPE frequencies that does not follow from the weights
    adapter: str = ""
    salt: str = ""  # of the tenant: an isolation boundary chosen by the caller
    is_private: bool = False  # kept in memory only; no other request can name it

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
        """16 bytes. Fields are length-prefixed, so that no two namespaces hash the same input."""
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
    """Returns 16 bytes that name exactly these tokens from position 0 on, in exactly this namespace.

    Equal digests mean equal prefixes in equal namespaces, up to 2^-64 by the birthday bound. Tiers use them; the
    tree compares tokens and hashes nothing.
    """
    h = xxhash.xxh3_128(namespace.digest())
    h.update(np.ascontiguousarray(prefix, "<i4").data)
    return h.digest()
