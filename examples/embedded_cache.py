"""Use the cache in an engine of your own, without torch: python examples/embedded_cache.py

docs/embedding.md explains each step. The model is one layer of attention over random weights.
"""

import numpy as np

from rootstock.cache import Admitted, FullAttention, KVCache, Namespace, ReleaseReason

DIM, VOCAB, BLOCK = 32, 97, 8
rng = np.random.default_rng(0)
embedding, head = (rng.normal(size=shape).astype(np.float32) for shape in ((VOCAB, DIM), (DIM, VOCAB)))
w_k, w_v = (rng.normal(size=(DIM, DIM)).astype(np.float32) for _ in range(2))

family = FullAttention(layers=1, bytes_per_token=2 * DIM * 4)
cache = KVCache([family], budget_bytes=64 * BLOCK * family.bytes_per_token, block_size=BLOCK)
keys, values = (np.zeros((cache.rows[0], BLOCK, DIM), np.float32) for _ in range(2))
namespace = Namespace(weights="one random layer", kv_dtype="float32")


def forward(tokens: np.ndarray, past: int, table: np.ndarray) -> int:
    """Writes K and V of `tokens`, attends from the last one through the block table, returns the next token."""
    new, every = np.arange(past, past + len(tokens)), np.arange(past + len(tokens))
    keys[table[new // BLOCK], new % BLOCK] = embedding[tokens] @ w_k
    values[table[new // BLOCK], new % BLOCK] = embedding[tokens] @ w_v
    k, v = (pool[table[every // BLOCK], every % BLOCK] for pool in (keys, values))
    scores = np.exp(k @ embedding[tokens[-1]] / DIM)
    return int((scores @ v / scores.sum() @ head).argmax())


def generate(prompt: list[int], count: int) -> list[int]:
    admitted = cache.admit(cache.match(np.array(prompt, np.int32), namespace))
    assert isinstance(admitted, Admitted), "no room: wait until another request ends"
    lease, answer = admitted.lease, []
    for copy in admitted.plan.copies:  # of the block in which the prompt leaves a cached prefix
        for pool in (keys, values):
            pool[copy.target, : copy.tokens] = pool[copy.source, : copy.tokens]
    print(f"{lease.hit_tokens} of {len(prompt)} prompt tokens cached")
    tokens = lease.tokens[lease.num_computed_tokens :]
    while len(answer) < count:
        cache.extend(lease, len(tokens))
        answer.append(forward(tokens, lease.num_computed_tokens, lease.table))
        cache.commit(lease, tokens)
        tokens = np.array(answer[-1:], np.int32)
    cache.release(lease, ReleaseReason.FINISHED)
    return answer


prompt = rng.integers(VOCAB, size=40).tolist()
assert generate(prompt, 6) == generate(prompt, 6)
print(generate([*prompt[:21], 1, 2, 3], 6))
print(cache.explain(np.array([*prompt[:21], 1, 9], np.int32), namespace).message)
