"""C2: faults of a disk, one to a case: no wrong token, no failed request, and each is counted as that fault.

The cases of tests/faults/disk_faults.py, of which `make test` runs a few of each kind.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import argument_parser, at_least, conclude, exactly

from faults.disk_faults import KINDS, run

MEMORY = Path("/dev/shm")  # where there is one: no power is cut here, and waiting for syncs shows nothing


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="one kind")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # warnings of faults that are injected on purpose
    tallies = {kind: Counter[str]() for kind in KINDS if args.only in (None, kind)}
    began = time.perf_counter()
    for kind, tally in tallies.items():
        for seed in range(args.first, args.first + args.cases):
            with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as temporary:
                case = run(kind, seed, Path(temporary) / "tier")
            for remark in case.remarks:
                print(f"{kind} {seed}: {remark}", flush=True)
            if case.wrong or case.failed:
                print(f"{kind} {seed}: {case.wrong} wrong, {case.failed} failed", flush=True)
            tally["cases"] += 1
            tally["wrong"] += case.wrong
            tally["miscounted"] += bool(case.remarks)
            tally["failed_requests"] += case.failed
            tally["loaded_tokens"] += case.loaded_tokens
            tally["found_before_a_request"] += case.struck_by_probe  # at start, or measuring
        print(f"{kind}: {dict(tally)} after {time.perf_counter() - began:.1f} s", flush=True)
    figures = {
        "kinds": len(tallies),
        "fewest_cases_of_a_kind": min(tally["cases"] for tally in tallies.values()),
        "seconds": round(time.perf_counter() - began, 1),
        **{name: sum(tally[name] for tally in tallies.values()) for name in next(iter(tallies.values()))},
    }
    bars = {
        "kinds": exactly(len(KINDS)),
        "fewest_cases_of_a_kind": at_least(200),
        **dict.fromkeys(("wrong", "miscounted", "failed_requests"), exactly(0)),
    }
    conclude("C2", figures, bars)


if __name__ == "__main__":
    main()
