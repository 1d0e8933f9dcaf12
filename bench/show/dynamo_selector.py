"""Dynamo's selection service on a command line: which blocks it believes that each worker has.

Runs on an interpreter of its own, with ai-dynamo-runtime, which pins other versions of packages than Rootstock
does. The first line of its input has the workers, as {"block_size": …, "workers": [{"events": ADDRESS, "replay":
ADDRESS}]}. Each further line is a prompt's token ids, as a JSON list. The answer is a line with the blocks of each
worker."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def main() -> None:
    from dynamo.llm import SelectionService

    setup = json.loads(sys.stdin.readline())
    service: Any = SelectionService(indexer_threads=1)
    for number, worker in enumerate(setup["workers"], 1):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": "model",
                "tenant_id": "tenant",
                "endpoint": f"none://{number}",
                "block_size": setup["block_size"],
                "max_num_batched_tokens": 512,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {0: worker["events"]},
                "replay_endpoint": worker["replay"],
            }
        )
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = {"model_name": "model", "tenant_id": "tenant", "token_ids": json.loads(line)}
        scores = await service.overlap_scores(asked)
        blocks = {each["worker_id"]: each["device_blocks"] for each in scores["workers"]}
        print(
            json.dumps([blocks.get(number, 0) for number in range(1, len(setup["workers"]) + 1)]), flush=True
        )
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
