"""Cases that schemathesis generates from a server's OpenAPI document: `python schemathesis_cases.py URL CASES`.

For the interpreter that has schemathesis; it imports nothing of Rootstock. Prints one line of JSON for each
operation: its cases, its answers by status, and its failures. Half of the cases hold valid values, half invalid ones.
Where an operation can stream, half of its cases ask for a stream.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HANGS_AFTER_S = 120.0
MOST_SHOWN = 5  # failures of an operation


def main() -> None:
    url, cases = sys.argv[1], int(sys.argv[2])
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    # An operation without a body has few different cases: the others get its share.
    bodied = [one for one in operations if one.body]
    few = max(1, cases // (10 * len(operations)))
    many = -(-(cases - few * (len(operations) - len(bodied))) // max(1, len(bodied)))
    for operation in operations:
        print(json.dumps(check(operation, many if operation.body else few)), flush=True)


def check(operation: Any, cases: int) -> dict[str, Any]:
    statuses, failures = Counter[str](), list[str]()
    began, session = time.monotonic(), requests.Session()
    streams = "text/event-stream" in operation.definition.raw["responses"].get("200", {}).get("content", {})

    def ask(case: Any, as_stream: bool) -> None:
        if streams and isinstance(case.body, dict):
            case.body = {**case.body, "stream": as_stream}
        try:
            response = case.call(session=session, timeout=HANGS_AFTER_S)
        except requests.Timeout:
            statuses["hang"] += 1
            failures.append(f"no answer in {HANGS_AFTER_S:.0f} s: {case.as_curl_command()}"[:2000])
            return
        except (requests.RequestException, ValueError) as error:
            statuses[type(error).__name__] += 1  # by the client: such a request cannot be sent
            if isinstance(error, requests.ConnectionError):
                failures.append(f"{error}: {case.as_curl_command()}"[:2000])
            return
        kind = response.headers.get("content-type", [""])[0].partition(";")[0]
        statuses[f"{response.status_code}{' stream' if kind == 'text/event-stream' else ''}"] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except Exception as error:  # an ExceptionGroup of schemathesis's failures
            failures.append(f"{response.status_code} {error}: {case.as_curl_command()}"[:2000])

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
            continue  # schemathesis finds nothing to make invalid
        half = cases // 2 if mode is GenerationMode.POSITIVE else cases - cases // 2
        run = given(case=operation.as_strategy(generation_mode=mode), as_stream=st.booleans())(ask)
        settings(
            max_examples=half,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(run)()
    return {
        "operation": operation.label,
        "cases": statuses.total(),
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(statuses.most_common()),
        "failures": len(failures),
        "first": failures[:MOST_SHOWN],
    }


if __name__ == "__main__":
    main()
