"""E2: no token, text or count of one tenant in an answer to another, on any route, with and without keys.

Random requests of two tenants against a server of both, and against a twin that only one of them uses: every answer
to that one must be equal but for ids and times. This is the property of tests/property/test_tenants.py, with more
examples and random seeds. Routes that the sequences do not reach are asked by both tenants, one after the other.
"""

from __future__ import annotations

import logging
import time

from common import argument_parser, at_least, conclude, exactly
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

OF_A_ROUTE = 10  # examples of each route that the random sequences do not reach


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--examples", type=int, default=200, help="of each setting and kind of model")
    parser.add_argument("--seed", type=int, default=12, help="of the examples")
    args = parser.parse_args()
    from property.tenants import (
        FAMILIES,
        NOT_COMPARED,
        ROUTES,
        SETTINGS,
        STEPS,
        Ask,
        Name,
        Twins,
        routes_of,
        twins,
    )

    logging.disable(logging.CRITICAL)

    def run(pair: Twins, first: int, count: int, sequences: st.SearchStrategy[list[tuple[Name, Ask]]]) -> int:
        played = 0

        @seed(first)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(steps=sequences)
        def example(steps: list[tuple[Name, Ask]]) -> None:
            nonlocal played
            played += 1
            pair.play(steps)

        example()
        return played

    began = time.perf_counter()
    examples = compared = cached_tokens = leaks = uncovered = 0
    for setting in SETTINGS:
        for kind, families in FAMILIES.items():
            with twins(setting, families) as pair:
                uncovered += len(routes_of(pair.both.app) ^ (set(ROUTES) | set(NOT_COMPARED)))
                open_routes = {(m, route) for m, route in ROUTES if route not in setting.totals}
                try:
                    examples += run(pair, args.seed * 1000 + examples, args.examples, STEPS)
                    for route in sorted(open_routes - pair.routes):  # that the draws have left out
                        both = [st.tuples(st.just(name), ROUTES[route]) for name in ("B", "A")]
                        run(pair, args.seed, OF_A_ROUTE, st.tuples(*both).map(list))
                except AssertionError as error:
                    leaks += 1
                    print(f"{setting.name}, {kind}: {error}", flush=True)
                uncovered += len(open_routes - pair.routes)
                compared, cached_tokens = compared + pair.compared, cached_tokens + pair.cached_tokens
                print(f"{setting.name}, {kind}: {pair.compared} answers compared", flush=True)
    conclude(
        "E2",
        {
            "settings": len(SETTINGS) * len(FAMILIES),
            "routes": len(ROUTES),
            "examples": examples,
            "answers_compared": compared,
            "cached_tokens_reported": cached_tokens,
            "settings_with_a_leak": leaks,
            "routes_not_compared": uncovered,
            "seconds": round(time.perf_counter() - began, 1),
        },
        {
            "settings_with_a_leak": exactly(0),
            "routes_not_compared": exactly(0),
            "answers_compared": at_least(10 * args.examples),
            "cached_tokens_reported": at_least(1),
        },
    )


if __name__ == "__main__":
    main()
